// What QKV does with the heads of queries and keys: norms, and the rotation by their positions.

#pragma once

#include <cmath>

#include "../core/contract.hpp"
#include "../core/numbers.hpp"
#include "../norms/norms.hpp"

namespace {

// How QKV turns heads of c numbers: k: 0, or one more than the number of their angles; more: norm weights [heads, c] of queries, then
// of keys, or none; number: what the norms add. CENTRED: norms are centred; NORM_LAST: they come behind the rotation.
template <class T>
class Turning {
    using E = typename T::Element;
    int64_t dim;
    Angles angles{}, own{};
    const float* weights;
    float eps;
    bool is_centred, is_norm_last;
    const int64_t* turned;

    void norm(E* head, int64_t number) const {
        norm_row<T>(head, head, {weights + number * dim, nullptr, eps, is_centred}, dim);
    }
    void rotate(E* head, int64_t at) const {
        int64_t half = angles.half, row = at >= 0 ? at : -1 - at;
        const Angles& table = at >= 0 ? angles : own;
        const float *cosines = table.cosines + row * half, *sines = table.sines + row * half;
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
          is_norm_last(op.flags & NORM_LAST), turned(step.turned != nullptr ? step.turned : step.positions) {
        if (op.k <= 0 || step.tokens == 0) return;
        angles = step.angles[op.k - 1];
        if (step.own_angles != nullptr) own = step.own_angles[op.k - 1];
    }

    // Row of the angles of a token: of its position, or -1 - that of its own ones.
    int64_t row_of(int64_t token) const { return turned[token]; }

    // A head of a token; number: among the queries' heads, then the keys'; at: row_of it.
    void turn(E* head, int64_t number, int64_t at) const {
        if (weights != nullptr && !is_norm_last) norm(head, number);
        rotate(head, at);
        if (weights != nullptr && is_norm_last) norm(head, number);
    }
};

}  // namespace
