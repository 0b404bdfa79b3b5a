// The product of bytes of AVX-VNNI in software, for a CPU that has none: included before the kernels (tests/engine/kernels/emulation.py),
// it takes the place of the compiler's intrinsic.
//
// What the instruction does is written as in Intel's Software Developer's Manual, volume 2 (VPDPBUSD): four products of a byte without
// a sign and one with, each of 16 bits, are added to a word of 32 bits, which wraps around.

#pragma once

#include <immintrin.h>

#if defined(__AVX2__) && !defined(__AVX512F__)  // kernels for AVX-512 stay what they are

#include <cstdint>

#ifndef __AVXVNNI__
#define __AVXVNNI__ 1
#endif

namespace {
namespace emulated {

[[gnu::noinline]] inline __m256i multiply_bytes(__m256i sum, __m256i one, __m256i other) {
    alignas(32) uint32_t totals[8];
    alignas(32) uint8_t first[32];
    alignas(32) int8_t second[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(totals), sum);
    _mm256_store_si256(reinterpret_cast<__m256i*>(first), one);
    _mm256_store_si256(reinterpret_cast<__m256i*>(second), other);
    for (int byte = 0; byte < 32; ++byte) totals[byte / 4] += uint32_t(int32_t(int16_t(int(first[byte]) * int(second[byte]))));
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(totals));
}

}  // namespace emulated
}  // namespace

#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32(sum, one, other) emulated::multiply_bytes(sum, one, other)

#endif
