// Sixteen numbers in four registers of NEON, with masks of bits as AVX-512 has them. Every function has the bits of the one
// in vectors_avx2.hpp: sums are added in the same order, and of two numbers that do not compare the second is taken.

#pragma once

#include <arm_neon.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace {

struct Floats { float32x4_t of[4]; };
struct Words { int32x4_t of[4]; };
struct Doubles { float64x2_t of[4] = {vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)}; };
using Mask = uint16_t;

constexpr bool WIDENS_INPUTS = true;  // rows of bfloat16 are widened once, for many panels
constexpr int MAX_ROWS = 6;           // inputs that share one pass over a panel: their sums fill the registers
constexpr Mask EVERY_LANE = 0xffff;

// body(register) for each of the four.
template <class Result, class Body>
inline Result each_of(Body body) { return {body(0), body(1), body(2), body(3)}; }
template <class Body>
inline Floats floats_of(Body body) { return each_of<Floats>(body); }
template <class Body>
inline Words words_of(Body body) { return each_of<Words>(body); }

inline Floats operator+(Floats a, Floats b) { return floats_of([&](int i) { return vaddq_f32(a.of[i], b.of[i]); }); }
inline Floats operator-(Floats a, Floats b) { return floats_of([&](int i) { return vsubq_f32(a.of[i], b.of[i]); }); }
inline Floats operator*(Floats a, Floats b) { return floats_of([&](int i) { return vmulq_f32(a.of[i], b.of[i]); }); }
inline Floats operator/(Floats a, Floats b) { return floats_of([&](int i) { return vdivq_f32(a.of[i], b.of[i]); }); }

inline Floats filled(float value) { return floats_of([&](int) { return vdupq_n_f32(value); }); }
inline Words filled_words(int value) { return words_of([&](int) { return vdupq_n_s32(value); }); }
inline Words numbers_to_15() { return {int32x4_t{0, 1, 2, 3}, int32x4_t{4, 5, 6, 7}, int32x4_t{8, 9, 10, 11}, int32x4_t{12, 13, 14, 15}}; }

inline Floats as_floats(Words value) { return floats_of([&](int i) { return vreinterpretq_f32_s32(value.of[i]); }); }
inline Words as_words(Floats value) { return words_of([&](int i) { return vreinterpretq_s32_f32(value.of[i]); }); }

// ---- masks
inline Words lanes_in(Mask lanes) {  // all bits of a lane
    const uint32x4_t bits = vdupq_n_u32(lanes), first = {1, 2, 4, 8};
    return words_of([&](int i) { return vreinterpretq_s32_u32(vtstq_u32(bits, vshlq_u32(first, vdupq_n_s32(4 * i)))); });
}
inline Mask mask_of(Words lanes) {  // of lanes whose bits are all the same
    const uint16x8_t low = {1, 2, 4, 8, 16, 32, 64, 128}, high = vshlq_n_u16(low, 8);
    auto halves = [&](int i) { return vreinterpretq_u16_s16(vcombine_s16(vmovn_s32(lanes.of[i]), vmovn_s32(lanes.of[i + 1]))); };
    return Mask(vaddvq_u16(vorrq_u16(vandq_u16(halves(0), low), vandq_u16(halves(2), high))));
}

inline Floats picked(Mask lanes, Floats yes, Floats no) {
    Words which = lanes_in(lanes);
    return floats_of([&](int i) { return vbslq_f32(vreinterpretq_u32_s32(which.of[i]), yes.of[i], no.of[i]); });
}
inline Words picked(Mask lanes, Words yes, Words no) { return as_words(picked(lanes, as_floats(yes), as_floats(no))); }
inline Words and_words(Words a, Words b) { return words_of([&](int i) { return vandq_s32(a.of[i], b.of[i]); }); }
inline Floats only(Mask lanes, Floats value) {
    return lanes == EVERY_LANE ? value : as_floats(and_words(as_words(value), lanes_in(lanes)));
}

