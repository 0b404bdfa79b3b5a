// Sixteen numbers in two registers of AVX2, with masks of bits as AVX-512 has them. bfloat16 is widened on the way: each of
// its products is one of floats.

#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace {

struct Floats { __m256 low, high; };
struct Words { __m256i low, high; };
struct Doubles { __m256d low{}, high{}; };
using Mask = uint16_t;

constexpr bool WIDENS_INPUTS = true;  // rows of bfloat16 are widened once, for many panels
constexpr int MAX_ROWS = 6;           // inputs that share one pass over a panel: their sums fill the registers
constexpr Mask EVERY_LANE = 0xffff;

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

inline Floats filled(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Words filled_words(int value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Words numbers_to_15() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }

inline Floats as_floats(Words value) { return {_mm256_castsi256_ps(value.low), _mm256_castsi256_ps(value.high)}; }
inline Words as_words(Floats value) { return {_mm256_castps_si256(value.low), _mm256_castps_si256(value.high)}; }

// ---- masks
inline Words lanes_in(Mask lanes) {  // all bits of a lane
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8), bits = _mm256_set1_epi32(lanes);
    return {_mm256_cmpeq_epi32(_mm256_and_si256(bits, low), low), _mm256_cmpeq_epi32(_mm256_and_si256(bits, high), high)};
}
inline Mask mask_of(Floats lanes) { return Mask(_mm256_movemask_ps(lanes.low) | _mm256_movemask_ps(lanes.high) << 8); }

inline Floats picked(Mask lanes, Floats yes, Floats no) {
    Floats which = as_floats(lanes_in(lanes));
    return {_mm256_blendv_ps(no.low, yes.low, which.low), _mm256_blendv_ps(no.high, yes.high, which.high)};
}
inline Words picked(Mask lanes, Words yes, Words no) { return as_words(picked(lanes, as_floats(yes), as_floats(no))); }
inline Floats only(Mask lanes, Floats value) {
    if (lanes == EVERY_LANE) return value;
    Floats which = as_floats(lanes_in(lanes));
    return {_mm256_and_ps(value.low, which.low), _mm256_and_ps(value.high, which.high)};
}

