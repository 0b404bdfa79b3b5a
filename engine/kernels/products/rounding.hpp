// Inputs of products rounded to 8 bits, for weights that are multiplied as codes of 8 bits.
//
// A row is rounded in parts, each with a scale: a token's own, or one that the checkpoint brings. A part is what one of several
// tensor-parallel ranks may have of a row; so a rank needs to know nothing of the others', and bits do not depend on their number.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../core/numbers.hpp"

namespace {

constexpr float LEAST_BYTE = -128.f, MOST_BYTE = 127.f;
constexpr int BYTE_OFFSET = 128;          // bytes have no signs

// How rows are rounded.
struct Rounding {
    double scale;          // of all; 0: each part has its own
    int64_t zero;          // the number that 0 becomes, from -128 to 127, if scales are given
    int64_t is_symmetric;  // whether 0 becomes 0 where they are not
};

struct Extremes { float least, most; };

template <class T>
Extremes extremes(const typename T::Element* in, int64_t count) {
    Floats least = filled(0.f), most = filled(0.f);
    for (int64_t i = 0; i < count; i += LANES) {
        Floats value = T::load(in + i, lanes_of(int(count - i)));
        least = minimum(least, value), most = maximum(most, value);
    }
    return {-greatest_of(filled(0.f) - least), greatest_of(most)};
}

// The scale of a part, and what 0 becomes.
template <class T>
Rounded rounded_to(const Rounding& how, const typename T::Element* in, int64_t count) {
    if (how.scale != 0) return {float(how.scale), int32_t(how.zero)};
    const auto [least, most] = extremes<T>(in, count);
    if (how.is_symmetric) return {std::max(most, -least) / MOST_BYTE, 0};
    const float scale = (most - least) / (MOST_BYTE - LEAST_BYTE);
    return {scale, scale > 0 ? int32_t(std::lrintf(LEAST_BYTE - least / scale)) : 0};
}

// Writes k numbers and how their parts were rounded, as `Bytes` lie.
template <class T>
void round_row(const Rounding& how, const typename T::Element* in, int64_t k, int64_t parts, uint8_t* out) {
    auto* rounded = const_cast<Rounded*>(rounded_of(out, k));
    const int64_t each = k / parts;
    for (int64_t part = 0; part < parts; ++part, in += each, out += each) {
        const auto [scale, zero] = rounded_to<T>(how, in, each);
        const Floats by = filled(scale);
        for (int64_t i = 0; i < each; i += LANES) {
            Floats value = T::load(in + i, lanes_of(int(each - i)));
            // A row of zeros has no scale.
            Words code = scale > 0 ? to_words(minimum(maximum(value / by, filled(-512.f)), filled(512.f))) : filled_words(0);
            code = add_words(code, filled_words(zero + BYTE_OFFSET));
            store_bytes(out + i, clamped(code, 0, 255));  // up to 15 bytes too many, which the next part or nobody reads
        }
        rounded[part] = {scale, zero + BYTE_OFFSET};
    }
}

}  // namespace

extern "C" {

int64_t lockstep_rounding_bytes() { return sizeof(Rounding); }
}
