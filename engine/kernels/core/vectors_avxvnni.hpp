// Sixteen numbers in two registers of AVX2, whose bytes are multiplied by AVX-VNNI: for client CPUs of Intel, which have no AVX-512.
//
// All but products of bytes are the instructions of AVX2, and sums of bytes are whole numbers: so bits are those of AVX2, too.

#pragma once

#define LOCKSTEP_AVXVNNI 1
#include "vectors_avx2.hpp"

namespace {

// Words are four bytes: those of weights have signs, those of inputs none. Sums are whole numbers, in the registers of floats.
struct BytesParts {
    static constexpr int PARTS = 1;
    template <int PART>
    static Floats of(Words words) { return as_floats(words); }
    static Floats madd(Floats sum, Floats weights, Floats inputs) {
        Words total = as_words(sum), one = as_words(inputs), other = as_words(weights);
        return as_floats({_mm256_dpbusd_avx_epi32(total.low, one.low, other.low), _mm256_dpbusd_avx_epi32(total.high, one.high, other.high)});
    }
};

}  // namespace