// ---- memory; lanes that a mask leaves out are neither read nor written, and get 0, or `otherwise`
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline Floats load(const float* from, Mask lanes) {
    if (lanes == EVERY_LANE) return load(from);
    Words which = lanes_in(lanes);
    return {_mm256_maskload_ps(from, which.low), _mm256_maskload_ps(from + 8, which.high)};
}
inline Floats load(const float* from, Mask lanes, Floats otherwise) {
    return lanes == EVERY_LANE ? load(from) : picked(lanes, load(from, lanes), otherwise);
}
inline Floats load_halves(const void* from) {
    auto* at = static_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
inline Words load_words(const void* from) {
    auto* at = static_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Words load_words(const void* from, Mask lanes) { return as_words(load(static_cast<const float*>(from), lanes)); }
inline void store(float* to, Floats value) { _mm256_storeu_ps(to, value.low), _mm256_storeu_ps(to + 8, value.high); }
inline void store(float* to, Floats value, Mask lanes) {
    if (lanes == EVERY_LANE) return store(to, value);
    Words which = lanes_in(lanes);
    _mm256_maskstore_ps(to, which.low, value.low), _mm256_maskstore_ps(to + 8, which.high, value.high);
}
inline void store(void* to, Words value) {
    auto* at = static_cast<__m256i*>(to);
    _mm256_storeu_si256(at, value.low), _mm256_storeu_si256(at + 1, value.high);
}
// For each mask of eight lanes the numbers of those that it has, side by side.
constexpr auto lanes_side_by_side() {
    std::array<std::array<uint8_t, 8>, 256> all{};
    for (int mask = 0; mask < 256; ++mask)
        for (int lane = 0, count = 0; lane < 8; ++lane)
            if (mask >> lane & 1) all[size_t(mask)][size_t(count++)] = uint8_t(lane);
    return all;
}
inline __m256 side_by_side(__m256 value, unsigned lanes) {
    static constexpr auto NUMBERS = lanes_side_by_side();
    __m128i numbers = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(NUMBERS[lanes].data()));
    return _mm256_permutevar8x32_ps(value, _mm256_cvtepu8_epi32(numbers));
}
// Side by side those lanes that a mask has; up to 16 are written.
inline void store_only(float* to, Floats value, Mask lanes) {
    unsigned low = lanes & 0xff, high = lanes >> 8;
    _mm256_storeu_ps(to, side_by_side(value.low, low));
    _mm256_storeu_ps(to + __builtin_popcount(low), side_by_side(value.high, high));
}
inline void store_only(int32_t* to, Words value, Mask lanes) { store_only(reinterpret_cast<float*>(to), as_floats(value), lanes); }

// ---- floats
inline Floats converted(Words value) { return {_mm256_cvtepi32_ps(value.low), _mm256_cvtepi32_ps(value.high)}; }
inline Floats fmadd(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)}; }
inline Floats fmsub(Floats a, Floats b, Floats c) { return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)}; }
inline Floats fnmadd(Floats a, Floats b, Floats c) { return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)}; }
inline Floats maximum(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Floats minimum(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
// Lanes that the mask leaves out stay as a has them.
inline Floats maximum(Floats a, Floats b, Mask lanes) { return lanes == EVERY_LANE ? maximum(a, b) : picked(lanes, maximum(a, b), a); }
inline Floats add(Floats a, Floats b, Mask lanes) { return lanes == EVERY_LANE ? a + b : picked(lanes, a + b, a); }
inline Floats to_integers(Floats value) {  // the nearest, ties to even
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(value.low, NEAREST), _mm256_round_ps(value.high, NEAREST)};
}
// Each number of the lower half twice, or of the upper one.
inline Floats twice(Floats value, int upper) {
    __m256 half = upper ? value.high : value.low;
    return {_mm256_permutevar8x32_ps(half, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(half, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}
// Numbers of two in turn, of the lower halves or of the upper ones.
inline Floats in_turn(Floats one, Floats two, int upper) {
    __m256 a = upper ? one.high : one.low, b = upper ? two.high : two.low;
    __m256 outer = _mm256_unpacklo_ps(a, b), inner = _mm256_unpackhi_ps(a, b);
    return {_mm256_permute2f128_ps(outer, inner, 0x20), _mm256_permute2f128_ps(outer, inner, 0x31)};
}
// The numbers of a table whose places are the lowest four bits of each word.
inline Floats looked_up(Floats table, Words places) {
    auto half = [&](__m256i some) {
        __m256 of_first = _mm256_permutevar8x32_ps(table.low, some), of_second = _mm256_permutevar8x32_ps(table.high, some);
        return _mm256_blendv_ps(of_first, of_second, _mm256_castsi256_ps(_mm256_slli_epi32(some, 28)));
    };
    return {half(places.low), half(places.high)};
}
inline float greatest_of(__m256 value) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline float greatest_of(Floats value) { return greatest_of(_mm256_max_ps(value.low, value.high)); }
inline float sum_of(Floats value) {
    __m256 eight = _mm256_add_ps(value.low, value.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float sum_of(Floats value, Mask lanes) { return sum_of(only(lanes, value)); }
template <int HOW>
Mask compared(Floats a, Floats b) { return mask_of({_mm256_cmp_ps(a.low, b.low, HOW), _mm256_cmp_ps(a.high, b.high, HOW)}); }
inline Mask is_less(Floats a, Floats b) { return compared<_CMP_LT_OQ>(a, b); }
inline Mask is_at_most(Floats a, Floats b) { return compared<_CMP_LE_OQ>(a, b); }
inline Mask is_equal(Floats a, Floats b) { return compared<_CMP_EQ_OQ>(a, b); }
inline Mask is_at_least(Floats a, Floats b) { return compared<_CMP_GE_OQ>(a, b); }
inline Mask is_greater(Floats a, Floats b) { return compared<_CMP_GT_OQ>(a, b); }
inline Mask is_nan(Floats value) { return compared<_CMP_UNORD_Q>(value, value); }

// ---- words
inline Words add_words(Words a, Words b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
inline Words subtract_words(Words a, Words b) { return {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)}; }
inline Words multiply_words(Words a, Words b) { return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)}; }
inline Words and_words(Words a, Words b) { return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)}; }
inline Words xor_words(Words a, Words b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
template <int BITS>
Words shift_left(Words value) { return {_mm256_slli_epi32(value.low, BITS), _mm256_slli_epi32(value.high, BITS)}; }
template <int BITS>
Words shift_right(Words value) { return {_mm256_srli_epi32(value.low, BITS), _mm256_srli_epi32(value.high, BITS)}; }
template <int BITS>
Words shift_right_signed(Words value) { return {_mm256_srai_epi32(value.low, BITS), _mm256_srai_epi32(value.high, BITS)}; }
inline Words shift_right(Words value, int bits) {
    __m128i by = _mm_cvtsi32_si128(bits);
    return {_mm256_srl_epi32(value.low, by), _mm256_srl_epi32(value.high, by)};
}
inline int least_of(Words value, Mask lanes) {
    value = picked(lanes, value, filled_words(INT32_MAX));
    __m256i eight = _mm256_min_epi32(value.low, value.high);
    __m128i four = _mm_min_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_min_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_min_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline Mask is_equal(Words a, Words b) {
    return mask_of(as_floats({_mm256_cmpeq_epi32(a.low, b.low), _mm256_cmpeq_epi32(a.high, b.high)}));
}
inline Mask is_less(Words a, Words b) {
    return mask_of(as_floats({_mm256_cmpgt_epi32(b.low, a.low), _mm256_cmpgt_epi32(b.high, a.high)}));
}

inline Words to_words(Floats value) { return {_mm256_cvtps_epi32(value.low), _mm256_cvtps_epi32(value.high)}; }  // the nearest, ties to even
inline Words clamped(Words value, int least, int most) {
    const __m256i low = _mm256_set1_epi32(least), high = _mm256_set1_epi32(most);
    return {_mm256_min_epi32(_mm256_max_epi32(value.low, low), high), _mm256_min_epi32(_mm256_max_epi32(value.high, low), high)};
}
// The lowest byte of each, 16 bytes; the others are 0.
inline void store_bytes(uint8_t* to, Words value) {
    __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(value.low, value.high), 0xd8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
// The same number, which the compiler takes for another: a product is rounded before something is added to it.
inline Floats as_it_is(Floats value) {
    asm("" : "+x"(value.low), "+x"(value.high));
    return value;
}

// value * 2^power; the power is a whole number.
inline Floats times_power_of_2(Floats value, Floats power) {
    power = maximum(minimum(power, filled(254.f)), filled(-252.f));  // in two steps, so that each is the exponent of a normal number
    Words n = {_mm256_cvtps_epi32(power.low), _mm256_cvtps_epi32(power.high)}, half = shift_right_signed<1>(n);
    auto power_of_2 = [](Words exponent) { return as_floats(shift_left<23>(add_words(exponent, filled_words(127)))); };
    return value * power_of_2(half) * power_of_2(subtract_words(n, half));
}
// How much a value is above a whole number, at least 0 and below 1; `power` is that, for times_power_of_2(). Below -200: 0.
inline Floats above_integer(Floats value, Floats& power) {
    value = maximum(value, filled(-200.f));
    power = {_mm256_floor_ps(value.low), _mm256_floor_ps(value.high)};
    return value - power;
}
// log2 of normal numbers above 0, rounded down.
inline Floats exponents(Floats value) { return converted(subtract_words(shift_right<23>(as_words(value)), filled_words(127))); }

// ---- doubles
inline Doubles add(Doubles total, Floats x) {
    auto wide = [](__m128 four) { return _mm256_cvtps_pd(four); };
    total.low = _mm256_add_pd(total.low, wide(_mm256_castps256_ps128(x.low)));
    total.high = _mm256_add_pd(total.high, wide(_mm256_extractf128_ps(x.low, 1)));
    total.low = _mm256_add_pd(total.low, wide(_mm256_castps256_ps128(x.high)));
    total.high = _mm256_add_pd(total.high, wide(_mm256_extractf128_ps(x.high, 1)));
    return total;
}
inline double sum_of(Doubles value) {
    __m256d four = _mm256_add_pd(value.low, value.high);
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// ---- bfloat16: the upper half of a float
inline Floats load_bfloat16(const uint16_t* from, Mask lanes) {
    uint16_t some[16] = {};
    if (lanes != EVERY_LANE) {
        for (unsigned left = lanes; left != 0; left &= left - 1) some[__builtin_ctz(left)] = from[__builtin_ctz(left)];
        from = some;
    }
    auto half = [&](int at) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at))); };
    return as_floats(shift_left<16>(Words{half(0), half(8)}));
}
inline Words bits_of_bfloat16(Floats value) {  // of the nearest one, ties to even
    Words bits = as_words(value), odd = and_words(shift_right<16>(bits), filled_words(1));
    Words nearest = shift_right<16>(add_words(bits, add_words(odd, filled_words(0x7fff))));
    Mask nan = is_nan(value);
    return nan == 0 ? nearest : picked(nan, filled_words(0x7fc0), nearest);
}
inline void store_bfloat16(uint16_t* to, Floats value, Mask lanes) {
    Words bits = bits_of_bfloat16(value);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits.low, bits.high), 0xd8);
    if (lanes == EVERY_LANE) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
    alignas(32) uint16_t some[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(some), packed);
    for (unsigned left = lanes; left != 0; left &= left - 1) to[__builtin_ctz(left)] = some[__builtin_ctz(left)];
}
inline void store_bfloat16(uint16_t* to, Floats one, Floats two) {
    store_bfloat16(to, one, EVERY_LANE);
    store_bfloat16(to + 16, two, EVERY_LANE);
}
inline Floats rounded_to_bfloat16(Floats value) { return as_floats(shift_left<16>(bits_of_bfloat16(value))); }
// Sixteen numbers into every other half of so many words, the lower ones or the upper ones; another thread may write the others.
inline void store_halves(uint32_t* to, const uint16_t* from, bool upper) {
    auto* halves = reinterpret_cast<char*>(to) + (upper ? 2 : 0);
    for (int i = 0; i < 16; ++i) std::memcpy(halves + 4 * i, from + i, 2);
}

