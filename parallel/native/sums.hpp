// Sums in rank order, to the same bits as parallel/rounds/arithmetic.py makes them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

// How a type is added up: its elements E, and what they are added up in.
template <class T>
struct Plain {
    using E = T;
    using Sum = T;
    static Sum widen(E element) { return element; }
    static E round(Sum sum) { return sum; }
};

struct Bfloat16 {
    using E = uint16_t;
    using Sum = float;
    static Sum widen(E element) {
        uint32_t bits = uint32_t(element) << 16;
        float number;
        std::memcpy(&number, &bits, 4);
        return number;
    }
    static E round(Sum sum) {  // to nearest, ties to even
        uint32_t bits;
        std::memcpy(&bits, &sum, 4);
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        return sum != sum ? 0x7fc0 : E(rounded);
    }
};

constexpr int64_t BLOCK = 512;

template <class T>
void sum_block(const typename T::E* const* terms, int64_t count, typename T::E* out, int64_t n) {
    if (count == 2) {
        const auto *one = terms[0], *two = terms[1];
        for (int64_t i = 0; i < n; ++i) out[i] = T::round(T::widen(one[i]) + T::widen(two[i]));
        return;
    }
    typename T::Sum sums[BLOCK];
    for (int64_t i = 0; i < n; ++i) sums[i] = T::widen(terms[0][i]);
    for (int64_t term = 1; term < count; ++term)
        for (int64_t i = 0; i < n; ++i) sums[i] += T::widen(terms[term][i]);
    for (int64_t i = 0; i < n; ++i) out[i] = T::round(sums[i]);
}

#ifdef __F16C__
struct Float16 {
    using E = uint16_t;
};

template <>
void sum_block<Float16>(const uint16_t* const* terms, int64_t count, uint16_t* out, int64_t n) {
    constexpr int64_t LANES = 8;
    for (int64_t i = 0; i < n; i += LANES) {
        int64_t lanes = std::min(LANES, n - i);
        __m256 sum = _mm256_setzero_ps();
        for (int64_t term = 0; term < count; ++term) {
            uint16_t padded[LANES] = {};
            const uint16_t* from = terms[term] + i;
            if (lanes < LANES) from = static_cast<uint16_t*>(std::memcpy(padded, from, lanes * 2));
            __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
            sum = term == 0 ? wide : _mm256_add_ps(sum, wide);
        }
        uint16_t rounded[LANES];
        _mm_storeu_si128(reinterpret_cast<__m128i*>(rounded), _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
        std::memcpy(out + i, rounded, lanes * 2);
    }
}
#elif defined(__aarch64__)
struct Float16 {
    using E = uint16_t;
    using Sum = float;
    static Sum widen(E element) {
        __fp16 number;
        std::memcpy(&number, &element, 2);
        return number;
    }
    static E round(Sum sum) {  // to nearest, ties to even
        auto number = __fp16(sum);
        E bits;
        std::memcpy(&bits, &number, 2);
        return bits;
    }
};
#endif

// terms: one address per rank; they are moved on.
template <class T>
void sum_elements(const char** terms, int64_t count, char* out, int64_t num_bytes) {
    using E = typename T::E;
    constexpr int64_t STEP = BLOCK * int64_t(sizeof(E));
    for (int64_t low = 0; low < num_bytes; low += STEP) {
        sum_block<T>(reinterpret_cast<const E* const*>(terms), count, reinterpret_cast<E*>(out + low),
                     std::min(STEP, num_bytes - low) / int64_t(sizeof(E)));
        for (int64_t term = 0; term < count; ++term) terms[term] += STEP;
    }
}

enum Kind : int64_t { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, BYTE, INT16, INT32, INT64 };

// False if elements of this kind are not added up here. Whole numbers wrap around.
inline bool sum_kind(int64_t kind, const char** terms, int64_t count, char* out, int64_t num_bytes) {
    switch (kind) {
        case FLOAT32: sum_elements<Plain<float>>(terms, count, out, num_bytes); return true;
        case FLOAT64: sum_elements<Plain<double>>(terms, count, out, num_bytes); return true;
        case BFLOAT16: sum_elements<Bfloat16>(terms, count, out, num_bytes); return true;
#if defined(__F16C__) || defined(__aarch64__)
        case FLOAT16: sum_elements<Float16>(terms, count, out, num_bytes); return true;
#endif
        case BYTE: sum_elements<Plain<uint8_t>>(terms, count, out, num_bytes); return true;
        case INT16: sum_elements<Plain<uint16_t>>(terms, count, out, num_bytes); return true;
        case INT32: sum_elements<Plain<uint32_t>>(terms, count, out, num_bytes); return true;
        case INT64: sum_elements<Plain<uint64_t>>(terms, count, out, num_bytes); return true;
        default: return false;
    }
}

}  // namespace
