// Causal convolutions of each number of a token with the same number of the tokens before it.

#pragma once

#include <algorithm>
#include "../core/contract.hpp"
#include "../core/numbers.hpp"
#include "state.hpp"

namespace {

constexpr int64_t CONV_NUMBERS = 512;  // of a token that a thread takes at once: whole lines of the cache

// Inputs of one row's convolution by position: of this step, of the open rows, and of the state at the boundary.
template <class T>
struct ConvInputs {
    using E = typename T::Element;
    const Operation& op;
    const LayerState& layer;
    int64_t start, boundary;
    const E* rows;   // of this step, from the row's first token on
    const E* open;   // [GRID, width]
    const E* state;  // [before, width], or null

    ConvInputs(const Operation& op, const LayerState& layer, const Step& step, int64_t row)
        : op(op), layer(layer), start(step.starts[row]), boundary(start - step.states[row].open),
          rows(static_cast<const E*>(op.in) + step.offsets[row] * pitch_of<T>(op.n)), open(layer.inputs<T>(step.states[row].from)),
          state(layer.conv_state<T>(step.states[row].reads)) {}

    Floats at(int64_t position, int64_t number, Mask lanes) const {
        if (position >= start) {
            const E* row = rows + (position - start) * pitch_of<T>(op.n);
            Floats value = T::load(row + op.a + number, lanes);
            return op.b < 0 ? value : T::rounded(value * T::load(row + op.b + number, lanes));
        }
        if (position >= boundary) return T::load(open + (position - boundary) * layer.width + number, lanes);
        return state == nullptr ? filled(0.f) : T::load(state + (position - boundary + layer.before) * layer.width + number, lanes);
    }
};

// out [tokens, width] = the convolution of inputs [tokens, width] of a layer whose state is extra. in [tokens, n]: an input is at number a
// of a row, times a factor at number b of it, if that is not -1. weights [before + 1, width] float, those of the oldest input first;
// more: bias [width], or null. flags with ACTIVATED: SiLU of each sum. c: where in a row of in a factor on the output is, or -1. The inputs
// behind the last boundary go to the ring, and those before a boundary that is kept to its slot.
template <class T>
void conv(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    const auto& layer = *static_cast<const LayerState*>(op.extra);
    const auto* weights = reinterpret_cast<const float*>(op.weights);
    const auto* bias = static_cast<const float*>(op.more);
    const int64_t blocks = (layer.width + CONV_NUMBERS - 1) / CONV_NUMBERS, before = layer.before;
    work.for_each(step.tokens * blocks, [&](int64_t part) {
        const int64_t token = part / blocks, begin = part % blocks * CONV_NUMBERS;
        const int64_t end = std::min(begin + CONV_NUMBERS, layer.width);
        const int64_t row = std::upper_bound(step.offsets, step.offsets + step.rows, token) - step.offsets - 1;
        const StateRow& state = step.states[row];
        const ConvInputs<T> inputs(op, layer, step, row);
        const int64_t position = inputs.start + token - step.offsets[row], row_end = inputs.start + step.counts[row];
        const E* factors = static_cast<const E*>(op.in) + token * pitch_of<T>(op.n) + op.c;
        E* out = static_cast<E*>(op.out) + token * pitch_of<T>(layer.width);
        E* kept = position < row_end / GRID * GRID ? nullptr : layer.inputs<T>(state.to) + position % GRID * layer.width;
        E* slot = nullptr;
        for (int64_t fill = state.first_fill; fill < state.first_fill + state.num_fills; ++fill)
            if (step.fills[fill].position == position + 1) slot = layer.conv_state<T>(step.fills[fill].slot);
        for (int64_t i = begin; i < end; i += LANES) {
            Mask lanes = lanes_of(int(end - i));
            Floats sum = filled(0.f);
            for (int64_t back = before; back >= 0; --back)
                sum = fmadd(inputs.at(position - back, i, lanes), load(weights + (before - back) * layer.width + i, lanes), sum);
            if (bias != nullptr) sum = sum + load(bias + i, lanes);
            if (op.flags & ACTIVATED) sum = silu_ps(sum);
            if (op.c >= 0) sum = sum * T::load(factors + i, lanes);
            T::store(out + i, sum, lanes);
            if (kept != nullptr) T::store(kept + i, inputs.at(position, i, lanes), lanes);
            if (slot != nullptr)
                for (int64_t back = before; back > 0; --back)
                    T::store(slot + (before - back) * layer.width + i, inputs.at(position + 1 - back, i, lanes), lanes);
        }
    });
}

}  // namespace