// ---- memory; lanes that a mask leaves out are neither read nor written, and get 0, or `otherwise`
inline Floats load(const float* from) { return floats_of([&](int i) { return vld1q_f32(from + 4 * i); }); }
inline Floats load(const float* from, Mask lanes, Floats otherwise) {
    if (lanes == EVERY_LANE) return load(from);
    float some[16];
    for (int i = 0; i < 4; ++i) vst1q_f32(some + 4 * i, otherwise.of[i]);
    for (unsigned left = lanes; left != 0; left &= left - 1) some[__builtin_ctz(left)] = from[__builtin_ctz(left)];
    return load(some);
}
inline Floats load(const float* from, Mask lanes) { return load(from, lanes, filled(0.f)); }
inline Floats load_halves(const void* from) {
    auto* at = static_cast<const uint16_t*>(from);
    return floats_of([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at + 4 * i))); });
}
inline Words load_words(const void* from) {
    auto* at = static_cast<const int32_t*>(from);
    return words_of([&](int i) { return vld1q_s32(at + 4 * i); });
}
inline Words load_words(const void* from, Mask lanes) { return as_words(load(static_cast<const float*>(from), lanes)); }
inline void store(float* to, Floats value) {
    for (int i = 0; i < 4; ++i) vst1q_f32(to + 4 * i, value.of[i]);
}
inline void store(float* to, Floats value, Mask lanes) {
    if (lanes == EVERY_LANE) return store(to, value);
    float some[16];
    store(some, value);
    for (unsigned left = lanes; left != 0; left &= left - 1) to[__builtin_ctz(left)] = some[__builtin_ctz(left)];
}
inline void store(void* to, Words value) { store(static_cast<float*>(to), as_floats(value)); }
// For each mask of four lanes the bytes of those that it has, side by side.
constexpr auto lanes_side_by_side() {
    std::array<std::array<uint8_t, 16>, 16> all{};
    for (int mask = 0; mask < 16; ++mask)
        for (int lane = 0, count = 0; lane < 4; ++lane)
            if (mask >> lane & 1)
                for (int byte = 0; byte < 4; ++byte) all[size_t(mask)][size_t(count++)] = uint8_t(4 * lane + byte);
    return all;
}
// Side by side those lanes that a mask has; up to 16 are written.
inline void store_only(float* to, Floats value, Mask lanes) {
    static constexpr auto BYTES = lanes_side_by_side();
    for (int i = 0; i < 4; ++i) {
        const unsigned some = lanes >> 4 * i & 15;
        vst1q_f32(to, vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(value.of[i]), vld1q_u8(BYTES[some].data()))));
        to += __builtin_popcount(some);
    }
}
inline void store_only(int32_t* to, Words value, Mask lanes) { store_only(reinterpret_cast<float*>(to), as_floats(value), lanes); }

