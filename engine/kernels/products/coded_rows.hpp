// Products of rows with panels of codes without AVX-512: codes become floats in the registers that multiply them, on AVX2.
//
// A code is masked in its place among the bits of a word and converted there. So it is a power of two too large, which its scale takes
// back: one fused multiply-add takes the zero point off and multiplies by the scale. A number x that is 2^16 times too large is rounded to
// bfloat16 by two more operations: x - (x - x / 2^16) keeps eight bits of x / 2^16, since the difference in brackets has no more room. Ties
// go to the even one, as that difference does. This is so for all normal numbers (Veltkamp's splitting); which weights it holds for is found
// when they are laid out (Quantized::arithmetic). Others take the longer way of quantized.hpp.
//
// One or two rows go through codes. For more, blocks of inputs are widened into the first cache, and multiplied from there by all.

#pragma once

#include "quantized.hpp"

#if !LOCKSTEP_AVX512

namespace {

// Sums of ROWS rows with `count` inputs of a panel of floats, added to those that are there.
template <int ROWS>
void multiply_floats(const float* weights, int64_t count, const char* in, int64_t pitch, Floats (*sum)[2], int column) {
    constexpr int GROUP = 3;  // rows that share a pointer
    constexpr int GROUPS = (ROWS + GROUP - 1) / GROUP;
    const char* rows[GROUPS];
    for_each_of<GROUPS>([&](auto group) { rows[group] = in + GROUP * group * pitch; });
    Floats sums[ROWS];
    for_each_of<ROWS>([&](auto row) { sums[row] = sum[row][column]; });
    for (const float* end = weights + count * LANES; weights < end; weights += 2 * LANES) {
        for_each_of<2>([&](auto number) {
            Floats line = load(weights + number * LANES);
            if (ROWS > 1) line = as_it_is(line);  // in a register: the compiler would load it for each row
            for_each_of<ROWS>([&](auto row) {
                sums[row] = fmadd(line, filled(*reinterpret_cast<const float*>(rows[row / GROUP] + row % GROUP * pitch + 4 * number)), sums[row]);
            });
        });
        for_each_of<GROUPS>([&](auto group) { rows[group] += 2 * sizeof(float); });
    }
    for_each_of<ROWS>([&](auto row) { sum[row][column] = sums[row]; });
}

inline void multiply_floats(int rows, const float* weights, int64_t count, const char* in, int64_t pitch, Floats (*sum)[2], int column) {
    static constexpr std::array OF{&multiply_floats<1>, &multiply_floats<2>, &multiply_floats<3>,
                                   &multiply_floats<4>, &multiply_floats<5>, &multiply_floats<6>};
    static_assert(OF.size() == MAX_ROWS);
    OF[size_t(rows) - 1](weights, count, in, pitch, sum, column);
}

// The same for any number of rows: as many at a time as fill the registers, evenly.
inline void multiply_rows(int64_t rows, const float* weights, int64_t count, const char* in, int64_t pitch, Floats (*sum)[2], int column) {
    for (int64_t passes = (rows + MAX_ROWS - 1) / MAX_ROWS, begin = 0, now; begin < rows; begin += now, --passes) {
        now = (rows - begin + passes - 1) / passes;
        multiply_floats(int(now), weights, count, in + begin * pitch, pitch, sum + begin, column);
    }
}

// A part of the inputs of a product: `count` of `whole`, from `begin` on.
struct Inputs { int64_t begin, count, whole; };

// Sums of rows, as floats `pitch` bytes apart, with a part of two panels of floats that lie one behind the other.
inline void multiply_float_rows(const float* panels, Inputs part, const char* in, int64_t pitch, int64_t rows, Floats (*sum)[2]) {
    for (int64_t row = 0; row < rows; ++row) sum[row][0] = sum[row][1] = filled(0.f);
    for (int column = 0; column < 2; ++column)
        multiply_rows(rows, panels + (column * part.whole + part.begin) * LANES, part.count, in + part.begin * int64_t(sizeof(float)), pitch, sum, column);
}

#ifdef __AVX2__

constexpr bool CAN_MULTIPLY_CODES = true;

// A register of words of codes, as registers that numbers are masked from. A number is UNIT^place too large, and BIAS more.
struct MaskedFourBits {
    static constexpr int BITS = 4, PLACES = 4, BIAS = 8;
    static constexpr float UNIT = 16;
    __m256i words[2];
    explicit MaskedFourBits(__m256i codes) : words{codes, _mm256_srli_epi32(codes, 16)} {}
    static constexpr int place(int number) { return number % 4; }
    template <int NUMBER>
    __m256 number() const {
        return _mm256_cvtepi32_ps(_mm256_and_si256(words[NUMBER / 4], _mm256_set1_epi32(15 << 4 * place(NUMBER))));
    }
};

struct MaskedBytes {
    static constexpr int BITS = 8, PLACES = 2, BIAS = 128;
    static constexpr float UNIT = 256;
    __m256i words[2];
    explicit MaskedBytes(__m256i codes) {
        words[0] = _mm256_xor_si256(codes, _mm256_set1_epi8(char(0x80)));
        words[1] = _mm256_srli_epi32(words[0], 16);
    }
    static constexpr int place(int number) { return number % 2; }
    template <int NUMBER>
    __m256 number() const {
        return _mm256_cvtepi32_ps(_mm256_and_si256(words[NUMBER / 2], _mm256_set1_epi32(255 << 8 * place(NUMBER))));
    }
};

// Floats of 4 bits, of each twice, by a table of bytes: even numbers of a word side by side, and the others.
struct LookedUpFourBits {
    static constexpr int BITS = 4, PLACES = 2, BIAS = 16;
    static constexpr float UNIT = 256;
    __m256i words[4];
    explicit LookedUpFourBits(__m256i codes) {
        const __m256i lower = _mm256_set1_epi8(15), table = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4));
        words[0] = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, lower));
        words[2] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(codes, 4), lower));
        words[1] = _mm256_srli_epi32(words[0], 16), words[3] = _mm256_srli_epi32(words[2], 16);
    }
    static constexpr int place(int number) { return number / 2 % 2; }
    template <int NUMBER>
    __m256 number() const {
        const __m256i from = words[NUMBER % 2 * 2 + NUMBER / 4];
        return _mm256_cvtepi32_ps(_mm256_and_si256(from, _mm256_set1_epi32(255 << 8 * place(NUMBER))));
    }
};

