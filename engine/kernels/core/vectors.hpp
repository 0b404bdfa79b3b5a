// Sixteen numbers at a time: what all kernels are written in, in the instructions of AVX-512, AVX2 or NEON.
//
// All headers give the same names: Floats, Words (of 32 bits), Doubles (eight with AVX-512, sums of sixteen floats in any case), and
// functions of them. A Mask has a bit for each lane, the first one the lowest. Operators of Floats are those of the language. LOCKSTEP_VECTORS
// is the kind of kernels without tiles (parallel/kernel_kinds.py). The instructions for bfloat16 are used by the kind that needs them alone.

#pragma once

#include <cstdint>

#if defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define LOCKSTEP_AVX512 1
#define LOCKSTEP_AVX2 0
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define LOCKSTEP_BFLOAT16 1
#define LOCKSTEP_VECTORS "avx512"
#include "vectors_avx512.hpp"
#else
#define LOCKSTEP_VECTORS "avx512f"
#include "vectors_avx512.hpp"
#endif
#else
#define LOCKSTEP_AVX512 0
#ifdef __aarch64__
#define LOCKSTEP_AVX2 0
#define LOCKSTEP_VECTORS "neon"
#include "vectors_neon.hpp"
#elif defined(__AVXVNNI__)
#define LOCKSTEP_VECTORS "avxvnni"
#include "vectors_avxvnni.hpp"
#else
#define LOCKSTEP_AVX2 1
#define LOCKSTEP_VECTORS "avx2"
#include "vectors_avx2.hpp"
#endif
#endif
