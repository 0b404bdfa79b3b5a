// Gated delta rule: o_t = q_t S_t, where S_t = decay_t S_(t-1) + k_t x b_t (v_t - k_t decay_t S_(t-1)), with a norm and a gate behind it.
//
// States exist at multiples of GRID positions. A token of a cell reads the state S before it, and of the cell's earlier tokens j their keys,
// corrections u_j and cumulative decays c_j:
//     u_t = b_t (v_t - e^c_t k_t S - sum of e^(c_t - c_j) (k_t.k_j) u_j),    o_t = e^c_t q_t S + sum of e^(c_t - c_j) (q_t.k_j) u_j
// Each sum has one order, that of keys' numbers or that of tokens. So a token's bits are the same with all tokens of its cell at once and
// by itself. Decays may differ by the number of a key: then c has as many numbers, and they are inside of all products.

#pragma once

#include <algorithm>
#include <cmath>

#include "../core/contract.hpp"
#include "../core/numbers.hpp"
#include "../norms/norms.hpp"
#include "../products/activations.hpp"
#include "state.hpp"

namespace {

constexpr int64_t MOST_DIM = 256;             // numbers of a key, and of a value
constexpr int64_t DIM_PITCH = MOST_DIM + 16;  // an odd number of lines: rows of one column are in different sets of the cache

// A layer's heads: where their numbers are, and how they become decays and steps.
struct DeltaLayer {
    int64_t heads, key_heads;             // value heads; those that are neighbours share a key head
    int64_t key_dim, value_dim;
    const void *mixed, *decays, *steps, *gates;  // rows of: queries, keys and values; decays; steps; gates
    int64_t mixed_pitch, decays_pitch, steps_pitch, gates_pitch;
    int64_t keys_at, values_at;           // first key and first value in a row of `mixed`
    int64_t by_channel;                   // whether each number of a key has a decay of its own
    const float* rates;                   // [heads] of decays: below 0
    const float* shifts;                  // [heads] or [heads, dk] added before softplus or sigmoid
    const float* norm;                    // weights [dv]
    double bound;                         // decays are this times a sigmoid; 0: rate times softplus
    double step_factor;
    double eps;                           // of the norm
    int64_t gate_kind;                    // SILU, or else a sigmoid
};

// Numbers of one thread between the parts of a cell.
struct DeltaRoom {
    alignas(64) float in[2 * GRID * DIM_PITCH];        // of each token: key, query; decayed, if by channel
    alignas(64) float with_state[2 * GRID * DIM_PITCH];  // their products with the state
    alignas(64) float queries[GRID * DIM_PITCH];       // as they are, if by channel
    alignas(64) float keys[GRID * DIM_PITCH];          // decayed up to the cell's end
    alignas(64) float state[MOST_DIM * MOST_DIM];
};

// out [ROWS] += in [ROWS, dk] times the state's columns from `state` on. The state may be none.
template <int ROWS, int VECTORS>
inline void multiply_columns(const float* in, const float* state, int64_t dk, int64_t dv, float* out) {
    Floats sums[ROWS * VECTORS];
#pragma GCC unroll 32
    for (auto& sum : sums) sum = filled(0.f);
    for (int64_t i = 0; i < dk; ++i, state += dv) {
        Floats line[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) line[v] = load(state + v * LANES);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            Floats with = filled(in[row * DIM_PITCH + i]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[row * VECTORS + v] = fmadd(with, line[v], sums[row * VECTORS + v]);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) store(out + row * DIM_PITCH + v * LANES, sums[row * VECTORS + v]);
}
template <int ROWS, int VECTORS>
void multiply_rows(const float* in, const float* state, int64_t dk, int64_t dv, int64_t column, float* out) {
    for (; column + VECTORS * LANES <= dv; column += VECTORS * LANES)
        multiply_columns<ROWS, VECTORS>(in, state + column, dk, dv, out + column);
    if constexpr (VECTORS > 1)
        if (column < dv) multiply_rows<ROWS, VECTORS / 2>(in, state, dk, dv, column, out);
}
// So many pairs of rows, as many at a time as registers hold the sums of.
inline void multiply_state(const float* in, const float* state, int64_t dk, int64_t dv, int64_t pairs, float* out) {
    constexpr int MOST = MAX_ROWS / 2, FEW = MOST > 3 ? 8 : 2;
    for (int64_t count; pairs > 0; pairs -= count, in += 2 * count * DIM_PITCH, out += 2 * count * DIM_PITCH) {
        count = std::min<int64_t>(pairs, MOST);
        switch (count) {
            case 1: multiply_rows<2, FEW>(in, state, dk, dv, 0, out); break;
            case 2: multiply_rows<4, FEW / 2>(in, state, dk, dv, 0, out); break;
            case 3: multiply_rows<6, MOST == 3 ? 1 : 4>(in, state, dk, dv, 0, out); break;
            case 4: multiply_rows<8, 2>(in, state, dk, dv, 0, out); break;
            case 5: multiply_rows<10, 2>(in, state, dk, dv, 0, out); break;
            default: multiply_rows<12, 2>(in, state, dk, dv, 0, out);
        }
    }
}

// to = from, each row times its decay, + the sum of keys' numbers times corrections, token by token; `from` may be none, or `to`.
template <int VECTORS>
void update_columns(const float* keys, const float* corrections, const float* from, float* to, const float* decays, int64_t dk, int64_t dv,
                    int64_t column) {
    constexpr int ROWS = 4;
    for (; column + VECTORS * LANES <= dv; column += VECTORS * LANES)
        for (int64_t i = 0; i < dk; i += ROWS) {
            Floats sums[ROWS * VECTORS];
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v)
                    sums[row * VECTORS + v] = from == nullptr ? filled(0.f)
                                                              : load(from + (i + row) * dv + column + v * LANES) * filled(decays[i + row]);
            for (int64_t token = 0; token < GRID; ++token) {
                const float *key = keys + token * DIM_PITCH + i, *correction = corrections + token * dv + column;
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) {
                    Floats line = load(correction + v * LANES);
#pragma GCC unroll 4
                    for (int row = 0; row < ROWS; ++row) sums[row * VECTORS + v] = fmadd(filled(key[row]), line, sums[row * VECTORS + v]);
                }
            }
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) store(to + (i + row) * dv + column + v * LANES, sums[row * VECTORS + v]);
        }
    if constexpr (VECTORS > 1)
        if (column < dv) update_columns<VECTORS / 2>(keys, corrections, from, to, decays, dk, dv, column);
}