// ---- floats
inline Floats converted(Words value) { return floats_of([&](int i) { return vcvtq_f32_s32(value.of[i]); }); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return floats_of([&](int i) { return vfmaq_f32(c.of[i], a.of[i], b.of[i]); }); }
inline Floats fmsub(Floats a, Floats b, Floats c) { return floats_of([&](int i) { return vfmaq_f32(vnegq_f32(c.of[i]), a.of[i], b.of[i]); }); }
inline Floats fnmadd(Floats a, Floats b, Floats c) { return floats_of([&](int i) { return vfmsq_f32(c.of[i], a.of[i], b.of[i]); }); }
inline float32x4_t maximum(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Floats maximum(Floats a, Floats b) { return floats_of([&](int i) { return maximum(a.of[i], b.of[i]); }); }
inline Floats minimum(Floats a, Floats b) { return floats_of([&](int i) { return vbslq_f32(vcltq_f32(a.of[i], b.of[i]), a.of[i], b.of[i]); }); }
// Lanes that the mask leaves out stay as a has them.
inline Floats maximum(Floats a, Floats b, Mask lanes) { return lanes == EVERY_LANE ? maximum(a, b) : picked(lanes, maximum(a, b), a); }
inline Floats add(Floats a, Floats b, Mask lanes) { return lanes == EVERY_LANE ? a + b : picked(lanes, a + b, a); }
inline Floats to_integers(Floats value) { return floats_of([&](int i) { return vrndnq_f32(value.of[i]); }); }  // the nearest, ties to even
// Each number of the lower half twice, or of the upper one.
inline Floats twice(Floats value, int upper) {
    const float32x4_t one = value.of[2 * upper], two = value.of[2 * upper + 1];
    return {vzip1q_f32(one, one), vzip2q_f32(one, one), vzip1q_f32(two, two), vzip2q_f32(two, two)};
}
// Numbers of two in turn, of the lower halves or of the upper ones.
inline Floats in_turn(Floats one, Floats two, int upper) {
    const int i = 2 * upper;
    return {vzip1q_f32(one.of[i], two.of[i]), vzip2q_f32(one.of[i], two.of[i]), vzip1q_f32(one.of[i + 1], two.of[i + 1]),
            vzip2q_f32(one.of[i + 1], two.of[i + 1])};
}
// The numbers of a table whose places are the lowest four bits of each word.
inline Floats looked_up(Floats table, Words places) {
    auto bytes = [](float32x4_t some) { return vreinterpretq_u8_f32(some); };
    const uint8x16x4_t all = {bytes(table.of[0]), bytes(table.of[1]), bytes(table.of[2]), bytes(table.of[3])};
    return floats_of([&](int i) {  // byte b of a number is byte 4 * place + b of the table
        int32x4_t first = vmulq_n_s32(vandq_s32(places.of[i], vdupq_n_s32(15)), 0x04040404);
        return vreinterpretq_f32_u8(vqtbl4q_u8(all, vreinterpretq_u8_s32(vaddq_s32(first, vdupq_n_s32(0x03020100)))));
    });
}
inline float greatest_of(Floats value) {
    float32x4_t four = maximum(maximum(value.of[0], value.of[2]), maximum(value.of[1], value.of[3]));
    float32x4_t two = maximum(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(maximum(two, vdupq_laneq_f32(two, 1)), 0);
}
inline float sum_of(Floats value) {
    float32x4_t four = vaddq_f32(vaddq_f32(value.of[0], value.of[2]), vaddq_f32(value.of[1], value.of[3]));
    float32x4_t two = vaddq_f32(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(two, 0) + vgetq_lane_f32(two, 1);
}
inline float sum_of(Floats value, Mask lanes) { return sum_of(only(lanes, value)); }
template <class Compare>
inline Mask compared(Compare compare) { return mask_of(words_of([&](int i) { return vreinterpretq_s32_u32(compare(i)); })); }
inline Mask is_less(Floats a, Floats b) { return compared([&](int i) { return vcltq_f32(a.of[i], b.of[i]); }); }
inline Mask is_at_most(Floats a, Floats b) { return compared([&](int i) { return vcleq_f32(a.of[i], b.of[i]); }); }
inline Mask is_equal(Floats a, Floats b) { return compared([&](int i) { return vceqq_f32(a.of[i], b.of[i]); }); }
inline Mask is_at_least(Floats a, Floats b) { return compared([&](int i) { return vcgeq_f32(a.of[i], b.of[i]); }); }
inline Mask is_greater(Floats a, Floats b) { return compared([&](int i) { return vcgtq_f32(a.of[i], b.of[i]); }); }
inline Mask is_nan(Floats value) { return Mask(~is_equal(value, value)); }

// ---- words
inline Words add_words(Words a, Words b) { return words_of([&](int i) { return vaddq_s32(a.of[i], b.of[i]); }); }
inline Words subtract_words(Words a, Words b) { return words_of([&](int i) { return vsubq_s32(a.of[i], b.of[i]); }); }
inline Words multiply_words(Words a, Words b) { return words_of([&](int i) { return vmulq_s32(a.of[i], b.of[i]); }); }
inline Words xor_words(Words a, Words b) { return words_of([&](int i) { return veorq_s32(a.of[i], b.of[i]); }); }
inline Words shift_right(Words value, int bits) {
    const int32x4_t by = vdupq_n_s32(-bits);
    return words_of([&](int i) { return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(value.of[i]), by)); });
}
template <int BITS>
Words shift_left(Words value) { return words_of([&](int i) { return vshlq_n_s32(value.of[i], BITS); }); }
template <int BITS>
Words shift_right(Words value) {
    if constexpr (BITS == 0) return value;
    else return words_of([&](int i) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(value.of[i]), BITS)); });
}
template <int BITS>
Words shift_right_signed(Words value) { return words_of([&](int i) { return vshrq_n_s32(value.of[i], BITS); }); }
inline int least_of(Words value, Mask lanes) {
    value = picked(lanes, value, filled_words(INT32_MAX));
    return vminvq_s32(vminq_s32(vminq_s32(value.of[0], value.of[1]), vminq_s32(value.of[2], value.of[3])));
}
inline Mask is_equal(Words a, Words b) { return compared([&](int i) { return vceqq_s32(a.of[i], b.of[i]); }); }
inline Mask is_less(Words a, Words b) { return compared([&](int i) { return vcltq_s32(a.of[i], b.of[i]); }); }
inline Words to_words(Floats value) { return words_of([&](int i) { return vcvtnq_s32_f32(value.of[i]); }); }  // the nearest, ties to even
inline Words clamped(Words value, int least, int most) {
    const int32x4_t low = vdupq_n_s32(least), high = vdupq_n_s32(most);
    return words_of([&](int i) { return vminq_s32(vmaxq_s32(value.of[i], low), high); });
}
// The lowest byte of each, 16 bytes.
inline uint8x16_t lowest_bytes(Words value) {
    auto bytes = [&](int i) { return vreinterpretq_u8_s32(value.of[i]); };
    return vuzp1q_u8(vuzp1q_u8(bytes(0), bytes(1)), vuzp1q_u8(bytes(2), bytes(3)));
}
inline void store_bytes(uint8_t* to, Words value) { vst1q_u8(to, lowest_bytes(value)); }
// The same number, which the compiler takes for another: a product is rounded before something is added to it.
inline Floats as_it_is(Floats value) {
    asm("" : "+w"(value.of[0]), "+w"(value.of[1]), "+w"(value.of[2]), "+w"(value.of[3]));
    return value;
}

