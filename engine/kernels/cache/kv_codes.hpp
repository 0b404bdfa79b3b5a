// Keys and values as codes of eight bits: what a token has of either for a KV head is codes times one scale.
//
// Codes are whole numbers, or numbers of four bits of exponent and three more (e4m3). bfloat16 has all of them, so products with codes
// are as exact as those with keys and values; the scale is a factor on what comes of them. It is rounded up to bfloat16, so that the
// greatest number keeps a code of its own.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../core/numbers.hpp"

namespace {

enum Codes : int64_t { NO_CODES, INT8, FP8 };  // Operation::codes

struct WholeCodes {
    static constexpr float LARGEST = 127.f;
    static Words of(Floats value) { return rounded_words(minimum(maximum(value, filled(-LARGEST)), filled(LARGEST))); }
    static Floats number(Words code) { return converted(code); }
};

struct FloatCodes {
    static constexpr float LARGEST = 448.f;
    static constexpr int EXPONENTS = (127 - 7) << 3;  // between those of a float and of a code, above three more bits
    static Words of(Floats value) {
        Floats size = minimum(maximum(value, filled(0.f) - value), filled(LARGEST));
        Words bits = as_words(size), odd = and_words(shift_right<20>(bits), filled_words(1));
        Words normal = subtract_words(shift_right<20>(add_words(bits, add_words(odd, filled_words(0x7ffff)))), filled_words(EXPONENTS));
        Words small = rounded_words(size * filled(512.f));
        Words code = picked(is_less(size, filled(1.f / 64)), small, normal);
        return add_words(code, and_words(shift_right<24>(as_words(value)), filled_words(0x80)));
    }
    static Floats number(Words code) {
        Words size = shift_left<20>(and_words(code, filled_words(0x7f))), sign = and_words(code, filled_words(int(0x80000000)));
        return as_floats(xor_words(as_words(as_floats(size) * filled(0x1p120f)), sign));
    }
};

// The least scale in bfloat16 that is no less than this one; 0 for what is too little to divide by.
inline uint16_t scale_above(float scale) {
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof(bits));
    return scale < 0x1p-126f ? uint16_t(0) : uint16_t((bits + 0xffff) >> 16);
}

// Codes of `count` numbers, a multiple of 16: put(first, codes of sixteen) for each sixteen. Returns their scale.
template <class T, class Code, class Put>
uint16_t encode(const typename T::Element* from, int64_t count, Put put) {
    const Mask every = Mask(0xffff);
    Floats most = filled(0.f);
    Mask broken = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        Floats value = T::load(from + i, every);
        most = maximum(most, maximum(value, filled(0.f) - value));
        broken = Mask(broken | is_nan(value));
    }
    const uint16_t scale = broken != 0 ? uint16_t(0x7fc0) : scale_above(greatest_of(most) / Code::LARGEST);
    const Floats inverse = filled(scale == 0 ? 0.f : 1.f / BFloat16::one(scale));
    for (int64_t i = 0; i < count; i += LANES) {
        alignas(16) int8_t codes[LANES];
        store_int8(codes, Code::of(T::load(from + i, every) * inverse));
        put(i, codes);
    }
    return scale;
}

template <class T, class Put>
uint16_t encode(int64_t kind, const typename T::Element* from, int64_t count, Put put) {
    return kind == INT8 ? encode<T, WholeCodes>(from, count, put) : encode<T, FloatCodes>(from, count, put);
}

// Codes as numbers of the model's type, in the order of their memory; `count` is a multiple of 32.
template <class T, class Code>
void decode(const int8_t* from, int64_t count, typename T::Element* to) {
    for (int64_t i = 0; i < count; i += 2 * LANES)
        T::store(to + i, Code::number(load_int8(from + i)), Code::number(load_int8(from + i + LANES)));
}

template <class T>
void decode(int64_t kind, const int8_t* from, int64_t count, uint32_t* to) {
    auto* out = reinterpret_cast<typename T::Element*>(to);
    kind == INT8 ? decode<T, WholeCodes>(from, count, out) : decode<T, FloatCodes>(from, count, out);
}

}  // namespace