// Floats of 8 bits: see FloatsOfEightBits.
struct ShiftedBytes {
    static constexpr int BITS = 8, PLACES = 1, BIAS = 0;
    static constexpr float UNIT = 1;
    __m256i words;
    explicit ShiftedBytes(__m256i codes) : words(codes) {}
    static constexpr int place(int) { return 0; }
    template <int NUMBER>
    __m256 number() const {
        const __m256i shifted = _mm256_srai_epi32(_mm256_slli_epi32(words, 24 - 8 * NUMBER), 4);
        return _mm256_castsi256_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(int(0x87f00000))));
    }
};

// Lines of codes of a panel, and what takes a group's codes to their weights.
template <class Codes, bool ROUNDS>
class CodedPanel {
    static constexpr float ROUNDED = 0x1p16f, LARGER = ROUNDS && Codes::BIAS != 0 ? ROUNDED : 1.f;  // scales of floats of 8 bits are large
    const Quantized& from;
    const uint32_t* codes;
    const float *scales_of, *zeros_of;
    __m256 scales[Codes::PLACES][2], less[2];

   public:
    CodedPanel(const Quantized& of, int64_t panel, int64_t lines)
        : from(of), codes(of.codes + panel * lines * LANES), scales_of(of.scales + panel * of.groups * LANES),
          zeros_of(of.zeros == nullptr ? nullptr : of.zeros + panel * of.groups * LANES) {}
    // Of the codes that follow.
    void begin(int64_t group) {
        for (int half = 0; half < 2; ++half) {
            const int64_t at = group * LANES + 8 * half;
            const __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(scales_of + at), _mm256_set1_ps(LARGER));
            __m256 zero = _mm256_set1_ps(Codes::BIAS);
            if (zeros_of != nullptr) zero = _mm256_add_ps(zero, _mm256_loadu_ps(zeros_of + at));
            less[half] = _mm256_mul_ps(_mm256_xor_ps(zero, _mm256_set1_ps(-0.f)), scale);
            float unit = 1;
            for (auto& place : scales) place[half] = _mm256_mul_ps(scale, _mm256_set1_ps(unit)), unit /= Codes::UNIT;
        }
    }
    // Half of a line: eight outputs.
    Codes line(int64_t number, int half) const {
        return Codes(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + number * LANES + 8 * half)));
    }
    template <int NUMBER>
    __m256 weight(const Codes& of, int half) const {
        __m256 value = _mm256_fmadd_ps(of.template number<NUMBER>(), scales[Codes::place(NUMBER)][half], less[half]);
        if constexpr (!ROUNDS) return value;
        if (LARGER == 1) value = _mm256_mul_ps(value, _mm256_set1_ps(ROUNDED));
        return _mm256_sub_ps(value, _mm256_fnmadd_ps(value, _mm256_set1_ps(1 / ROUNDED), value));
    }
};

