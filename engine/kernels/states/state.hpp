// What layers with a recurrent state keep: states at boundaries in slots, and open rows in rings.
//
// A boundary is a position that is a multiple of GRID. A row of a step begins at some position behind its boundary. Its tokens read the
// state at the boundary, and the open rows between that and themselves. The rows of one cell of the grid are a ring: of each layer the
// inputs of its convolution, then, for each head, floats of which the head's operation decides the order.

#pragma once

#include "../core/contract.hpp"
#include "../core/numbers.hpp"

namespace {

constexpr int64_t GRID = 16;  // NATIVE_GRID in engine/states/grid.py

// Of one layer, in `extra` of its operations.
struct LayerState {
    void* conv;         // [slots, before, width] of the rows' type: the last inputs of the convolution, the oldest first
    float* recurrent;   // [slots, heads, key_dim, value_dim]
    int64_t conv_step, recurrent_step;  // numbers from one slot to the next
    int64_t before;     // inputs that the convolution reads before a token's own
    int64_t width;      // numbers of such an input
    int64_t heads, key_dim, value_dim;
    int64_t head_floats;  // that a row keeps for each head
    int64_t ring_at;    // where the layer begins in a ring, in bytes
    int64_t heads_at;   // where the heads begin behind that

    // State of a head in a slot, [key_dim, value_dim]; null for slot -1: it is all zeros.
    float* head_state(int64_t slot, int64_t head) const {
        return slot < 0 ? nullptr : recurrent + slot * recurrent_step + head * key_dim * value_dim;
    }
    // Inputs of the convolution in a slot, [before, width]; null for slot -1.
    template <class T>
    typename T::Element* conv_state(int64_t slot) const {
        return slot < 0 ? nullptr : static_cast<typename T::Element*>(conv) + slot * conv_step;
    }
    // Inputs of the convolution in a ring, [GRID, width].
    template <class T>
    typename T::Element* inputs(uint8_t* ring) const {
        return reinterpret_cast<typename T::Element*>(ring + ring_at);
    }
    // Numbers of a head in a ring: GRID * head_floats of them, from a line of the cache on.
    float* head_rows(uint8_t* ring, int64_t head) const {
        int64_t bytes = (GRID * head_floats * 4 + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
        return reinterpret_cast<float*>(ring + ring_at + heads_at + head * bytes);
    }
};

// Tokens of a row in one cell of the grid.
struct Cell {
    uint8_t* ring;       // where the rows of the cell are, and go
    int64_t open;        // rows that are there from steps before: those of the new tokens go behind them
    int64_t first;       // index in the step of its first new token
    int64_t count;       // new tokens
    int64_t fill;        // slot for the state at the end of the cell; -1: it is kept nowhere
    bool is_whole;       // whether the cell ends here: what follows goes on from the state behind it
};

// body(cell) for the cells that a row's tokens are in, in order. The first one goes on from the state in slot `reads`, each other one
// from that behind the one before it. Cells but the last share one ring, which each overwrites: of those nothing is read later.
template <class Body>
void for_each_cell(const Step& step, int64_t row, Body body) {
    const StateRow& state = step.states[row];
    int64_t first = step.offsets[row], left = step.counts[row], position = step.starts[row], fill = state.first_fill;
    const int64_t fills_end = fill + state.num_fills;
    uint8_t* ring = state.from;
    for (int64_t open = state.open; left > 0; open = 0, ring = state.to) {
        int64_t count = std::min(left, GRID - open), end = position + count;
        Cell cell{ring, open, first, count, -1, open + count == GRID};
        if (cell.is_whole && fill < fills_end && step.fills[fill].position == end) cell.fill = step.fills[fill++].slot;
        body(cell);
        first += count, left -= count, position = end;
    }
}

}  // namespace

extern "C" {
int64_t lockstep_layer_state_bytes() { return sizeof(LayerState); }
int64_t lockstep_state_row_bytes() { return sizeof(StateRow); }
int64_t lockstep_state_fill_bytes() { return sizeof(StateFill); }
}