// One head of a layer, for the tokens of one cell after the other.
template <class T>
class DeltaHead {
    using E = typename T::Element;
    const DeltaLayer& layer;
    const int64_t head, key_head, dk, dv;
    DeltaRoom& room;
    float *keys, *corrections, *decays;  // [GRID, dk], [GRID, dv], [GRID] or [GRID, dk] of the cell's tokens; decays are cumulative
    float steps[GRID];

    const E* row(const void* rows, int64_t pitch, int64_t token) const { return static_cast<const E*>(rows) + token * pitch; }
    const float* query_of(int64_t place) const {
        return layer.by_channel ? room.queries + place * DIM_PITCH : room.in + (2 * place + 1) * DIM_PITCH;
    }

    // A row of length 1, times a factor.
    void unit(const E* from, float factor, float* to) const {
        Floats scale = filled(factor / std::sqrt(squares_of<T>(from, dk) + 1e-6f));
        for (int64_t i = 0; i < dk; i += LANES) store(to + i, T::load(from + i, lanes_of(LANES)) * scale);
    }

    // How much the state decays with a token, as a logarithm.
    Floats decay_of(Floats given, Floats shift) const {
        const Floats rate = filled(layer.rates[head]);
        if (layer.bound == 0) return rate * softplus_ps(given + shift);
        return filled(float(layer.bound)) * sigmoid_ps(negative(rate) * (given + shift));
    }

