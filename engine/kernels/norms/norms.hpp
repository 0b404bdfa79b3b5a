// Norms of rows.

#pragma once

#include <cmath>
#include "../core/contract.hpp"
#include "../core/numbers.hpp"
#include "../exchange/sums.hpp"
#include "../products/activations.hpp"

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

// out [rows, k] = the norm of in (+ out). n: numbers of a row of in, of which these are part, 0 for k; width: the same of out. more:
// weights [k], with CENTRED the bias [k] behind them; number: what is added to the mean square. b: parts whose squares are added up by
// themselves, if not 0. extra: an exchange of ranks that have parts of such a row: what SQUARES gave of each, from byte a of its arena on;
// c, d: as there
template <class T>
void norm(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    int64_t pitch_in = pitch_of<T>(op.n != 0 ? op.n : op.k), pitch_out = pitch_of<T>(op.width != 0 ? op.width : op.k);
    bool is_centred = op.flags & CENTRED;
    auto* weights = static_cast<const float*>(op.more);
    auto* ranks = static_cast<const Exchange*>(op.extra);
    const Norm norm{weights, is_centred ? weights + op.k : nullptr, float(op.number), is_centred};
    work.for_each(rows_of(op, step), [&](int64_t row) {
        const E* from = static_cast<const E*>(op.in) + row * pitch_in;
        E* to = static_cast<E*>(op.out) + row * pitch_out;
        if (ranks != nullptr) {
            float squares = sum_of(sum_over_ranks(*ranks, op.a, row * BOTH + op.c, Mask(1)), Mask(1));
            scale_row<T>(from, to, norm, op.k, filled(0.f), scale_of(squares, op.d, norm));
        } else if (op.b != 0) {
            scale_row<T>(from, to, norm, op.k, filled(0.f), scale_of(squares_in_parts<T>(from, op.k, op.b), op.k, norm));
        } else if (op.flags & ADD) {
            norm_row<T, true>(from, to, norm, op.k);
        } else {
            norm_row<T>(from, to, norm, op.k);
        }
    });
}

// out float [rows, 2], number c of each row = the sum of the squares of in [rows, k], rows which are part of wider ones, of n numbers, in
// b parts. d: numbers of all ranks; 0 where a rank before this one has the same numbers: what it gives is 0.
template <class T>
void squares(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    work.for_each(rows_of(op, step), [&](int64_t row) {
        const E* from = static_cast<const E*>(op.in) + row * pitch_of<T>(op.n);
        static_cast<float*>(op.out)[row * BOTH + op.c] = op.d == 0 ? 0.f : squares_in_parts<T>(from, op.k, op.b);
    });
}

// out [rows, k] = the norm of in, float [rows, k] without space between rows, in `groups` equal parts, times weights and SILU of a gate.
// extra: the gate, part of rows of n numbers; cap: a factor on it, 0 for none; more: weights [k], none: without a norm; number: what is
// added to the mean squares. NORM_LAST: in is multiplied by the gate before the norm, where it is then.
template <class T>
void gated_norm(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    const int64_t groups = std::max<int64_t>(1, op.groups), width = op.k / groups;
    const bool is_last = op.flags & NORM_LAST, has_norm = op.more != nullptr;
    auto* weights = static_cast<const float*>(op.more);
    const Floats factor = factor_of(op.cap);
    work.for_each(rows_of(op, step) * groups, [&](int64_t number) {
        const int64_t row = number / groups, at = number % groups * width;
        float* in = static_cast<float*>(const_cast<void*>(op.in)) + row * op.k + at;
        const E* gate = static_cast<const E*>(op.extra) + row * pitch_of<T>(op.n) + at;
        E* out = static_cast<E*>(op.out) + row * pitch_of<T>(op.k) + at;
        auto of_gate = [&](int64_t i, Mask lanes) { return silu_ps(T::load(gate + i, lanes) * factor); };
        for (int64_t i = 0; i < width && is_last; i += LANES) {
            Mask lanes = lanes_of(int(width - i));
            store(in + i, load(in + i, lanes) * of_gate(i, lanes), lanes);
        }
        const float scale = has_norm ? 1.f / std::sqrt(squares_of<Float>(in, width) / float(width) + float(op.number)) : 1.f;
        for (int64_t i = 0; i < width; i += LANES) {
            Mask lanes = lanes_of(int(width - i));
            Floats x = load(in + i, lanes) * filled(scale);
            if (has_norm) x = x * load(weights + at + i, lanes);
            T::store(out + i, is_last ? x : x * of_gate(i, lanes), lanes);
        }
    });
}

}  // namespace
