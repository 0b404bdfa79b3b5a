// Norms of rows, and the rotation of heads by their positions.

#pragma once

#include <cmath>

#include "../core/contract.hpp"
#include "../core/numbers.hpp"

namespace {

// A norm: by the root of the mean square, or by the standard deviation around the mean; times weights, plus a bias if there is one.
struct Norm {
    const float* weights;
    const float* bias;
    float eps;
    bool is_centred;
};

// The sum of the squares of numbers.
template <class T>
float squares_of(const typename T::Element* in, int64_t width) {
    Floats squares = filled(0.f);
    for (int64_t i = 0; i < width; i += LANES) {
        Floats x = T::load(in + i, lanes_of(int(width - i)));
        squares = fmadd(x, x, squares);
    }
    return sum_of(squares);
}

// The same of so many equal parts, each by itself, neighbours added first.
template <class T>
float squares_in_parts(const typename T::Element* in, int64_t width, int64_t parts) {
    int64_t part = width / parts;
    auto at = [&](int64_t number) { return filled(squares_of<T>(in + number * part, part)); };
    return sum_of(sum_of_neighbours(parts, at), Mask(1));
}

// out = (in - mean) * scale, times the norm's weights, plus its bias; or with ADDS it is added to what is there.
template <class T, bool ADDS = false>
void scale_row(const typename T::Element* in, typename T::Element* out, const Norm& norm, int64_t width, Floats mean, float scale) {
    for (int64_t i = 0; i < width; i += LANES) {
        Mask lanes = lanes_of(int(width - i));
        Floats x = T::load(in + i, lanes);
        if (norm.is_centred) x = x - mean;
        x = x * filled(scale) * load(norm.weights + i, lanes);
        if (norm.bias != nullptr) x = x + load(norm.bias + i, lanes);
        if (ADDS) x = x + T::load(out + i, lanes);
        T::store(out + i, x, lanes);
    }
}

inline float scale_of(float squares, int64_t width, const Norm& norm) { return 1.f / std::sqrt(squares / float(width) + norm.eps); }

// out = the norm of in, or with ADDS it is added to what is there.
template <class T, bool ADDS = false>
void norm_row(const typename T::Element* in, typename T::Element* out, const Norm& norm, int64_t width) {
    Floats total = filled(0.f), squares = filled(0.f);
    if (norm.is_centred)
        for (int64_t i = 0; i < width; i += LANES) total = total + T::load(in + i, lanes_of(int(width - i)));
    Floats mean = filled(norm.is_centred ? sum_of(total) / float(width) : 0.f);
    for (int64_t i = 0; i < width; i += LANES) {
        Mask lanes = lanes_of(int(width - i));
        Floats x = T::load(in + i, lanes);
        if (norm.is_centred) x = only(lanes, x - mean);
        squares = fmadd(x, x, squares);
    }
    scale_row<T, ADDS>(in, out, norm, width, mean, scale_of(sum_of(squares), width, norm));
}

// How QKV turns heads of c numbers: k: 0, or one more than the number of their angles; more: norm weights [heads, c] of queries, then
// of keys, or none; number: what the norms add. CENTRED: norms are centred; NORM_LAST: they come behind the rotation.
template <class T>
class Turning {
    using E = typename T::Element;
    int64_t dim;
    Angles angles{};
    const float* weights;
    float eps;
    bool is_centred, is_norm_last;

    void norm(E* head, int64_t number) const {
        norm_row<T>(head, head, {weights + number * dim, nullptr, eps, is_centred}, dim);
    }
    void rotate(E* head, int64_t position) const {
        int64_t half = angles.half;
        const float *cosines = angles.cosines + position * half, *sines = angles.sines + position * half;
        for (int64_t i = 0; i < half; i += LANES) {
            Mask lanes = lanes_of(int(half - i));
            Floats low = T::load(head + i, lanes), high = T::load(head + half + i, lanes);
            Floats c = load(cosines + i, lanes), s = load(sines + i, lanes);
            T::store(head + i, fmsub(low, c, high * s), lanes);
            T::store(head + half + i, fmadd(high, c, low * s), lanes);
        }
    }

   public:
    Turning(const Operation& op, const Step& step)
        : dim(op.c), weights(static_cast<const float*>(op.more)), eps(float(op.number)), is_centred(op.flags & CENTRED),
          is_norm_last(op.flags & NORM_LAST) {
        if (op.k > 0 && step.tokens > 0) angles = step.angles[op.k - 1];
    }

    // A head of a token; number: among the queries' heads, then the keys'.
    void turn(E* head, int64_t number, int64_t position) const {
        if (weights != nullptr && !is_norm_last) norm(head, number);
        rotate(head, position);
        if (weights != nullptr && is_norm_last) norm(head, number);
    }
};

}  // namespace
