// Sixteen numbers at a time: what all kernels are written in, in the instructions of AVX-512, of AVX2 or of NEON.
//
// All headers give the same names: Floats, Words (of 32 bits), Doubles (eight with AVX-512, sums of sixteen floats in any case), and
// functions of them. A Mask has a bit for each lane, the first one the lowest. Operators of Floats are those of the language.

#pragma once

#include <cstdint>

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define LOCKSTEP_AVX512 1
#include "vectors_avx512.hpp"
#else
#define LOCKSTEP_AVX512 0
#ifdef __aarch64__
#include "vectors_neon.hpp"
#else
#include "vectors_avx2.hpp"
#endif
#endif