// value * 2^power; the power is a whole number.
inline Floats times_power_of_2(Floats value, Floats power) {
    power = maximum(minimum(power, filled(254.f)), filled(-252.f));  // in two steps, so that each is the exponent of a normal number
    Words n = to_words(power), half = shift_right_signed<1>(n);
    auto power_of_2 = [](Words exponent) { return as_floats(shift_left<23>(add_words(exponent, filled_words(127)))); };
    return value * power_of_2(half) * power_of_2(subtract_words(n, half));
}
// How much a value is above a whole number, at least 0 and below 1; `power` is that, for times_power_of_2(). Below -200: 0.
inline Floats above_integer(Floats value, Floats& power) {
    value = maximum(value, filled(-200.f));
    power = floats_of([&](int i) { return vrndmq_f32(value.of[i]); });
    return value - power;
}
// log2 of normal numbers above 0, rounded down.
inline Floats exponents(Floats value) { return converted(subtract_words(shift_right<23>(as_words(value)), filled_words(127))); }

// ---- doubles: sums of lanes that are eight apart
inline Doubles add(Doubles total, Floats x) {
    for (int i = 0; i < 4; ++i) {
        auto& low = total.of[i % 2 * 2];
        auto& high = total.of[i % 2 * 2 + 1];
        low = vaddq_f64(low, vcvt_f64_f32(vget_low_f32(x.of[i]))), high = vaddq_f64(high, vcvt_high_f64_f32(x.of[i]));
    }
    return total;
}
inline double sum_of(Doubles value) {
    float64x2_t two = vaddq_f64(vaddq_f64(value.of[0], value.of[2]), vaddq_f64(value.of[1], value.of[3]));
    return vgetq_lane_f64(two, 0) + vgetq_lane_f64(two, 1);
}