    // Key, query, decay and step of a token of the cell, which is token number `token` of the step.
    void prepare(int64_t place, int64_t token) {
        const E* mixed = row(layer.mixed, layer.mixed_pitch, token);
        const E* decay = row(layer.decays, layer.decays_pitch, token) + head * (layer.by_channel ? dk : 1);
        const E* step = row(layer.steps, layer.steps_pitch, token) + head;
        float *key = keys + place * dk, *in = room.in + 2 * place * DIM_PITCH;
        float* query = const_cast<float*>(query_of(place));
        unit(mixed + layer.keys_at + key_head * dk, 1.f, key);
        unit(mixed + key_head * dk, 1.f / std::sqrt(float(dk)), query);
        steps[place] = float(layer.step_factor) * sum_of(sigmoid_ps(filled(T::one(step[0]))), Mask(1));
        if (!layer.by_channel) {
            float own = sum_of(decay_of(filled(T::one(decay[0])), filled(layer.shifts[head])), Mask(1));
            decays[place] = place == 0 ? own : decays[place - 1] + own;
            for (int64_t i = 0; i < dk; i += LANES) store(in + i, load(key + i));
            return;
        }
        for (int64_t i = 0; i < dk; i += LANES) {
            float* sum = decays + place * dk + i;
            Floats own = decay_of(T::load(decay + i, lanes_of(LANES)), load(layer.shifts + head * dk + i));
            if (place > 0) own = load(sum - dk) + own;
            store(sum, own);
            Floats left = exp_ps(own);
            store(in + i, load(key + i) * left);
            store(in + DIM_PITCH + i, load(query + i) * left);
        }
    }

    // Products of a token's key and query with the keys of the tokens up to it, decayed since.
    void meet(int64_t place, float* of_key, float* of_query) const {
        const float *key = keys + place * dk, *query = query_of(place);
        for (int64_t other = 0; other <= place; ++other) {
            Floats by_key = filled(0.f), by_query = filled(0.f);
            for (int64_t i = 0; i < dk; i += LANES) {
                Floats with = load(keys + other * dk + i);
                if (layer.by_channel) with = with * exp_ps(load(decays + place * dk + i) - load(decays + other * dk + i));
                by_key = fmadd(load(key + i), with, by_key);
                by_query = fmadd(load(query + i), with, by_query);
            }
            of_key[other] = sum_of(by_key), of_query[other] = sum_of(by_query);
        }
        if (layer.by_channel) return;
        Floats left = exp_ps(filled(decays[place]) - load(decays, lanes_of(int(place + 1)), filled(decays[place])));
        store(of_key, load(of_key) * left), store(of_query, load(of_query) * left);
    }

