// Prints a digest of what each function of the kernels makes of the same made-up numbers: one line a function. What is compiled for AVX2
// and for NEON has to print the same.

#include <cstdio>
#include <limits>

#include "products/linear.hpp"

namespace {

// Numbers from -1 to 1 and some that are large, small, or none, the same on each machine.
class MadeUp {
    uint64_t state;

   public:
    explicit MadeUp(uint64_t seed) : state(seed) {}
    uint32_t word() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return uint32_t(state >> 32);
    }
    float number() { return float(int32_t(word())) * 0x1p-31f; }
    float any() {
        constexpr float INFINITE = std::numeric_limits<float>::infinity();
        constexpr float SPECIAL[] = {0.f, -0.f, 1e-40f, -1e-40f, 3e38f, -3e38f, INFINITE, -INFINITE, 0.5f, -2.5f, 200.f, -200.f};
        if (word() % 4 == 0) return SPECIAL[word() % 12];
        const float values[] = {number(), number() * 10.f, number() * 100.f, number() * 1e30f, number() * 1e-30f};
        return values[word() % 5];
    }
    uint16_t bfloat16() {
        const float value = number();
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        return uint16_t(bits >> 16);
    }
};

class Digest {
    uint64_t sum = 14695981039346656037u;

   public:
    void add(const void* from, size_t bytes) {
        for (size_t i = 0; i < bytes; ++i) sum = (sum ^ static_cast<const uint8_t*>(from)[i]) * 1099511628211u;
    }
    void add(Floats value) {
        uint32_t all[LANES];
        store(reinterpret_cast<float*>(all), value);
        for (auto& bits : all)
            if ((bits & 0x7fffffff) > 0x7f800000) bits = 0x7fc00000;  // what is no number may have any sign
        add(all, sizeof(all));
    }
    void add(Words value) {
        int32_t all[LANES];
        store(static_cast<void*>(all), value);
        add(all, sizeof(all));
    }
    void add(float value) { add(filled(value)); }
    void add(double value) { value == value ? add(&value, sizeof(value)) : add(0); }
    void add(int value) { add(&value, sizeof(value)); }
    void add(Mask value) { add(int(value)); }
    void print(const char* name) const { std::printf("%s %016lx\n", name, (unsigned long)sum); }
};

constexpr int ROUNDS = 2000;

// What a function makes of three vectors of any numbers and a mask.
template <class Function>
void try_floats(const char* name, Function function, bool any = true) {
    MadeUp made(7);
    Digest digest;
    for (int round = 0; round < ROUNDS; ++round) {
        float numbers[3][LANES];
        for (auto& vector : numbers)
            for (float& number : vector) number = any ? made.any() : made.number();
        digest.add(function(load(numbers[0]), load(numbers[1]), load(numbers[2]), Mask(made.word())));
    }
    digest.print(name);
}

template <class Function>
void try_words(const char* name, Function function) {
    MadeUp made(8);
    Digest digest;
    for (int round = 0; round < ROUNDS; ++round) {
        uint32_t words[2][LANES];
        for (auto& vector : words)
            for (uint32_t& word : vector) word = made.word() >> made.word() % 32;
        digest.add(function(load_words(words[0]), load_words(words[1]), Mask(made.word())));
    }
    digest.print(name);
}

void try_vectors() {
#define TRY(name, ...) try_floats(name, []([[maybe_unused]] Floats a, [[maybe_unused]] Floats b, [[maybe_unused]] Floats c, [[maybe_unused]] Mask m) { return __VA_ARGS__; })
    TRY("plus", a + b);
    TRY("minus", a - b);
    TRY("times", a * b);
    TRY("over", a / b);
    TRY("fmadd", fmadd(a, b, c));
    TRY("fmsub", fmsub(a, b, c));
    TRY("fnmadd", fnmadd(a, b, c));
    TRY("maximum", maximum(a, b));
    TRY("maximum of some", maximum(a, b, m));
    TRY("maximum without number", maximum(a - a, b));
    TRY("minimum", minimum(a, b));
    TRY("minimum without number", minimum(b, a - a));
    TRY("add some", add(a, b, m));
    TRY("only", only(m, a));
    TRY("picked", picked(m, a, b));
    TRY("to integers", to_integers(a));
    TRY("twice", twice(a, 0) - twice(b, 1));
    TRY("in turn", in_turn(a, b, 0) - in_turn(a, b, 1));
    TRY("looked up", looked_up(a, as_words(b)));
    TRY("greatest", greatest_of(a));
    TRY("sum", sum_of(a));
    TRY("sum of some", sum_of(a, m));
    TRY("sum of doubles", sum_of(add(add(Doubles{}, a), b)) == 0 ? 0. : 1. / sum_of(add(add(Doubles{}, only(m, c)), c)));
    TRY("less", is_less(a, b));
    TRY("at most", is_at_most(a, b));
    TRY("equal", is_equal(a, b));
    TRY("at least", is_at_least(a, b));
    TRY("greater", is_greater(a, b));
    TRY("no number", is_nan(a - b));
    TRY("power of 2", times_power_of_2(a, to_integers(b)));
    TRY("exponents", exponents(maximum(a, filled(1e-20f))));
    TRY("bfloat16", rounded_to_bfloat16(a));
    TRY("to words", to_words(maximum(minimum(a, filled(1e6f)), filled(-1e6f))));
    TRY("exp", exp_ps(a));
    TRY("exp2", exp2_ps<Float>(a));
    TRY("exp2 of bfloat16", exp2_ps<BFloat16>(a));
    TRY("tanh", tanh_ps(a));
    TRY("silu", silu_ps(a));
    TRY("softplus", softplus_ps(a));
    const float with[] = {0.8f, 0.3f, 0.5f};
    for (int64_t kind = LINEAR_ONLY; kind <= SIGMOID; ++kind) {
        if (kind == CLIPPED) continue;
        try_floats("activation", [&](Floats a, Floats, Floats, Mask) { return activated(kind, a, with); });
    }
    try_floats("clipped", [&](Floats a, Floats b, Floats, Mask) { return gated(CLIPPED, a, b, with); });
#undef TRY
#define TRY(name, ...) try_words(name, []([[maybe_unused]] Words a, [[maybe_unused]] Words b, [[maybe_unused]] Mask m) { return __VA_ARGS__; })
    TRY("add words", add_words(a, b));
    TRY("subtract words", subtract_words(a, b));
    TRY("multiply words", multiply_words(a, b));
    TRY("xor words", xor_words(a, b));
    TRY("left", shift_left<7>(a));
    TRY("right", shift_right<7>(a));
    TRY("right by", shift_right(a, 5));
    TRY("right with sign", shift_right_signed<7>(a));
    TRY("least", least_of(a, m));
    TRY("equal words", is_equal(a, and_words(a, b)));
    TRY("less words", is_less(a, b));
    TRY("clamped", clamped(a, -70, 250));
    TRY("converted", converted(a));
    TRY("picked words", picked(m, a, b));
    TRY("halves", load_halves(&a) - load_halves(reinterpret_cast<const char*>(&b) + 32));
    TRY("int8", load_int8(reinterpret_cast<const int8_t*>(&a)));
    TRY("bytes", BytesParts::madd(BytesParts::madd(as_floats(a), BytesParts::of<0>(b), as_floats(and_words(a, filled_words(0x00ff00ff)))),
                                  BytesParts::of<1>(b), as_floats(and_words(b, filled_words(0x00ff00ff)))));
#undef TRY
}