// ---- codes of eight bits: whole numbers, or bits of another number, as words
inline Words load_int8(const int8_t* from) {
    auto half = [&](int at) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + at))); };
    return {half(0), half(8)};
}
inline Words rounded_words(Floats value) { return {_mm256_cvtps_epi32(value.low), _mm256_cvtps_epi32(value.high)}; }  // to the nearest one, ties to even
inline void store_int8(int8_t* to, Words value) {  // the lowest bits of each
    alignas(32) int32_t all[16];
    store(all, value);
    for (int i = 0; i < 16; ++i) to[i] = int8_t(all[i]);
}

// ---- the multiply-add of everything: a word of weights and one of inputs are PARTS products of lanes, one after the other
struct FloatParts {
    static constexpr int PARTS = 1;
    template <int PART>
    static Floats of(Words words) { return as_floats(words); }
    static Floats madd(Floats sum, Floats weights, Floats inputs) { return fmadd(weights, inputs, sum); }
};
struct BFloat16Parts {
    static constexpr int PARTS = 2;
    template <int PART>
    static Floats of(Words words) { return as_floats(PART == 0 ? shift_left<16>(words) : and_words(words, filled_words(int(0xffff0000)))); }
    static Floats madd(Floats sum, Floats weights, Floats inputs) { return fmadd(weights, inputs, sum); }
};

#ifndef LOCKSTEP_AVXVNNI

// Words are four bytes: those of weights have signs, those of inputs none. Bytes 0 and 2 are multiplied as numbers of 16 bits, then 1 and 3:
// products of bytes themselves would be cut off at 16 bits. Sums are whole numbers, in the registers of floats.
struct BytesParts {
    static constexpr int PARTS = 2;
    template <int PART>
    static Floats of(Words words) {
        auto half = [](__m256i some) { return _mm256_srai_epi16(PART == 0 ? _mm256_slli_epi16(some, 8) : some, 8); };
        return as_floats({half(words.low), half(words.high)});
    }
    static Floats madd(Floats sum, Floats weights, Floats inputs) {
        Words one = as_words(weights), other = as_words(inputs);
        return as_floats(add_words(as_words(sum), {_mm256_madd_epi16(one.low, other.low), _mm256_madd_epi16(one.high, other.high)}));
    }
};

#endif

// Panels, of so many, that rows go through side by side: their sums, two registers each, fill these.
constexpr int panels_beside(int rows, int64_t panels) {
    return rows == 1 && panels >= 4 ? 4 : rows <= 3 && panels >= 2 ? 2 : 1;
}

}  // namespace
