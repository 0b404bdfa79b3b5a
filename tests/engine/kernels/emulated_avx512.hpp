// Vectors of AVX-512 in software, for a CPU that has none: included before the kernels (tests/engine/kernels/emulation.py), it takes
// the place of the compiler's intrinsics, of those that engine/kernels/core/vectors_avx512.hpp and products/quantized.hpp use.
//
// What an instruction does is written lane by lane, as in Intel's Software Developer's Manual, volume 2. Neither bfloat16 nor VNNI nor
// VBMI is emulated: these kernels are those of CPUs without them.

#pragma once

#include <immintrin.h>

#if defined(__AVX2__) && !defined(__AVX512F__)  // a CPU that has the instructions runs them

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __AVX512F__ 1
#define __AVX512VL__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1

namespace {
namespace emulated {

constexpr int LANES = 16;
using Mask = __mmask16;
template <class Lane, int COUNT>
struct Many { Lane lane[COUNT]; };
template <class Lane, class Vector>
auto lanes_of(Vector value) {
    Many<Lane, int(sizeof(Vector) / sizeof(Lane))> found;
    std::memcpy(&found, &value, sizeof(value));
    return found;
}
// A vector whose lane i is of(i).
template <class Vector, class Lane, class Of>
Vector made(Of of) {
    Lane lanes[sizeof(Vector) / sizeof(Lane)];
    int number = 0;
    for (Lane& lane : lanes) lane = Lane(of(number++));
    Vector found;
    std::memcpy(&found, lanes, sizeof(found));
    return found;
}
template <class Of>
__m512 floats(Of of) { return made<__m512, float>(of); }
template <class Of>
__m512i words(Of of) { return made<__m512i, int32_t>(of); }
template <class Of>
__m512i halves(Of of) { return made<__m512i, uint16_t>(of); }
template <class Of>
Mask mask(Of of) {
    unsigned found = 0;
    for (int i = 0; i < LANES; ++i) found |= unsigned(bool(of(i))) << i;
    return Mask(found);
}
inline bool has(uint64_t lanes, int lane) { return lanes >> lane & 1; }
inline auto all(__m512 value) { return lanes_of<float>(value); }
inline auto all(__m512i value) { return lanes_of<int32_t>(value); }

// A function of one vector, of two, of three, lane by lane.
template <class Of>
__m512 each(Of of, __m512 a) { return floats([&, x = all(a)](int i) { return of(x.lane[i]); }); }
template <class Of>
__m512 each(Of of, __m512 a, __m512 b) { return floats([&, x = all(a), y = all(b)](int i) { return of(x.lane[i], y.lane[i]); }); }
template <class Of>
__m512 each(Of of, __m512 a, __m512 b, __m512 c) {
    return floats([&, x = all(a), y = all(b), z = all(c)](int i) { return of(x.lane[i], y.lane[i], z.lane[i]); });
}
template <class Of>
__m512i each(Of of, __m512i a) { return words([&, x = all(a)](int i) { return of(x.lane[i]); }); }
template <class Of>
__m512i each(Of of, __m512i a, __m512i b) { return words([&, x = all(a), y = all(b)](int i) { return of(x.lane[i], y.lane[i]); }); }

// ---- constants and memory
[[gnu::noinline]] inline __m512 set1_ps(float value) { return floats([&](int) { return value; }); }
[[gnu::noinline]] inline __m512i set1_epi32(int value) { return words([&](int) { return value; }); }
template <class... Values>
__m512i setr_epi32(Values... values) {
    const int given[] = {int(values)...};
    return words([&](int i) { return given[i]; });
}
template <class... Values>
__m512 setr_ps(Values... values) {
    const float given[] = {float(values)...};
    return floats([&](int i) { return given[i]; });
}
template <class Vector>
Vector read(const void* from) {
    Vector found;
    std::memcpy(&found, from, sizeof(found));
    return found;
}
template <class Vector>
void write(void* to, Vector value) { std::memcpy(to, &value, sizeof(value)); }
[[gnu::noinline]] inline __m512 mask_loadu_ps(__m512 otherwise, Mask lanes, const void* from) {
    return floats([&, no = all(otherwise)](int i) { return has(lanes, i) ? static_cast<const float*>(from)[i] : no.lane[i]; });
}
[[gnu::noinline]] inline __m512i maskz_loadu_epi32(Mask lanes, const void* from) {
    return words([&](int i) { return has(lanes, i) ? static_cast<const int*>(from)[i] : 0; });
}
[[gnu::noinline]] inline void mask_storeu_ps(void* to, Mask lanes, __m512 value) {
    for (int i = 0; i < LANES; ++i)
        if (has(lanes, i)) static_cast<float*>(to)[i] = all(value).lane[i];
}
[[gnu::noinline]] inline __m256i maskz_loadu_epi16(Mask lanes, const void* from) {
    return made<__m256i, uint16_t>([&](int i) { return has(lanes, i) ? static_cast<const uint16_t*>(from)[i] : 0; });
}
[[gnu::noinline]] inline void mask_storeu_epi16(void* to, uint64_t lanes, const uint16_t* from, int count) {
    for (int i = 0; i < count; ++i)
        if (has(lanes, i)) static_cast<uint16_t*>(to)[i] = from[i];
}
[[gnu::noinline]] inline void mask_storeu_epi16(void* to, Mask lanes, __m256i value) { mask_storeu_epi16(to, lanes, lanes_of<uint16_t>(value).lane, 16); }
[[gnu::noinline]] inline void mask_storeu_epi16(void* to, __mmask32 lanes, __m512i value) { mask_storeu_epi16(to, lanes, lanes_of<uint16_t>(value).lane, 32); }
// The chosen lanes side by side, then zeros.
template <class Vector>
Vector compress(Mask lanes, Vector value) {
    const auto from = all(value);
    auto to = from;
    int count = 0;
    for (int i = 0; i < LANES; ++i)
        if (has(lanes, i)) to.lane[count++] = from.lane[i];
    std::fill(to.lane + count, to.lane + LANES, 0);
    return read<Vector>(&to);
}

// ---- floats
template <class To, class From>
To same_bits(From value) { return read<To>(&value); }
[[gnu::noinline]] inline __m512 fmadd(__m512 a, __m512 b, __m512 c) { return each([](float x, float y, float z) { return std::fma(x, y, z); }, a, b, c); }
[[gnu::noinline]] inline __m512 fmsub(__m512 a, __m512 b, __m512 c) { return each([](float x, float y, float z) { return std::fma(x, y, -z); }, a, b, c); }
[[gnu::noinline]] inline __m512 fnmadd(__m512 a, __m512 b, __m512 c) { return each([](float x, float y, float z) { return std::fma(-x, y, z); }, a, b, c); }
inline float greater(float x, float y) { return x > y ? x : y; }  // the second of two that are equal, or of which one is no number
inline float lesser(float x, float y) { return x < y ? x : y; }
[[gnu::noinline]] inline __m512 max_ps(__m512 a, __m512 b) { return each(greater, a, b); }
[[gnu::noinline]] inline __m512 min_ps(__m512 a, __m512 b) { return each(lesser, a, b); }
[[gnu::noinline]] inline __m512 add_ps(__m512 a, __m512 b) { return each([](float x, float y) { return x + y; }, a, b); }
[[gnu::noinline]] inline __m512 mask_mov_ps(__m512 no, Mask lanes, __m512 yes) {
    return floats([&, x = all(no), y = all(yes)](int i) { return has(lanes, i) ? y.lane[i] : x.lane[i]; });
}
inline float nearest(float x) { return std::nearbyint(x); }  // ties to even, as the kernels' threads have it
[[gnu::noinline]] inline __m512 roundscale(__m512 a, int how) { return how == 0 ? each(nearest, a) : set1_ps(NAN); }
[[gnu::noinline]] inline __m512 reduced(__m512 a, int how) {  // an infinity is 0 above itself
    auto above = [](float x) { return std::isinf(x) ? 0 : x - std::floor(x); };
    return how == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC) ? each(above, a) : set1_ps(NAN);
}
[[gnu::noinline]] inline __m512 scalef(__m512 a, __m512 b) {  // times 2 to the whole number below
    return each([](float x, float y) { return std::isnan(y) ? y : std::ldexp(x, int(std::clamp(std::floor(y), -1000.f, 1000.f))); }, a, b);
}
[[gnu::noinline]] inline __m512 getexp(__m512 a) { return each([](float x) { return std::logb(x); }, a); }
// Halves of the lanes with each other, until one is left.
template <class Value, class Lane, class Of>
Lane folded(Value value, Of of) {
    auto left = lanes_of<Lane>(value);
    for (int width = int(sizeof(Value) / sizeof(Lane)) / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) left.lane[i] = of(left.lane[i], left.lane[i + width]);
    return left.lane[0];
}
[[gnu::noinline]] inline float sum_ps(__m512 a) { return folded<__m512, float>(a, [](float x, float y) { return x + y; }); }
[[gnu::noinline]] inline Mask compare(__m512 a, __m512 b, int how) {
    return mask([&, x = all(a), y = all(b)](int i) {
        const float one = x.lane[i], two = y.lane[i];
        switch (how) {
            case _CMP_LT_OQ: return one < two;
            case _CMP_LE_OQ: return one <= two;
            case _CMP_EQ_OQ: return one == two;
            case _CMP_GE_OQ: return one >= two;
            case _CMP_GT_OQ: return one > two;
            case _CMP_UNORD_Q: return std::isunordered(one, two);
            default: __builtin_trap();
        }
    });
}
[[gnu::noinline]] inline __m512 permute(__m512i places, __m512 from) {
    return floats([&, at = all(places), x = all(from)](int i) { return x.lane[at.lane[i] & 15]; });
}
[[gnu::noinline]] inline __m512 permute_two(__m512 one, __m512i places, __m512 two) {
    return floats([&, at = all(places), x = all(one), y = all(two)](int i) {
        return (at.lane[i] & 16 ? y : x).lane[at.lane[i] & 15];
    });
}
[[gnu::noinline]] inline __m512 from_halves(__m256i value) {  // of IEEE's, eight by eight as AVX2 has them
    const __m256 parts[] = {_mm256_cvtph_ps(_mm256_castsi256_si128(value)), _mm256_cvtph_ps(_mm256_extracti128_si256(value, 1))};
    return read<__m512>(parts);
}

// ---- words
[[gnu::noinline]] inline __m512i add_epi32(__m512i a, __m512i b) { return each([](uint32_t x, uint32_t y) { return x + y; }, a, b); }
[[gnu::noinline]] inline __m512i sub_epi32(__m512i a, __m512i b) { return each([](uint32_t x, uint32_t y) { return x - y; }, a, b); }
[[gnu::noinline]] inline __m512i mullo_epi32(__m512i a, __m512i b) { return each([](uint32_t x, uint32_t y) { return x * y; }, a, b); }
[[gnu::noinline]] inline __m512i and_bits(__m512i a, __m512i b) { return each([](int x, int y) { return x & y; }, a, b); }
[[gnu::noinline]] inline __m512i or_bits(__m512i a, __m512i b) { return each([](int x, int y) { return x | y; }, a, b); }
[[gnu::noinline]] inline __m512i xor_bits(__m512i a, __m512i b) { return each([](int x, int y) { return x ^ y; }, a, b); }
[[gnu::noinline]] inline __m512i min_epi32(__m512i a, __m512i b) { return each([](int x, int y) { return x < y ? x : y; }, a, b); }
[[gnu::noinline]] inline __m512i max_epi32(__m512i a, __m512i b) { return each([](int x, int y) { return x > y ? x : y; }, a, b); }
[[gnu::noinline]] inline __m512i slli_epi32(__m512i a, unsigned bits) { return each([&](uint32_t x) { return bits > 31 ? 0 : x << bits; }, a); }
[[gnu::noinline]] inline __m512i srli_epi32(__m512i a, unsigned bits) { return each([&](uint32_t x) { return bits > 31 ? 0 : x >> bits; }, a); }
[[gnu::noinline]] inline __m512i srai_epi32(__m512i a, unsigned bits) { return each([&](int32_t x) { return x >> std::min(bits, 31u); }, a); }
[[gnu::noinline]] inline __m512i srl_epi32(__m512i a, __m128i bits) { return srli_epi32(a, unsigned(_mm_cvtsi128_si32(bits))); }
[[gnu::noinline]] inline __m512i mask_mov_epi32(__m512i no, Mask lanes, __m512i yes) {
    return words([&, x = all(no), y = all(yes)](int i) { return has(lanes, i) ? y.lane[i] : x.lane[i]; });
}
[[gnu::noinline]] inline Mask equal_words(__m512i a, __m512i b) { return mask([&, x = all(a), y = all(b)](int i) { return x.lane[i] == y.lane[i]; }); }
[[gnu::noinline]] inline Mask lesser_words(__m512i a, __m512i b) { return mask([&, x = all(a), y = all(b)](int i) { return x.lane[i] < y.lane[i]; }); }
[[gnu::noinline]] inline __m512i to_words(__m512 value) {  // what no word holds is the least one
    return words([&, x = all(value)](int i) {
        const float whole = nearest(x.lane[i]);
        return whole >= -0x1p31f && whole < 0x1p31f ? int32_t(whole) : INT32_MIN;
    });
}
[[gnu::noinline]] inline __m512 to_floats(__m512i value) { return floats([&, x = all(value)](int i) { return float(x.lane[i]); }); }

// ---- halves of words, and bytes
[[gnu::noinline]] inline __m512i slli_epi16(__m512i a, unsigned bits) { return halves([&, x = lanes_of<uint16_t>(a)](int i) { return x.lane[i] << bits; }); }
[[gnu::noinline]] inline __m512i srli_epi16(__m512i a, unsigned bits) { return halves([&, x = lanes_of<uint16_t>(a)](int i) { return x.lane[i] >> bits; }); }
[[gnu::noinline]] inline __m512i srai_epi16(__m512i a, unsigned bits) { return halves([&, x = lanes_of<int16_t>(a)](int i) { return x.lane[i] >> bits; }); }
[[gnu::noinline]] inline __m512i madd_epi16(__m512i a, __m512i b) {
    return words([&, x = lanes_of<int16_t>(a), y = lanes_of<int16_t>(b)](int i) {
        return uint32_t(x.lane[2 * i] * y.lane[2 * i]) + uint32_t(x.lane[2 * i + 1] * y.lane[2 * i + 1]);
    });
}
template <class Half, class Vector>
__m512i widened(Vector value) { return words([&, x = lanes_of<Half>(value)](int i) { return x.lane[i]; }); }
[[gnu::noinline]] inline __m256i to_16_bits(__m512i value) { return made<__m256i, uint16_t>([&, x = all(value)](int i) { return x.lane[i]; }); }
[[gnu::noinline]] inline __m128i to_8_bits(__m512i value) { return made<__m128i, uint8_t>([&, x = all(value)](int i) { return x.lane[i]; }); }
[[gnu::noinline]] inline __m512i wide(__m256i value) {
    const __m256i parts[] = {value, _mm256_setzero_si256()};
    return read<__m512i>(parts);
}
[[gnu::noinline]] inline __m512i inserted(__m512i into, __m256i value, int upper) {
    auto parts = lanes_of<Many<int, 8>>(into);
    write(&parts.lane[upper], value);
    return read<__m512i>(&parts);
}

// ---- doubles
[[gnu::noinline]] inline __m512d add_pd(__m512d a, __m512d b) {
    return made<__m512d, double>([&, x = lanes_of<double>(a), y = lanes_of<double>(b)](int i) { return x.lane[i] + y.lane[i]; });
}
[[gnu::noinline]] inline __m512d to_doubles(__m256 value) { return made<__m512d, double>([&, x = lanes_of<float>(value)](int i) { return x.lane[i]; }); }
[[gnu::noinline]] inline __m256 part(__m512 value, int upper) { return read<__m256>(lanes_of<Many<float, 8>>(value).lane + upper); }
[[gnu::noinline]] inline double sum_pd(__m512d a) { return folded<__m512d, double>(a, [](double x, double y) { return x + y; }); }

}  // namespace emulated
}  // namespace

