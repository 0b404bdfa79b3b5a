// Numbers: float, and bfloat16 in pairs; how each is loaded, stored, multiplied and added.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "vectors.hpp"

namespace {

constexpr int LANES = 16;      // outputs of a panel; also keys of a block of the cache

struct Float : FloatParts {
    using Element = float;
    static constexpr int PACK = 1;
    static Floats load(const float* from, Mask lanes) { return ::load(from, lanes); }
    static void store(float* to, Floats value, Mask lanes) { ::store(to, value, lanes); }
    static void store(float* to, Floats one, Floats two) { ::store(to, one), ::store(to + LANES, two); }
    static float one(float value) { return value; }
    static Floats rounded(Floats value) { return value; }
};

struct BFloat16 : BFloat16Parts {
    using Element = uint16_t;
    static constexpr int PACK = 2;
    static Floats load(const uint16_t* from, Mask lanes) { return load_bfloat16(from, lanes); }
    static void store(uint16_t* to, Floats value, Mask lanes) { store_bfloat16(to, value, lanes); }
    static void store(uint16_t* to, Floats one, Floats two) { store_bfloat16(to, one, two); }
    static float one(uint16_t value) {
        uint32_t bits = uint32_t(value) << 16;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    }
    static Floats rounded(Floats value) { return rounded_to_bfloat16(value); }
};

// Inputs that were rounded to 8 bits (ROUND). Their products with weights of 8 bits are added up as whole numbers, in any order.
struct Bytes : BytesParts {
    using Element = uint8_t;
    static constexpr int PACK = 4;
};

// Of one part of a rounded row: a number is (byte - zero) * scale.
struct Rounded {
    float scale;
    int32_t zero;
};
constexpr int64_t LINE_BYTES = 64;
// They are behind the bytes of a row of so many.
inline const Rounded* rounded_of(const uint8_t* row, int64_t k) {
    return reinterpret_cast<const Rounded*>(row + (k + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES);
}

// Numbers from one row that operations hand on to the next: whole lines of a cache, so that two threads do not write to the
// same one, and an odd number of them. With 1024 bytes, say, the 16 rows of a tile would all be in four sets of the first cache.
template <class T>
int64_t pitch_of(int64_t width) {
    constexpr int64_t LINE = LINE_BYTES / sizeof(typename T::Element);
    const int64_t more = T::PACK == Bytes::PACK ? 1 : 0;  // a line for how they were rounded
    return (((width + LINE - 1) / LINE + more) | 1) * LINE;
}

// The sum of COUNT numbers, a power of two: neighbours are added first, as in (0 + 1) + (2 + 3). Halves of it are sums like it, so that
// ranks which have equal parts of the numbers can each add up their own.
template <int64_t COUNT, class At>
inline Floats sum_of_neighbours(const At& at, int64_t first = 0) {
    if constexpr (COUNT == 1) return at(first);
    else return sum_of_neighbours<COUNT / 2>(at, first) + sum_of_neighbours<COUNT / 2>(at, first + COUNT / 2);
}

// The same of any number: the greatest power of two below it, then the others.
template <class At>
Floats sum_of_many(int64_t count, const At& at, int64_t first) {
    if (count == 1) return at(first);
    int64_t half = 1;
    while (2 * half < count) half *= 2;
    return sum_of_many(half, at, first) + sum_of_many(count - half, at, first + half);
}
template <class At>
inline Floats sum_of_neighbours(int64_t count, const At& at) {
    switch (count) {
        case 1: return at(0);
        case 2: return sum_of_neighbours<2>(at);
        case 4: return sum_of_neighbours<4>(at);
        default: return sum_of_many(count, at, 0);
    }
}

Mask lanes_of(int count) { return count >= LANES ? Mask(0xffff) : Mask((1u << count) - 1); }

Floats exp_ps(Floats x) {  // 2^n * 2^f with |f| <= 1/2; the series of 2^f ends below the precision of a float
    Floats t = maximum(x, filled(-104.f)) * filled(1.44269504f);
    Floats n = to_integers(t);
    Floats f = t - n;
    Floats p = filled(1.5403530e-4f);
    for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
        p = fmadd(p, f, filled(c));
    return times_power_of_2(p, n);
}

// 2^x: the whole number below x, times a polynomial that is 1 at 0. Of weights in bfloat16 two digits are left, and four are right.
template <class T>
inline Floats exp2_ps(Floats x) {
    Floats power, f = above_integer(x, power), p;
    if constexpr (T::PACK == 1) {
        p = filled(2.16129163e-4f);
        for (float c : {1.24678458e-3f, 9.67545155e-3f, 5.54852821e-2f, 2.40229309e-1f, 6.93147063e-1f, 1.f}) p = fmadd(p, f, filled(c));
    } else {
        p = filled(7.70670548e-2f);
        for (float c : {2.2764498e-1f, 6.95116818e-1f, 1.f}) p = fmadd(p, f, filled(c));
    }
    return times_power_of_2(p, power);
}

// Near 0, where 1 and exp(-2x) are close to each other, an odd polynomial.
inline Floats tanh_ps(Floats x) {
    Floats z = x * x, p = filled(-5.70498593e-3f);
    for (float c : {2.06390861e-2f, -5.37397154e-2f, 1.33314416e-1f, -3.33332807e-1f}) p = fmadd(p, z, filled(c));
    Floats size = maximum(x, filled(0.f) - x), e = exp2_ps<Float>(size * filled(-2.88539008f));
    Floats far = (filled(1.f) - e) / (filled(1.f) + e);
    far = picked(is_less(x, filled(0.f)), filled(0.f) - far, far);
    return picked(is_less(size, filled(0.6f)), fmadd(p * z, x, x), far);
}
Floats silu_ps(Floats x) {
    Floats denominator = filled(1.f) + exp_ps(filled(0.f) - x);
    return x / denominator;
}

}  // namespace
