// Sixteen numbers in a register of AVX-512, which multiplies pairs of bfloat16, too. CPUs without these instructions (avx512_bf16,
// avx512_vnni) do the same in several: a pair of products is two of floats then, whose sum is rounded after each.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

using Floats = __m512;   // operators are the compiler's own
using Words = __m512i;
using Doubles = __m512d;
using Mask = __mmask16;

constexpr bool WIDENS_INPUTS = false;  // rows of bfloat16 are multiplied as they are
constexpr int MAX_ROWS = 12;           // inputs that share one pass over two panels: their sums fill the registers

inline Floats filled(float value) { return _mm512_set1_ps(value); }
inline Words filled_words(int value) { return _mm512_set1_epi32(value); }
inline Words numbers_to_15() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// ---- memory; lanes that a mask leaves out are neither read nor written, and get 0, or `otherwise`
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const float* from, Mask lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
inline Floats load(const float* from, Mask lanes, Floats otherwise) { return _mm512_mask_loadu_ps(otherwise, lanes, from); }
inline Floats load_halves(const void* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from))); }
inline Words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline Words load_words(const void* from, Mask lanes) { return _mm512_maskz_loadu_epi32(lanes, from); }
inline void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
inline void store(float* to, Floats value, Mask lanes) { _mm512_mask_storeu_ps(to, lanes, value); }
inline void store(void* to, Words value) { _mm512_storeu_si512(to, value); }
// Side by side those lanes that a mask has; up to 16 are written.
inline void store_only(float* to, Floats value, Mask lanes) { _mm512_storeu_ps(to, _mm512_maskz_compress_ps(lanes, value)); }
inline void store_only(int32_t* to, Words value, Mask lanes) { _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(lanes, value)); }

// ---- floats
inline Floats as_floats(Words value) { return _mm512_castsi512_ps(value); }
inline Floats converted(Words value) { return _mm512_cvtepi32_ps(value); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fmsub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats maximum(Floats a, Floats b, Mask lanes) { return _mm512_mask_max_ps(a, lanes, a, b); }  // others stay a's
inline Floats minimum(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats add(Floats a, Floats b, Mask lanes) { return _mm512_mask_add_ps(a, lanes, a, b); }      // so here
inline Floats only(Mask lanes, Floats value) { return _mm512_maskz_mov_ps(lanes, value); }            // 0 in others
inline Floats picked(Mask lanes, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, lanes, yes); }
inline Floats to_integers(Floats value) { return _mm512_roundscale_ps(value, 0); }                    // the nearest, ties to even
inline Floats times_power_of_2(Floats value, Floats power) { return _mm512_scalef_ps(value, power); }
// How much a value is above a whole number, at least 0 and below 1; `power` is for times_power_of_2() with that whole number.
inline Floats above_integer(Floats value, Floats& power) {
    power = value;  // which is rounded down there
    return _mm512_reduce_ps(value, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
inline Floats exponents(Floats value) { return _mm512_getexp_ps(value); }                             // log2, rounded down
inline float greatest_of(Floats value) { return _mm512_reduce_max_ps(value); }
inline float sum_of(Floats value) { return _mm512_reduce_add_ps(value); }
inline float sum_of(Floats value, Mask lanes) { return _mm512_mask_reduce_add_ps(lanes, value); }
inline Mask is_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Mask is_at_most(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
inline Mask is_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask is_at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask is_greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask is_nan(Floats value) { return _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q); }

// ---- words
inline Words as_words(Floats value) { return _mm512_castps_si512(value); }
inline Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words subtract_words(Words a, Words b) { return _mm512_sub_epi32(a, b); }
inline Words multiply_words(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
inline Words and_words(Words a, Words b) { return _mm512_and_si512(a, b); }
inline Words xor_words(Words a, Words b) { return _mm512_xor_si512(a, b); }
template <int BITS>
Words shift_left(Words value) { return _mm512_slli_epi32(value, BITS); }
template <int BITS>
Words shift_right(Words value) { return _mm512_srli_epi32(value, BITS); }
template <int BITS>
Words shift_right_signed(Words value) { return _mm512_srai_epi32(value, BITS); }
inline Words shift_right(Words value, int bits) { return _mm512_srl_epi32(value, _mm_cvtsi32_si128(bits)); }
inline Words picked(Mask lanes, Words yes, Words no) { return _mm512_mask_mov_epi32(no, lanes, yes); }
inline int least_of(Words value, Mask lanes) { return _mm512_mask_reduce_min_epi32(lanes, value); }
inline Mask is_equal(Words a, Words b) { return _mm512_cmpeq_epi32_mask(a, b); }
inline Mask is_less(Words a, Words b) { return _mm512_cmplt_epi32_mask(a, b); }
inline Words to_words(Floats value) { return _mm512_cvtps_epi32(value); }                             // the nearest, ties to even
inline Words clamped(Words value, int least, int most) {
    return _mm512_min_epi32(_mm512_max_epi32(value, filled_words(least)), filled_words(most));
}
// The lowest byte of each, 16 bytes.
inline void store_bytes(uint8_t* to, Words value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(value)); }
// The same number, which the compiler takes for another: a product is rounded before something is added to it.
inline Floats as_it_is(Floats value) {
    asm("" : "+v"(value));
    return value;
}

// ---- doubles
inline Doubles add(Doubles total, Floats x) {
    total = _mm512_add_pd(total, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    return _mm512_add_pd(total, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
}
inline double sum_of(Doubles value) { return _mm512_reduce_add_pd(value); }

// ---- bfloat16: the upper half of a float
#ifdef LOCKSTEP_BFLOAT16
inline __m256i halves_of(Floats value) { return (__m256i)_mm512_cvtneps_pbh(value); }  // the nearest ones, ties to even
inline Words halves_of(Floats one, Floats two) { return (__m512i)_mm512_cvtne2ps_pbh(two, one); }
// Products of the lower halves and of the upper ones, added to a sum.
inline Floats add_pairs(Floats sum, Words a, Words b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#else
inline __m256i halves_of(Floats value) {
    const Words bits = as_words(value), odd = and_words(shift_right<16>(bits), filled_words(1));
    const Words nearest = add_words(bits, add_words(odd, filled_words(0x7fff)));
    const Words quiet = _mm512_or_si512(bits, filled_words(0x400000));  // a NaN stays one
    return _mm512_cvtepi32_epi16(shift_right<16>(picked(is_nan(value), quiet, nearest)));
}
inline Words halves_of(Floats one, Floats two) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(halves_of(one)), halves_of(two), 1);
}
inline Floats add_pairs(Floats sum, Words a, Words b) {
    const Words upper = filled_words(int(0xffff0000));
    sum = fmadd(as_floats(shift_left<16>(a)), as_floats(shift_left<16>(b)), sum);
    return fmadd(as_floats(and_words(a, upper)), as_floats(and_words(b, upper)), sum);
}
#endif
inline Floats load_bfloat16(const uint16_t* from, Mask lanes) {
    return as_floats(shift_left<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from))));
}
inline void store_bfloat16(uint16_t* to, Floats value, Mask lanes) {
    _mm256_mask_storeu_epi16(to, lanes, halves_of(value));
}
// 32 of them, the lower ones first.
inline Words words_of_bfloat16(Floats one, Floats two) { return halves_of(one, two); }
inline void store_bfloat16(uint16_t* to, Floats one, Floats two) { store(to, words_of_bfloat16(one, two)); }
// Numbers of two in turn, of the lower halves or of the upper ones.
inline Floats in_turn(Floats one, Floats two, int upper) {
    const Words lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(one, upper ? add_words(lower, filled_words(8)) : lower, two);
}
// The numbers of a table whose places are the lowest four bits of each word.
inline Floats looked_up(Floats table, Words places) { return _mm512_permutexvar_ps(places, table); }
// Each number of the lower half twice, or of the upper one.
inline Floats twice(Floats value, int upper) {
    const __m512i numbers = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(_mm512_add_epi32(numbers, _mm512_set1_epi32(8 * upper)), value);
}
inline Floats rounded_to_bfloat16(Floats value) {  // to the nearest one, ties to even
    return as_floats(shift_left<16>(_mm512_cvtepu16_epi32(halves_of(value))));
}
// Sixteen numbers into every other half of so many words, the lower ones or the upper ones.
inline void store_halves(uint32_t* to, const uint16_t* from, bool upper) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    _mm512_mask_storeu_epi16(to, upper ? 0xaaaaaaaau : 0x55555555u, _mm512_slli_epi32(wide, upper ? 16 : 0));
}