// A lane's number goes through no register of 512 bits here: the compiler cannot tell it from the same one anyway.
#define asm(...) ((void)0)

#define _mm512_set1_ps emulated::set1_ps
#define _mm512_set1_epi32 emulated::set1_epi32
#undef _mm512_setr_epi32
#undef _mm512_setr_ps
#define _mm512_setr_epi32 emulated::setr_epi32
#define _mm512_setr_ps emulated::setr_ps
#define _mm512_loadu_ps emulated::read<__m512>
#define _mm512_loadu_si512 emulated::read<__m512i>
#define _mm512_storeu_ps emulated::write<__m512>
#define _mm512_storeu_si512 emulated::write<__m512i>
#define _mm512_mask_loadu_ps emulated::mask_loadu_ps
#define _mm512_maskz_loadu_ps(lanes, from) emulated::mask_loadu_ps(emulated::set1_ps(0), lanes, from)
#define _mm512_maskz_loadu_epi32 emulated::maskz_loadu_epi32
#define _mm512_mask_storeu_ps emulated::mask_storeu_ps
#define _mm256_maskz_loadu_epi16 emulated::maskz_loadu_epi16
#define _mm256_mask_storeu_epi16(to, lanes, value) emulated::mask_storeu_epi16(to, emulated::Mask(lanes), value)
#define _mm512_mask_storeu_epi16(to, lanes, value) emulated::mask_storeu_epi16(to, __mmask32(lanes), value)
#define _mm512_maskz_compress_ps emulated::compress<__m512>
#define _mm512_maskz_compress_epi32 emulated::compress<__m512i>
#define _mm512_castsi512_ps (emulated::same_bits<__m512, __m512i>)
#define _mm512_castps_si512 (emulated::same_bits<__m512i, __m512>)
#define _mm512_fmadd_ps emulated::fmadd
#define _mm512_fmsub_ps emulated::fmsub
#define _mm512_fnmadd_ps emulated::fnmadd
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_mask_max_ps(otherwise, lanes, a, b) emulated::mask_mov_ps(otherwise, lanes, emulated::max_ps(a, b))
#define _mm512_mask_add_ps(otherwise, lanes, a, b) emulated::mask_mov_ps(otherwise, lanes, emulated::add_ps(a, b))
#define _mm512_mask_mov_ps emulated::mask_mov_ps
#define _mm512_maskz_mov_ps(lanes, value) emulated::mask_mov_ps(emulated::set1_ps(0), lanes, value)
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps emulated::roundscale
#undef _mm512_reduce_ps
#define _mm512_reduce_ps emulated::reduced
#define _mm512_scalef_ps emulated::scalef
#undef _mm512_getexp_ps
#define _mm512_getexp_ps emulated::getexp
#define _mm512_reduce_max_ps(value) (emulated::folded<__m512, float>(value, emulated::greater))
#define _mm512_reduce_add_ps emulated::sum_ps
#define _mm512_mask_reduce_add_ps(lanes, value) emulated::sum_ps(emulated::mask_mov_ps(emulated::set1_ps(0), lanes, value))
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask emulated::compare
#define _mm512_permutexvar_ps emulated::permute
#define _mm512_permutex2var_ps emulated::permute_two
#define _mm512_cvtph_ps emulated::from_halves
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_sub_epi32 emulated::sub_epi32
#define _mm512_mullo_epi32 emulated::mullo_epi32
#define _mm512_and_si512 emulated::and_bits
#define _mm512_or_si512 emulated::or_bits
#define _mm512_xor_si512 emulated::xor_bits
#define _mm512_min_epi32 emulated::min_epi32
#define _mm512_max_epi32 emulated::max_epi32
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_srai_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_srli_epi32 emulated::srli_epi32
#define _mm512_srai_epi32 emulated::srai_epi32
#define _mm512_srl_epi32 emulated::srl_epi32
#define _mm512_mask_mov_epi32 emulated::mask_mov_epi32
#define _mm512_mask_reduce_min_epi32(lanes, value)                                                              \
    (emulated::folded<__m512i, int>(emulated::mask_mov_epi32(emulated::set1_epi32(INT32_MAX), lanes, value), \
                                    [](int x, int y) { return x < y ? x : y; }))
#define _mm512_cmpeq_epi32_mask emulated::equal_words
#define _mm512_cmplt_epi32_mask emulated::lesser_words
#define _mm512_cvtps_epi32 emulated::to_words
#define _mm512_cvtepi32_ps emulated::to_floats
#undef _mm512_slli_epi16
#undef _mm512_srli_epi16
#undef _mm512_srai_epi16
#define _mm512_slli_epi16 emulated::slli_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#define _mm512_srai_epi16 emulated::srai_epi16
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_cvtepu16_epi32 emulated::widened<uint16_t>
#define _mm512_cvtepi8_epi32 emulated::widened<int8_t>
#define _mm512_cvtepi32_epi16 emulated::to_16_bits
#define _mm512_cvtepi32_epi8 emulated::to_8_bits
#define _mm512_castsi256_si512 emulated::wide
#undef _mm512_inserti64x4
#define _mm512_inserti64x4 emulated::inserted
#define _mm512_add_pd emulated::add_pd
#define _mm512_cvtps_pd emulated::to_doubles
#define _mm512_castps512_ps256(value) emulated::part(value, 0)
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps emulated::part
#define _mm512_reduce_add_pd emulated::sum_pd

#endif