inline __m256 input_at(const char* row, int64_t number) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(row) + number); }

// Calls body(line) for lines begin ... end, and begin_group(group) before those of each.
template <class BeginGroup, class Body>
inline void for_each_line(int64_t begin, int64_t end, int64_t in_group, BeginGroup begin_group, Body body) {
    for (int64_t line = begin; line < end;) {
        const int64_t group = line / in_group, stop = std::min(end, (group + 1) * in_group);
        begin_group(group);
        for (; line < stop; ++line) body(line);
    }
}

// Where a product's codes are: lines begin ... end of a panel's `whole`.
struct CodedLines { int64_t begin, end, whole; };

// Sums of ROWS rows, as floats `pitch` bytes apart, with some lines of two panels. Rows begin with the input of the first line. Asks for the
// same lines of the panels that come next.
template <class Codes, bool ROUNDS, int ROWS>
void multiply_coded(const Panels& now, const Panels& then, CodedLines lines, const char* in, int64_t pitch, Floats (*sum)[2]) {
    constexpr int PANELS = 2;
    const Quantized& from = *now.a.quantized;
    constexpr int EACH = 32 / Codes::BITS;
    CodedPanel<Codes, ROUNDS> coded[PANELS] = {{from, now.a.number, lines.whole}, {from, now.b.number, lines.whole}};
    const char* const ahead[PANELS] = {then.a.bytes(0), then.b.bytes(0)};
    __m256 sums[PANELS][ROWS][2];
    for_each_of<PANELS * ROWS>([&](auto each) {
        sums[each / ROWS][each % ROWS][0] = sums[each / ROWS][each % ROWS][1] = _mm256_setzero_ps();
    });
    const char* rows[ROWS];
    for_each_of<ROWS>([&](auto row) { rows[row] = in + row * pitch; });
    auto begin_group = [&](int64_t group) {
        for (int panel = 0; panel < PANELS; ++panel) coded[panel].begin(group);
    };
    for_each_line(lines.begin, lines.end, lines.whole / from.groups, begin_group, [&](int64_t line) {
        for_each_of<PANELS>([&](auto panel) { __builtin_prefetch(ahead[panel] + 64 * line); });
        // All sums take a number before one of them takes the next: none waits for itself.
        const Codes codes[] = {coded[0].line(line, 0), coded[0].line(line, 1), coded[1].line(line, 0), coded[1].line(line, 1)};
        for_each_of<EACH>([&](auto number) {
            for_each_of<2 * PANELS>([&](auto each) {
                const __m256 weight = coded[each / 2].template weight<number>(codes[each], each % 2);
                for_each_of<ROWS>([&](auto row) {
                    auto& total = sums[each / 2][row][each % 2];
                    total = _mm256_fmadd_ps(weight, input_at(rows[row], number), total);
                });
            });
        });
        for_each_of<ROWS>([&](auto row) { rows[row] += EACH * sizeof(float); });
    });
    for_each_of<PANELS * ROWS>([&](auto each) {
        const auto& [low, high] = sums[each / ROWS][each % ROWS];
        sum[each % ROWS][each / ROWS] = {low, high};
    });
}

