// Operations that pick, scale and widen rows.

#pragma once

#include <cstring>
#include "contract.hpp"
#include "numbers.hpp"

namespace {

template <class T>
void select(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    int64_t pitch = pitch_of<T>(op.k);
    work.for_each(step.selected, [&](int64_t row) {
        std::memcpy(static_cast<E*>(op.out) + row * pitch, static_cast<const E*>(op.in) + step.chosen[row] * pitch,
                    op.k * sizeof(E));
    });
}

// out [rows, k] float = in
template <class T>
void widen(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    work.for_each(rows_of(op, step), [&](int64_t row) {
        for (int64_t i = 0; i < op.k; i += LANES) {
            Mask lanes = lanes_of(int(op.k - i));
            store(static_cast<float*>(op.out) + row * pitch_of<Float>(op.k) + i,
                  T::load(static_cast<const E*>(op.in) + row * pitch_of<T>(op.k) + i, lanes), lanes);
        }
    });
}

}  // namespace