// Memory under masks: what is left out stays as it is, and what is written side by side.
void try_memory() {
    MadeUp made(9);
    Digest digest;
    for (int round = 0; round < ROUNDS; ++round) {
        float from[LANES], to[2 * LANES];
        for (float& number : from) number = made.number();
        for (float& number : to) number = made.number();
        const Mask lanes = Mask(made.word());
        store(to, load(from, lanes, filled(2.f)), Mask(made.word()));
        store_bfloat16(reinterpret_cast<uint16_t*>(to), load_bfloat16(reinterpret_cast<uint16_t*>(from), lanes), Mask(made.word()));
        store_bytes(reinterpret_cast<uint8_t*>(to + 12), clamped(to_words(load(from) * filled(300.f)), 0, 255));
        store_int8(reinterpret_cast<int8_t*>(to + 8), clamped(to_words(load(from) * filled(300.f)), -128, 127));
        store_halves(reinterpret_cast<uint32_t*>(to + LANES), reinterpret_cast<uint16_t*>(from), made.word() % 2);
        digest.add(load(to)), digest.add(load(to + LANES));
        store_only(to, load(from), lanes);
        digest.add(to, 4 * size_t(__builtin_popcount(lanes)));
    }
    digest.print("memory");
}

// A product of 1 to 20 rows, as it stands in a list of operations.
template <class T>
void try_linear(const char* name, int64_t n, int64_t k, int64_t parts, int64_t activation) {
    MadeUp made(10);
    Digest digest;
    const int64_t panels = (n + LANES - 1) / LANES + 1, words = panels * (k / T::PACK) * LANES;
    std::vector<uint32_t> weights(static_cast<size_t>(words));
    for (uint32_t& word : weights) {
        const float value = made.number();
        if (T::PACK == 2) word = uint32_t(made.bfloat16()) << 16 | made.bfloat16();
        else std::memcpy(&word, &value, 4);
    }
    std::vector<float> bias(static_cast<size_t>(n));
    for (float& each : bias) each = made.number();
    const float with[] = {0.8f, 0.3f, 0.5f};
    for (int64_t rows = 1; rows <= 20; ++rows) {
        using E = typename T::Element;
        const int64_t more = (rows + TILE - 1) / TILE * TILE;  // inputs can be read up to a whole tile
        std::vector<E> in(size_t(more * pitch_of<T>(k))), out(size_t(more * pitch_of<T>(n)));
        for (E& each : in) {
            if constexpr (T::PACK == 2) each = made.bfloat16();
            else each = made.number();
        }
        Operation op{};
        op.kind = LINEAR, op.in = in.data(), op.out = out.data(), op.weights = weights.data(), op.more = bias.data(), op.extra = with;
        op.n = n, op.k = k, op.b = parts, op.c = activation, op.number = 0.7;
        Step step{};
        step.tokens = rows;
        std::atomic<int64_t> taken{0};
        Work work{taken, 1, {}};
        linear<T>(op, step, work);
        digest.add(out.data(), out.size() * sizeof(E));
    }
    digest.print(name);
}

}  // namespace

int main() {
    try_vectors();
    try_memory();
    try_linear<Float>("linear of floats", 72, 96, 1, LINEAR_ONLY);
    try_linear<Float>("linear of floats in parts", 64, 128, 4, GELU);
    try_linear<BFloat16>("linear of bfloat16", 72, 96, 1, LINEAR_ONLY);
    try_linear<BFloat16>("linear of bfloat16 in parts", 64, 128, 4, SILU);
}