    // The correction of a token, and its output.
    template <int VECTORS>
    void correct(int64_t place, const float* of_key, const float* of_query, const E* value, float* out, int64_t column) {
        const float* with_key = room.with_state + 2 * place * DIM_PITCH;
        const Floats left = layer.by_channel ? filled(1.f) : exp_ps(filled(decays[place]));
        for (; column + VECTORS * LANES <= dv; column += VECTORS * LANES) {
            Floats sums[VECTORS], outs[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                int64_t at = column + v * LANES;
                sums[v] = fnmadd(left, load(with_key + at), T::load(value + at, lanes_of(LANES)));
                outs[v] = left * load(with_key + DIM_PITCH + at);
            }
            for (int64_t other = 0; other < place; ++other) {
                Floats by_key = filled(of_key[other]), by_query = filled(of_query[other]);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v) {
                    Floats line = load(corrections + other * dv + column + v * LANES);
                    sums[v] = fnmadd(by_key, line, sums[v]);
                    outs[v] = fmadd(by_query, line, outs[v]);
                }
            }
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                Floats own = filled(steps[place]) * sums[v];
                store(corrections + place * dv + column + v * LANES, own);
                store(out + column + v * LANES, fmadd(filled(of_query[place]), own, outs[v]));
            }
        }
        if constexpr (VECTORS > 1)
            if (column < dv) correct<VECTORS / 2>(place, of_key, of_query, value, out, column);
    }

    // The norm of a token's output, times its gate.
    void finish(const float* from, const E* gate, E* to) const {
        float scale = 1.f / std::sqrt(squares_of<Float>(from, dv) / float(dv) + float(layer.eps));
        for (int64_t i = 0; i < dv; i += LANES) {
            Floats open = T::load(gate + i, lanes_of(LANES));
            open = layer.gate_kind == SILU ? silu_ps(open) : sigmoid_ps(open);
            T::store(to + i, load(from + i) * filled(scale) * load(layer.norm + i) * open, lanes_of(LANES));
        }
    }

   public:
    DeltaHead(const DeltaLayer& layer, int64_t head, DeltaRoom& room)
        : layer(layer), head(head), key_head(head / (layer.heads / layer.key_heads)), dk(layer.key_dim), dv(layer.value_dim), room(room) {}

    // Computes tokens [begin, end) of a cell, those of the step from `token` on. kept: what the tokens of the cell leave for later ones,
    // dk + dv + 1 (or dk) numbers of each; state: before the cell, or null; out: of the first one.
    void compute(int64_t begin, int64_t end, int64_t token, float* kept, const float* state, E* out, int64_t out_pitch) {
        keys = kept, corrections = keys + GRID * dk, decays = corrections + GRID * dv;
        for (int64_t place = begin; place < end; ++place) prepare(place, token + place - begin);
        float* with_state = room.with_state + 2 * begin * DIM_PITCH;
        if (state != nullptr) multiply_state(room.in + 2 * begin * DIM_PITCH, state, dk, dv, end - begin, with_state);
        else std::fill(with_state, with_state + 2 * (end - begin) * DIM_PITCH, 0.f);
        for (int64_t place = begin; place < end; ++place, ++token, out += out_pitch) {
            alignas(64) float of_key[GRID] = {}, of_query[GRID] = {}, result[MOST_DIM];
            meet(place, of_key, of_query);
            const E* value = row(layer.mixed, layer.mixed_pitch, token) + layer.values_at + head * dv;
            correct<MAX_ROWS == 12 ? 8 : 2>(place, of_key, of_query, value, result, 0);
            finish(result, row(layer.gates, layer.gates_pitch, token) + head * dv, out);
        }
    }

    // The state behind a whole cell; `from`: before it, or null.
    void close(const float* from, float* to) {
        alignas(64) float left[MOST_DIM];
        const int64_t each = layer.by_channel ? dk : 1;
        const float* last = decays + (GRID - 1) * each;
        for (int64_t i = 0; i < dk; i += LANES) store(left + i, exp_ps(layer.by_channel ? load(last + i) : filled(last[0])));
        for (int64_t place = 0; place < GRID; ++place)
            for (int64_t i = 0; i < dk; i += LANES) {
                const float* then = decays + place * each;
                Floats since = layer.by_channel ? load(last + i) - load(then + i) : filled(last[0]) - filled(then[0]);
                store(room.keys + place * DIM_PITCH + i, load(keys + place * dk + i) * exp_ps(since));
            }
        update_columns<MAX_ROWS == 12 ? 4 : 1>(room.keys, corrections, from, to, left, dk, dv, 0);
    }
};

// out [tokens, heads * dv] = what a gated delta rule gives, behind norm and gate. more: a DeltaLayer; extra: a LayerState
template <class T>
void delta_rows(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    auto& layer = *static_cast<const DeltaLayer*>(op.more);
    auto& kept = *static_cast<const LayerState*>(op.extra);
    const int64_t pitch = pitch_of<T>(layer.heads * layer.value_dim);
    work.for_each(step.rows * layer.heads, [&](int64_t task) {
        const int64_t row = task / layer.heads, number = task % layer.heads;
        static thread_local DeltaRoom room;
        DeltaHead<T> head(layer, number, room);
        const float* state = kept.head_state(step.states[row].reads, number);
        for_each_cell(step, row, [&](const Cell& cell) {
            E* out = static_cast<E*>(op.out) + cell.first * pitch + number * layer.value_dim;
            head.compute(cell.open, cell.open + cell.count, cell.first, kept.head_rows(cell.ring, number), state, out, pitch);
            if (!cell.is_whole) return;
            float* behind = cell.fill < 0 ? room.state : kept.head_state(cell.fill, number);
            head.close(state, behind);
            state = behind;
        });
    });
}

}  // namespace

extern "C" {
int64_t lockstep_delta_layer_bytes() { return sizeof(DeltaLayer); }
}