// The weights of some lines of a panel as floats: 16 outputs of each input.
template <class Codes, bool ROUNDS>
void widen_coded(const Quantized& from, int64_t panel, CodedLines lines, const char* ahead, float* out) {
    constexpr int EACH = 32 / Codes::BITS;
    CodedPanel<Codes, ROUNDS> coded(from, panel, lines.whole);
    for_each_line(lines.begin, lines.end, lines.whole / from.groups, [&](int64_t group) { coded.begin(group); }, [&](int64_t line) {
        __builtin_prefetch(ahead + 64 * line);
        for_each_of<2>([&](auto half) {
            const Codes codes = coded.line(line, half);
            for_each_of<EACH>([&](auto number) {
                _mm256_storeu_ps(out + number * LANES + 8 * half, coded.template weight<number>(codes, half));
            });
        });
        out += EACH * LANES;
    });
}

// What becomes of codes of one kind.
struct CodedProducts {
    void (*multiply[2])(const Panels&, const Panels&, CodedLines, const char*, int64_t, Floats (*)[2]);  // of one row, of two
    void (*widen)(const Quantized&, int64_t, CodedLines, const char*, float*);
};

template <class Codes, bool ROUNDS>
constexpr CodedProducts coded_products() {
    return {{&multiply_coded<Codes, ROUNDS, 1>, &multiply_coded<Codes, ROUNDS, 2>}, &widen_coded<Codes, ROUNDS>};
}

inline const CodedProducts& coded_products_of(const Quantized& codes) {
    static constexpr CodedProducts OF[4][2] = {{coded_products<MaskedFourBits, true>(), coded_products<MaskedFourBits, false>()},
                                               {coded_products<MaskedBytes, true>(), coded_products<MaskedBytes, false>()},
                                               {coded_products<LookedUpFourBits, true>(), coded_products<LookedUpFourBits, false>()},
                                               {coded_products<ShiftedBytes, true>(), coded_products<ShiftedBytes, false>()}};
    return OF[(codes.is_float ? 2 : 0) + (codes.bits == 8 ? 1 : 0)][codes.arithmetic == EXACT ? 1 : 0];
}

constexpr int64_t BLOCK_INPUTS = 256;  // of a panel that are widened at a time: 16 KiB, half of the smallest first cache

// Sums of rows, as floats `pitch` bytes apart, with a part of two panels of codes. Asks for the panels that come next.
inline void multiply_coded_rows(const Quantized& from, const Panels& now, const Panels& then, Inputs part, const char* in, int64_t pitch,
                                int64_t rows, Floats (*sum)[2]) {
    const CodedProducts& products = coded_products_of(from);
    const int64_t each = 32 / from.bits, end = part.begin + part.count;
    const CodedLines lines{part.begin / each, end / each, part.whole / each};
    if (rows <= 2) return products.multiply[rows - 1](now, then, lines, in + part.begin * int64_t(sizeof(float)), pitch, sum);
    for (int64_t row = 0; row < rows; ++row) sum[row][0] = sum[row][1] = filled(0.f);
    alignas(64) float block[BLOCK_INPUTS * LANES];
    for (int column = 0; column < 2; ++column) {
        const int64_t panel = (column == 0 ? now.a : now.b).number;
        const char* ahead = (column == 0 ? then.a : then.b).bytes(0);
        for (int64_t at = part.begin, count; at < end; at += count) {
            count = std::min(BLOCK_INPUTS, end - at);
            products.widen(from, panel, {at / each, (at + count) / each, lines.whole}, ahead, block);
            multiply_rows(rows, block, count, in + at * int64_t(sizeof(float)), pitch, sum, column);
        }
    }
}

#else

constexpr bool CAN_MULTIPLY_CODES = false;
inline void multiply_coded_rows(const Quantized&, const Panels&, const Panels&, Inputs, const char*, int64_t, int64_t, Floats (*)[2]) {}

#endif

}  // namespace

#endif