// ---- codes of eight bits: whole numbers, or bits of another number, as words
inline Words load_int8(const int8_t* from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
inline Words rounded_words(Floats value) { return _mm512_cvtps_epi32(value); }  // to the nearest one, ties to even
inline void store_int8(int8_t* to, Words value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(value)); }

// ---- the multiply-add of everything: a word of weights and one of inputs are PARTS products of lanes, one after the other
struct FloatParts {
    static constexpr int PARTS = 1;
    template <int PART>
    static Words of(Words words) { return words; }
    static Floats madd(Floats sum, Words weights, Words inputs) { return fmadd(as_floats(weights), as_floats(inputs), sum); }
};
struct BFloat16Parts {
    static constexpr int PARTS = 1;
    template <int PART>
    static Words of(Words words) { return words; }
    static Floats madd(Floats sum, Words weights, Words inputs) { return add_pairs(sum, weights, inputs); }
};

// Words are four bytes: those of weights have signs, those of inputs none. Sums are whole numbers, in the registers of floats.
struct BytesParts {
    static constexpr int PARTS = 1;
    template <int PART>
    static Words of(Words words) { return words; }
#ifdef __AVX512VNNI__
    static Floats madd(Floats sum, Words weights, Words inputs) {
        // With the compiler's own function a sum goes from one register to another and back, and weights come from memory for each row.
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(inputs), "v"(weights));
        return sum;
    }
#else
    // Bytes 0 and 2 are multiplied as numbers of 16 bits, then 1 and 3: products of bytes themselves would be cut off at 16 bits.
    static Floats madd(Floats sum, Words weights, Words inputs) {
        const Words even = _mm512_srai_epi16(_mm512_slli_epi16(weights, 8), 8), odd = _mm512_srai_epi16(weights, 8);
        const Words total = add_words(as_words(sum), _mm512_madd_epi16(even, and_words(inputs, filled_words(0xff00ff))));
        return as_floats(add_words(total, _mm512_madd_epi16(odd, _mm512_srli_epi16(inputs, 8))));
    }
#endif
};

// Panels, of so many, that rows go through side by side: their sums fill the registers. Each sum waits for the product before it,
// so one or two rows with two panels take three times as long as their products.
constexpr int panels_beside(int rows, int64_t panels) {
    return rows <= 3 && panels >= 8 ? 8 : rows <= 6 && panels >= 4 ? 4 : 2;
}

}  // namespace
