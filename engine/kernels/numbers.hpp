// Numbers: float, and bfloat16 in pairs; how each is loaded, stored, multiplied and added.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace {

constexpr int LANES = 16;      // outputs of a panel; also keys of a block of the cache
constexpr int MAX_ROWS = 12;   // inputs that share one pass over two panels: their sums fill the registers

struct Float {
    using Element = float;
    static constexpr int PACK = 1;
    static __m512 madd(__m512 sum, __m512i weights, uint32_t input) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(_mm512_set1_epi32(int(input))), sum);
    }
    static __m512 load(const float* from, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
    static void store(float* to, __m512 value, __mmask16 lanes) { _mm512_mask_storeu_ps(to, lanes, value); }
    static float one(float value) { return value; }
    static __m512 rounded(__m512 value) { return value; }
};

struct BFloat16 {
    using Element = uint16_t;
    static constexpr int PACK = 2;
    static __m512 madd(__m512 sum, __m512i weights, uint32_t input) {
        return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int(input)));
    }
    static __m512 load(const uint16_t* from, __mmask16 lanes) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static void store(uint16_t* to, __m512 value, __mmask16 lanes) {
        _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(value));
    }
    static float one(uint16_t value) {
        uint32_t bits = uint32_t(value) << 16;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    }
    static __m512 rounded(__m512 value) {  // to the nearest bfloat16, ties to even
        __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(value));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
};

// Numbers from one row that operations hand on to the next: whole lines of a cache, so that two threads do not write to the
// same one, and an odd number of them. With 1024 bytes, say, the 16 rows of a tile would all be in four sets of the first cache.
template <class T>
int64_t pitch_of(int64_t width) {
    constexpr int64_t LINE = 64 / sizeof(typename T::Element);
    return ((width + LINE - 1) / LINE | 1) * LINE;
}

__mmask16 lanes_of(int count) { return count >= LANES ? __mmask16(0xffff) : __mmask16((1u << count) - 1); }

__m512 exp_ps(__m512 x) {  // 2^n * 2^f with |f| <= 1/2; the series of 2^f ends below the precision of a float
    __m512 t = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-104.f)), _mm512_set1_ps(1.44269504f));
    __m512 n = _mm512_roundscale_ps(t, 0);
    __m512 f = _mm512_sub_ps(t, n);
    __m512 p = _mm512_set1_ps(1.5403530e-4f);
    for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, n);
}

__m512 silu_ps(__m512 x) {
    __m512 denominator = _mm512_add_ps(_mm512_set1_ps(1.f), exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x)));
    return _mm512_div_ps(x, denominator);
}

}  // namespace
