// What the stream begins with: rows of the embedding, and inputs that layers have beside the stream.

#pragma once

#include <algorithm>
#include <cstring>
#include "../adapters/added.hpp"
#include "../core/contract.hpp"
#include "../norms/norms.hpp"
#include "../products/activations.hpp"

namespace {

// number: a factor; more: rows of positions that are added, or none; added: an AdapterSite of tokens. With AS_FLOAT out is float
// [tokens, k], of the n tokens from number a on; 0 for others, which another rank has. Positions are added by one rank, to whichever token.
// Rows that are given in place of an embedding take neither factor nor adapter; the rank with the first token has them.
template <class T>
void embed(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    const Floats factor = factor_of(op.number);
    const Adapters<T> adapters(op, step);
    auto* placed = static_cast<const E*>(op.more);
    const bool as_float = op.flags & AS_FLOAT;
    auto put = [&](int64_t token, int64_t i, Floats value, Mask lanes) {
        if (placed != nullptr) value = value + T::load(placed + step.positions[token] * op.k + i, lanes);
        if (as_float) store(static_cast<float*>(op.out) + token * op.k + i, value, lanes);
        else T::store(static_cast<E*>(op.out) + token * pitch_of<T>(op.k) + i, value, lanes);
    };
    work.for_each(step.tokens, [&](int64_t token) {
        const bool is_given = step.ids[token] < 0;
        const int64_t number = is_given ? -1 - step.ids[token] : as_float ? step.ids[token] - op.a : step.ids[token];
        const bool is_here = !as_float || (is_given ? op.a == 0 : number >= 0 && number < op.n);
        const E* from = static_cast<const E*>(is_given ? step.given : op.in) + (is_here ? number * op.k : 0);
        const bool adapts = is_here && !is_given && adapters && adapters.take(token, number);
        if (!as_float && (op.number == 0 || is_given) && placed == nullptr && !adapts)
            return void(std::memcpy(static_cast<E*>(op.out) + token * pitch_of<T>(op.k), from, op.k * sizeof(E)));
        for (int64_t i = 0; i < op.k; i += 2 * LANES) {
            const int64_t next = i + LANES;
            const Mask low = lanes_of(int(op.k - i)), high = lanes_of(int(std::max<int64_t>(0, op.k - next)));
            Floats one = is_here ? T::load(from + i, low) : filled(0.f), two = is_here ? T::load(from + next, high) : filled(0.f);
            if (!is_given) one = one * factor, two = two * factor;
            if (adapts) adapters.add(one, two, token, i / LANES, next / LANES);
            put(token, i, one, low);
            put(token, next, two, high);
        }
    });
}

// Adds plane a of what is given to the stream out [rows, k], at tokens that have such a row.
template <class T>
void add_given(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    const E* plane = static_cast<const E*>(step.given) + op.a * step.num_given * op.k;
    work.for_each(rows_of(op, step), [&](int64_t row) {
        const int64_t number = -1 - step.ids[op.flags & SELECTED ? step.chosen[row] : row];
        if (number < 0) return;
        const E* from = plane + number * op.k;
        E* to = static_cast<E*>(op.out) + row * pitch_of<T>(op.k);
        for (int64_t i = 0; i < op.k; i += LANES) {
            Mask lanes = lanes_of(int(op.k - i));
            T::store(to + i, T::load(to + i, lanes) + T::load(from + i, lanes), lanes);
        }
    });
}

// out [tokens, n], of each layer k numbers: their norm, plus those of the token in a table [tokens of the vocabulary, n]. more: the norm's
// weights [k]; number: what it adds; factors: on the table's numbers, and on the sum; a: the token that stands for rows that are given
template <class T>
void inputs(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    const Norm norm{static_cast<const float*>(op.more), nullptr, float(op.number), false};
    const Floats of_table = filled(op.factors[0]), of_sum = filled(op.factors[1]);
    work.for_each(step.tokens, [&](int64_t token) {
        E* to = static_cast<E*>(op.out) + token * pitch_of<T>(op.n);
        const E* table = static_cast<const E*>(op.in) + (step.ids[token] < 0 ? op.a : step.ids[token]) * op.n;
        for (int64_t first = 0; first < op.n; first += op.k) norm_row<T>(to + first, to + first, norm, op.k);
        for (int64_t i = 0; i < op.n; i += LANES) {
            Mask lanes = lanes_of(int(op.n - i));
            T::store(to + i, fmadd(T::load(table + i, lanes), of_table, T::load(to + i, lanes)) * of_sum, lanes);
        }
    });
}

// out [rows, k] is multiplied by in, of tokens' rows which are part of wider ones, of n numbers. a: SIGMOID, if by the sigmoids of in
template <class T>
void times(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    work.for_each(rows_of(op, step), [&](int64_t row) {
        int64_t token = op.flags & SELECTED ? step.chosen[row] : row;
        const E* from = static_cast<const E*>(op.in) + token * pitch_of<T>(op.n);
        E* to = static_cast<E*>(op.out) + row * pitch_of<T>(op.k);
        for (int64_t i = 0; i < op.k; i += LANES) {
            Mask lanes = lanes_of(int(op.k - i));
            Floats factor = T::load(from + i, lanes);
            if (op.a == SIGMOID) factor = sigmoid_ps(factor);
            T::store(to + i, T::load(to + i, lanes) * factor, lanes);
        }
    });
}

}  // namespace