// ---- bfloat16: the upper half of a float
inline Floats load_bfloat16(const uint16_t* from, Mask lanes) {
    uint16_t some[16] = {};
    if (lanes != EVERY_LANE) {
        for (unsigned left = lanes; left != 0; left &= left - 1) some[__builtin_ctz(left)] = from[__builtin_ctz(left)];
        from = some;
    }
    return floats_of([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16)); });
}
inline Words bits_of_bfloat16(Floats value) {  // of the nearest one, ties to even
    Words bits = as_words(value), odd = and_words(shift_right<16>(bits), filled_words(1));
    Words nearest = shift_right<16>(add_words(bits, add_words(odd, filled_words(0x7fff))));
    Mask nan = is_nan(value);
    return nan == 0 ? nearest : picked(nan, filled_words(0x7fc0), nearest);
}
inline void store_bfloat16(uint16_t* to, Floats value, Mask lanes) {
    Words bits = bits_of_bfloat16(value);
    uint16_t some[16], *all = lanes == EVERY_LANE ? to : some;
    for (int i = 0; i < 4; ++i) vst1_u16(all + 4 * i, vmovn_u32(vreinterpretq_u32_s32(bits.of[i])));
    if (all == some)
        for (unsigned left = lanes; left != 0; left &= left - 1) to[__builtin_ctz(left)] = some[__builtin_ctz(left)];
}
inline void store_bfloat16(uint16_t* to, Floats one, Floats two) {
    store_bfloat16(to, one, EVERY_LANE);
    store_bfloat16(to + 16, two, EVERY_LANE);
}
inline Floats rounded_to_bfloat16(Floats value) { return as_floats(shift_left<16>(bits_of_bfloat16(value))); }
// Sixteen numbers into every other half of so many words, the lower ones or the upper ones; another thread may write the others.
inline void store_halves(uint32_t* to, const uint16_t* from, bool upper) {
    auto* halves = reinterpret_cast<char*>(to) + (upper ? 2 : 0);
    for (int i = 0; i < 16; ++i) std::memcpy(halves + 4 * i, from + i, 2);
}

// ---- codes of eight bits: whole numbers, or bits of another number, as words
inline Words load_int8(const int8_t* from) {
    const int8x16_t all = vld1q_s8(from);
    const int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
    return {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
}
inline Words rounded_words(Floats value) { return to_words(value); }
inline void store_int8(int8_t* to, Words value) { vst1q_u8(reinterpret_cast<uint8_t*>(to), lowest_bytes(value)); }

// ---- the multiply-add of everything: a word of weights and one of inputs are PARTS products of lanes, one after the other
struct FloatParts {
    static constexpr int PARTS = 1;
    template <int PART>
    static Floats of(Words words) { return as_floats(words); }
    static Floats madd(Floats sum, Floats weights, Floats inputs) { return fmadd(weights, inputs, sum); }
};
struct BFloat16Parts {
    static constexpr int PARTS = 2;
    template <int PART>
    static Floats of(Words words) { return as_floats(PART == 0 ? shift_left<16>(words) : and_words(words, filled_words(int(0xffff0000)))); }
    static Floats madd(Floats sum, Floats weights, Floats inputs) { return fmadd(weights, inputs, sum); }
};

// Words are four bytes: those of weights have signs, those of inputs none. Bytes 0 and 2 are multiplied as numbers of 16 bits, then 1 and 3.
// Sums are whole numbers, in the registers of floats.
struct BytesParts {
    static constexpr int PARTS = 2;
    template <int PART>
    static Floats of(Words words) {
        return as_floats(words_of([&](int i) {
            int16x8_t some = vreinterpretq_s16_s32(words.of[i]);
            return vreinterpretq_s32_s16(vshrq_n_s16(PART == 0 ? vshlq_n_s16(some, 8) : some, 8));
        }));
    }
    static Floats madd(Floats sum, Floats weights, Floats inputs) {
        return floats_of([&](int i) {
            int16x8_t one = vreinterpretq_s16_f32(weights.of[i]), other = vreinterpretq_s16_f32(inputs.of[i]);
            int32x4_t low = vmull_s16(vget_low_s16(one), vget_low_s16(other)), high = vmull_high_s16(one, other);
            return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(sum.of[i]), vpaddq_s32(low, high)));
        });
    }
};

// Panels, of so many, that rows go through side by side: their sums, four registers each, fill these.
constexpr int panels_beside(int rows, int64_t panels) {
    return rows == 1 && panels >= 4 ? 4 : rows <= 3 && panels >= 2 ? 2 : 1;
}

}  // namespace
