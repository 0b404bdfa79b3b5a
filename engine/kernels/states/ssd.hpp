// State space duality (Mamba 2) by rows on a grid: a float32 state at each boundary, and the tokens since then.
//
// For a head with decay A and tokens j of a cell, c_t being the sum of dt_j A up to token t, and S the state where the cell begins:
//   y_t = e^{c_t} C_t S + sum over j <= t of e^{c_t - c_j} dt_j (C_t . B_j) x_j + D x_t
//   S'  = e^{c_last} S + sum over j of (e^{c_last - c_j} dt_j B_j) x_j
// So a token needs the state and earlier tokens of its cell alone, and the state is written once in a cell. Every sum goes through the
// numbers of a state, or through the tokens of a cell, from the first to the last, whatever else is computed with it.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "../core/contract.hpp"
#include "../core/numbers.hpp"
#include "../products/activations.hpp"
#include "state.hpp"

namespace {

constexpr int64_t TASK_HEADS = 4;  // heads of one group that a thread takes at once
constexpr int STATE_BLOCK = LOCKSTEP_AVX512 ? 4 : 2;    // tokens, or numbers of a state, that share one pass
constexpr int STATE_VECTORS = LOCKSTEP_AVX512 ? 4 : 2;  // of a head that do: their sums fill the registers
constexpr Mask ALL_LANES = 0xffff;
static_assert(GRID == LANES);      // numbers of the tokens of a cell fill one vector

inline int64_t whole_vectors(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// A layer's heads, in groups that share B and C.
struct SsdLayer {
    const LayerState& kept;    // width of a head: value_dim; numbers of its state for each of those: key_dim
    int64_t groups;
    const float* of_heads;     // [4, heads]: A, below 0; what is added to dt; D; factor of dt
    float least, most;         // dt

    int64_t size() const { return kept.key_dim; }
    int64_t width() const { return kept.value_dim; }
    int64_t group_heads() const { return kept.heads / groups; }
    int64_t group_tasks() const { return (group_heads() + TASK_HEADS - 1) / TASK_HEADS; }
    const float* decay() const { return of_heads; }
    const float* bias() const { return of_heads + kept.heads; }
    const float* skip() const { return of_heads + 2 * kept.heads; }
    const float* scale() const { return of_heads + 3 * kept.heads; }

    // In a ring, of the tokens of a cell: x [heads, GRID, pitch], dt [heads, GRID], B [groups, GRID, size].
    int64_t x_pitch() const { return whole_vectors(width()); }
    float* x(uint8_t* ring, int64_t head) const { return kept.head_rows(ring, 0) + head * GRID * x_pitch(); }
    float* dt(uint8_t* ring, int64_t head) const { return x(ring, kept.heads) + head * GRID; }
    float* b(uint8_t* ring, int64_t group) const { return dt(ring, kept.heads) + group * GRID * size(); }
};

// out [TOKENS] = sums over n of c[n] * state[n], of VECTORS * 16 numbers, the last 16 of which are those of a mask.
template <int TOKENS, int VECTORS>
void read_state(const float* state, int64_t size, int64_t width, Mask last, const float* c, int64_t c_pitch, float* out, int64_t out_pitch) {
    Floats sums[TOKENS][VECTORS];
    for (int t = 0; t < TOKENS; ++t)
        for (int v = 0; v < VECTORS; ++v) sums[t][v] = filled(0.f);
    for (int64_t n = 0; n < size; ++n) {
        Floats row[VECTORS];
        for (int v = 0; v < VECTORS - 1; ++v) row[v] = load(state + n * width + v * LANES);
        row[VECTORS - 1] = load(state + n * width + (VECTORS - 1) * LANES, last);
        for (int t = 0; t < TOKENS; ++t) {
            Floats factor = filled(c[t * c_pitch + n]);
            for (int v = 0; v < VECTORS; ++v) sums[t][v] = fmadd(factor, row[v], sums[t][v]);
        }
    }
    for (int t = 0; t < TOKENS; ++t)
        for (int v = 0; v < VECTORS; ++v) store(out + t * out_pitch + v * LANES, sums[t][v], v == VECTORS - 1 ? last : ALL_LANES);
}

// after = decay * before + sums over the tokens of a cell of weights[token][n] * x[token], for NUMBERS n and VECTORS * 16 numbers.
template <int NUMBERS, int VECTORS>
void write_state(const float* before, float* after, int64_t width, Mask last, float decay, const float* weights, int64_t pitch,
                 const float* x, int64_t x_pitch) {
    Floats sums[NUMBERS][VECTORS];
    for (int n = 0; n < NUMBERS; ++n)
        for (int v = 0; v < VECTORS; ++v)
            sums[n][v] = before == nullptr ? filled(0.f)
                                           : filled(decay) * load(before + n * width + v * LANES, v == VECTORS - 1 ? last : ALL_LANES);
    for (int64_t token = 0; token < GRID; ++token) {
        Floats row[VECTORS];
        for (int v = 0; v < VECTORS; ++v) row[v] = load(x + token * x_pitch + v * LANES);
        for (int n = 0; n < NUMBERS; ++n) {
            Floats factor = filled(weights[token * pitch + n]);
            for (int v = 0; v < VECTORS; ++v) sums[n][v] = fmadd(factor, row[v], sums[n][v]);
        }
    }
    for (int n = 0; n < NUMBERS; ++n)
        for (int v = 0; v < VECTORS; ++v) store(after + n * width + v * LANES, sums[n][v], v == VECTORS - 1 ? last : ALL_LANES);
}

// body(first number, vectors as a constant, mask of the last one) for all numbers of a head.
template <int MOST, class Body>
void for_vectors(int64_t width, Body body) {
    int64_t vectors = whole_vectors(width) / LANES, at = 0;
    auto last = [&](int64_t count) { return at + count == vectors ? lanes_of(int(width - (vectors - 1) * LANES)) : ALL_LANES; };
    for (; vectors - at >= MOST; at += MOST) body(at * LANES, std::integral_constant<int, MOST>(), last(MOST));
    for (; at < vectors; ++at) body(at * LANES, std::integral_constant<int, 1>(), last(1));
}

// What the heads of a task share in one cell, and room for one head's numbers.
struct SsdRoom {
    int64_t size = 0, pitch = 0;          // numbers of a row of b, c and weights, and of one with the zeros behind it
    std::vector<float> b, c, weights, states;
    float scores[GRID][GRID];             // C_t . B_j

    void make(const SsdLayer& layer) {
        states.resize(size_t(TASK_HEADS * layer.size() * layer.width()));
        if (size == layer.size()) return;
        size = layer.size(), pitch = whole_vectors(size);
        for (auto* each : {&b, &c, &weights}) each->assign(size_t(GRID * pitch), 0.f);
    }
    void score(int64_t first, int64_t end) {
        for (int64_t t = first; t < end; ++t)
            for (int64_t j = 0; j <= t; ++j) {
                Floats sum = filled(0.f);
                for (int64_t n = 0; n < pitch; n += LANES) sum = fmadd(load(&c[size_t(t * pitch + n)]), load(&b[size_t(j * pitch + n)]), sum);
                scores[t][j] = sum_of(sum);
            }
    }
};

// to [count] float = from
template <class T>
void widen_row(const typename T::Element* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        Mask lanes = lanes_of(int(count - i));
        store(to + i, T::load(from + i, lanes), lanes);
    }
}

// Tokens of a cell for one head; out: row of the first new one. state: where the cell begins, null for zeros; after: where that of its
// end goes, null for nowhere.
inline void ssd_head(const SsdLayer& layer, SsdRoom& room, const Cell& cell, int64_t head, float* out, int64_t out_pitch,
                     const float* state, float* after) {
    const int64_t width = layer.width(), x_pitch = layer.x_pitch(), first = cell.open, end = cell.open + cell.count;
    const float *x = layer.x(cell.ring, head), decay = layer.decay()[head];
    const Floats dt = load(layer.dt(cell.ring, head), lanes_of(int(end)));
    float steps[GRID], sums[GRID] = {}, total = 0.f;
    store(steps, dt);
    for (int64_t j = 0; j < end; ++j) sums[j] = total = std::fma(steps[j], decay, total);
    const Floats decays = load(sums);
    auto weights_at = [&](int64_t token) {  // of all tokens up to one
        return only(lanes_of(int(token + 1)), exp_ps(filled(sums[token]) - decays) * dt);
    };
    auto exp_of = [](float value) { return greatest_of(exp_ps(filled(value))); };
    auto row = [&](int64_t token) { return out + (token - first) * out_pitch; };
    for (int64_t t = first; t < end && state != nullptr;) {
        const float* c = &room.c[size_t(t * room.pitch)];
        if (end - t >= STATE_BLOCK) {
            for_vectors<STATE_VECTORS>(width, [&](int64_t at, auto vectors, Mask last) {
                read_state<STATE_BLOCK, vectors>(state + at, layer.size(), width, last, c, room.pitch, row(t) + at, out_pitch);
            });
            t += STATE_BLOCK;
        } else {
            for_vectors<4>(width, [&](int64_t at, auto vectors, Mask last) {
                read_state<1, vectors>(state + at, layer.size(), width, last, c, room.pitch, row(t) + at, out_pitch);
            });
            t += 1;
        }
    }
    const Floats skip = filled(layer.skip()[head]);
    for (int64_t t = first; t < end; ++t) {
        float weights[GRID];
        store(weights, weights_at(t) * load(room.scores[t], lanes_of(int(t + 1))));
        const Floats before = filled(exp_of(sums[t]));
        for (int64_t i = 0; i < width; i += LANES) {
            Mask lanes = lanes_of(int(width - i));
            Floats sum = state == nullptr ? filled(0.f) : load(row(t) + i, lanes) * before;
            for (int64_t j = 0; j <= t; ++j) sum = fmadd(filled(weights[j]), load(x + j * x_pitch + i), sum);
            store(row(t) + i, fmadd(skip, load(x + t * x_pitch + i), sum), lanes);
        }
    }
    if (after == nullptr) return;
    float weights[GRID];
    store(weights, weights_at(GRID - 1));
    for (int64_t j = 0; j < GRID; ++j)
        for (int64_t n = 0; n < room.pitch; n += LANES)
            store(&room.weights[size_t(j * room.pitch + n)], filled(weights[j]) * load(&room.b[size_t(j * room.pitch + n)]));
    const float of_state = exp_of(total);
    for_vectors<STATE_VECTORS>(width, [&](int64_t at, auto vectors, Mask last) {
        auto write = [&](int64_t n, auto numbers) {
            write_state<numbers, vectors>(state == nullptr ? nullptr : state + n * width + at, after + n * width + at, width, last, of_state,
                                          &room.weights[size_t(n)], room.pitch, x + at, x_pitch);
        };
        int64_t n = 0;
        for (; layer.size() - n >= STATE_BLOCK; n += STATE_BLOCK) write(n, std::integral_constant<int, STATE_BLOCK>());
        for (; n < layer.size(); ++n) write(n, std::integral_constant<int, 1>());
    });
}

// out [tokens, heads * width] float = the heads' numbers. in: rows of x [heads, width], B and C [groups, size]; weights: dt of the first
// head in the first token's row, which has n numbers; extra: the layer's LayerState; more: see SsdLayer; number, cap: least and greatest dt
template <class T>
void ssd_rows(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    auto& kept = *static_cast<const LayerState*>(op.extra);
    const SsdLayer layer{kept, op.groups, static_cast<const float*>(op.more), float(op.number), float(op.cap)};
    const int64_t width = layer.width(), size = layer.size(), in_pitch = pitch_of<T>(kept.heads * width + 2 * layer.groups * size);
    const int64_t dt_pitch = pitch_of<T>(op.n), out_pitch = kept.heads * width, row_tasks = layer.groups * layer.group_tasks();
    work.for_each(step.rows * row_tasks, [&](int64_t number) {
        static thread_local SsdRoom room;
        room.make(layer);
        const int64_t row = number / row_tasks, task = number % row_tasks, group = task / layer.group_tasks();
        const int64_t in_group = task % layer.group_tasks() * TASK_HEADS, first_head = group * layer.group_heads() + in_group;
        const int64_t count = std::min(TASK_HEADS, layer.group_heads() - in_group);
        const Mask lanes = lanes_of(int(count));
        const Floats bias = load(layer.bias() + first_head, lanes), scale = load(layer.scale() + first_head, lanes);
        const float* states[TASK_HEADS];
        for (int64_t k = 0; k < count; ++k) states[k] = kept.head_state(step.states[row].reads, first_head + k);
        const int64_t row_end = step.offsets[row] + step.counts[row];
        for_each_cell(step, row, [&](const Cell& cell) {
            const int64_t end = cell.open + cell.count;
            float* b = layer.b(cell.ring, group);
            for (int64_t j = 0; j < cell.open; ++j) std::copy_n(b + j * size, size, &room.b[size_t(j * room.pitch)]);
            for (int64_t j = cell.open; j < end; ++j) {
                const int64_t token = cell.first + j - cell.open;
                const E* in = static_cast<const E*>(op.in) + token * in_pitch;
                const E* of_group = in + kept.heads * width + group * size;
                widen_row<T>(of_group, &room.b[size_t(j * room.pitch)], size);
                widen_row<T>(of_group + layer.groups * size, &room.c[size_t(j * room.pitch)], size);
                if (in_group == 0) widen_row<T>(of_group, b + j * size, size);
                const E* dts = reinterpret_cast<const E*>(op.weights) + token * dt_pitch + first_head;
                float dt[LANES];
                Floats wide = softplus_ps(fmadd(T::load(dts, lanes), scale, bias));
                store(dt, minimum(maximum(wide, filled(layer.least)), filled(layer.most)));
                for (int64_t k = 0; k < count; ++k) {
                    layer.dt(cell.ring, first_head + k)[j] = dt[k];
                    widen_row<T>(in + (first_head + k) * width, layer.x(cell.ring, first_head + k) + j * layer.x_pitch(), width);
                }
            }
            room.score(cell.open, end);
            for (int64_t k = 0; k < count; ++k) {
                float* after = cell.fill >= 0 ? kept.head_state(cell.fill, first_head + k)
                               : cell.is_whole && cell.first + cell.count < row_end ? &room.states[size_t(k * size * width)] : nullptr;
                float* out = static_cast<float*>(op.out) + cell.first * out_pitch + (first_head + k) * width;
                ssd_head(layer, room, cell, first_head + k, out, out_pitch, states[k], after);
                states[k] = after;
            }
        });
    });
}

}  // namespace
