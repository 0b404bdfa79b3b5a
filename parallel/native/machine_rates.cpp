// Rates of one thread: multiply-adds from registers, and reading memory.
//
// Sums depend on nothing but themselves, and there are enough of them to hide the latency of an instruction. So the rate is
// what the kernels' products cannot exceed.

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr size_t VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr size_t VECTOR_BYTES = 32;
#else
constexpr size_t VECTOR_BYTES = 16;
#endif
constexpr int SUMS = 12;  // as many as 16 registers hold beside two factors
constexpr size_t STREAMS = 8, LINE = 64;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t Words __attribute__((vector_size(VECTOR_BYTES)));

// Runs `step` on all sums so many times; the compiler may neither drop nor reorder them.
template <typename Vector, typename Step>
void repeat(int64_t times, Step step) {
    Vector sums[SUMS] = {};
    for (int64_t time = 0; time < times; time++) {
#pragma GCC unroll 12
        for (int i = 0; i < SUMS; i++) {
            sums[i] = step(sums[i]);
#if defined(__x86_64__)
            asm volatile("" : "+x"(sums[i]));
#else
            asm volatile("" : "+w"(sums[i]));
#endif
        }
    }
}

}  // namespace

// Operations (two for a multiply-add) of `times` rounds in float32.
extern "C" int64_t lockstep_multiply_float32(int64_t times) {
    Floats a = {}, b = {};
    a += 0.999f, b += 1e-3f;
    repeat<Floats>(times, [&](Floats sum) { return sum * a + b; });
    return times * SUMS * 2 * int64_t(VECTOR_BYTES / sizeof(float));
}

// The same in pairs of bfloat16; 0 where vectors have no such instruction.
extern "C" int64_t lockstep_multiply_bfloat16(int64_t times) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80);
    repeat<__m512>(times, [&](__m512 sum) { return _mm512_dpbf16_ps(sum, a, a); });
    return times * SUMS * 2 * 32;
#else
    return 0 * times;
#endif
}

// The same in fours of 8-bit numbers; 0 where vectors have no such instruction.
extern "C" int64_t lockstep_multiply_int8(int64_t times) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    const __m512i a = _mm512_set1_epi8(1);
    repeat<__m512i>(times, [&](__m512i sum) { return _mm512_dpbusd_epi32(sum, a, a); });
    return times * SUMS * 2 * 64;
#elif defined(__AVXVNNI__)
    const __m256i a = _mm256_set1_epi8(1);
    repeat<__m256i>(times, [&](__m256i sum) { return _mm256_dpbusd_avx_epi32(sum, a, a); });
    return times * SUMS * 2 * 32;
#else
    return 0 * times;
#endif
}

// Reads so many bytes from `data` in several streams at once, as products read panels; returns how many.
extern "C" int64_t lockstep_read_memory(int64_t address, int64_t num_bytes) {
    constexpr size_t AHEAD = 4 * LINE;
    const char* data = reinterpret_cast<const char*>(address);
    const size_t part = size_t(num_bytes) / STREAMS / AHEAD * AHEAD;
    Words found[AHEAD / VECTOR_BYTES] = {};
    for (size_t at = 0; at < part; at += AHEAD)
        for (size_t stream = 0; stream < STREAMS; stream++) {
            const char* from = data + stream * part + at;
            for (size_t line = 0; line < AHEAD; line += LINE) __builtin_prefetch(from + 8 * AHEAD + line);
#pragma GCC unroll 16
            for (size_t i = 0; i < AHEAD / VECTOR_BYTES; i++)
                found[i] ^= *reinterpret_cast<const Words*>(from + i * VECTOR_BYTES);
        }
    for (Words& each : found) {
#if defined(__x86_64__)
        asm volatile("" : "+x"(each));
#else
        asm volatile("" : "+w"(each));
#endif
    }
    return int64_t(part * STREAMS);
}
