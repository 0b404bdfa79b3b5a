// Attention: tasks shared out among the threads, and the products of a task with vectors.

#pragma once

#include <array>
#include <utility>

#include "attention_rows.hpp"
#include "attention_tiles.hpp"
#include "../core/contract.hpp"
#include "../products/wanted.hpp"

namespace {

// A few rows are through with their keys as fast as these come from memory: what is wanted next is asked for all the time. Many rows
// take long for a block.
constexpr bool asks_in_steps(int rows) { return rows <= std::min(6, MAX_ROWS - 1); }
constexpr int64_t STEPS_PER_ASK = 4;  // each costs as much as a few products

// Adds products of rows, which lie `pitch` bytes apart, with PANELS panels in so many segments of `steps` lines: at(segment, panel) is
// where each begins. Lines lie `next` words apart.
template <class T, int ROWS, int PANELS, class At>
inline void add_products(Floats (&result)[ROWS * PANELS], int64_t segments, int64_t steps, At at, int64_t next, const char* in,
                         int64_t pitch, Wanted& wanted) {
    using Operand = decltype(T::template of<0>(Words{}));
    constexpr int GROUP = 3;  // rows that share a pointer: for one each there are no registers left
    const char* from[(ROWS + GROUP - 1) / GROUP];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row += GROUP) from[row / GROUP] = in + row * pitch;
    Floats sums[ROWS * PANELS];  // of this function alone, so that they stay in registers
#pragma GCC unroll 32
    for (int i = 0; i < ROWS * PANELS; ++i) sums[i] = result[i];
    for (int64_t segment = 0; segment < segments; ++segment) {
        const uint32_t* panels[PANELS];
#pragma GCC unroll 8
        for (int panel = 0; panel < PANELS; ++panel) panels[panel] = at(segment, panel);
        if (!asks_in_steps(ROWS)) wanted.ask();
        for (int64_t step = 0; step < steps; ++step) {
            if (asks_in_steps(ROWS) && step % STEPS_PER_ASK == 0) wanted.ask();
#pragma GCC unroll 2
            for (int part = 0; part < T::PARTS; ++part) {
                auto line = [&](int panel) {
                    Words words = load_words(panels[panel]);
                    return part == 0 ? T::template of<0>(words) : T::template of<T::PARTS - 1>(words);
                };
                auto input = [&](int row) {
                    auto* word = from[row / GROUP] + row % GROUP * pitch + 4 * part;
                    return Input<T>::template of<0>(filled_words(*reinterpret_cast<const int*>(word)));
                };
                auto add = [&](int row, int panel, Operand words, Operand with) {
                    sums[row * PANELS + panel] = T::madd(sums[row * PANELS + panel], words, with);
                };
                // Either the inputs or the lines stay in registers.
                if constexpr (ROWS <= PANELS) {
                    Operand inputs[ROWS];
#pragma GCC unroll 16
                    for (int row = 0; row < ROWS; ++row) inputs[row] = input(row);
#pragma GCC unroll 16
                    for (int panel = 0; panel < PANELS; ++panel) {
                        Operand words = line(panel);
#pragma GCC unroll 16
                        for (int row = 0; row < ROWS; ++row) add(row, panel, words, inputs[row]);
                    }
                } else {
                    Operand lines[PANELS];
#pragma GCC unroll 16
                    for (int panel = 0; panel < PANELS; ++panel) lines[panel] = line(panel);
#pragma GCC unroll 16
                    for (int row = 0; row < ROWS; ++row) {
                        Operand with = input(row);
#pragma GCC unroll 16
                        for (int panel = 0; panel < PANELS; ++panel) add(row, panel, lines[panel], with);
                    }
                }
            }
#pragma GCC unroll 8
            for (int panel = 0; panel < PANELS; ++panel) panels[panel] += next;
#pragma GCC unroll 16
            for (auto& pointer : from) pointer += 4 * T::PARTS;
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < ROWS * PANELS; ++i) result[i] = sums[i];
}

// The products of a pass with vectors.
template <class T>
class VectorPass : public Pass<T, MAX_ROWS, 512> {
    using Base = Pass<T, MAX_ROWS, 512>;
    using Base::blocks, Base::count, Base::factors, Base::first, Base::kept, Base::scores, Base::slab, Base::weights, Base::SCORE_PITCH,
        Base::WEIGHT_PITCH;
    Wanted& wanted;

    // Scores of BESIDE blocks from one on, or of those that there are.
    template <int ROWS, int BESIDE>
    void score_blocks(int64_t block) {
        const int64_t all = blocks.size(), pitch = slab.query_pitch * int64_t(sizeof(InputElement<T>));
        auto* from = reinterpret_cast<const char*>(slab.queries + first * slab.query_pitch);
        auto at = [&](int64_t, int panel) { return kept.keys_of(blocks.begin + std::min(block + panel, all - 1)); };
        Floats sums[ROWS * BESIDE] = {};
        add_products<T, ROWS, BESIDE>(sums, 1, slab.shape.dim / T::PACK, at, LANES, from, pitch, wanted);
        for (int row = 0; row < ROWS; ++row)
            for (int i = 0; i < BESIDE && block + i < all; ++i)
                store(scores + row * SCORE_PITCH + (block + i) * LANES, sums[row * BESIDE + i]);
    }

    template <int ROWS>
    void score_rows() {
        constexpr int BESIDE = std::min(4, panels_beside(ROWS, 8));
        constexpr int LAST = BESIDE == 2 ? 1 : BESIDE;  // two sums of few rows would wait for themselves
        const int64_t all = blocks.size();
        int64_t block = 0;
        for (; block + BESIDE <= all; block += BESIDE) score_blocks<ROWS, BESIDE>(block);
        if (block < all) score_blocks<ROWS, LAST>(block);
    }

    // Columns from `column` on of the values' sums, as many as PANELS have.
    template <int ROWS, int PANELS>
    void weigh_columns(int64_t column) {
        const int64_t dim = slab.shape.value_dim;
        auto at = [&](int64_t block, int panel) {
            return kept.values_of(blocks.begin + block) + column + std::min<int64_t>(panel * LANES, dim - LANES - column);
        };
        Floats sums[ROWS * PANELS];
        float* lines = slab.sums + first * dim + column;
        auto place = [&](int row, int panel) { return lines + row * dim + panel * LANES; };
        for (int row = 0; row < ROWS; ++row)
            for (int panel = 0; panel < PANELS; ++panel) {
                bool is_there = !this->is_first && column + panel * LANES < dim;
                sums[row * PANELS + panel] = is_there ? load(place(row, panel)) * filled(factors[row]) : filled(0.f);
            }
        add_products<T, ROWS, PANELS>(sums, blocks.size(), LANES / T::PACK, at, dim, reinterpret_cast<const char*>(weights),
                                      WEIGHT_PITCH * int64_t(sizeof(*weights)), wanted);
        for (int row = 0; row < ROWS; ++row)
            for (int panel = 0; panel < PANELS && column + panel * LANES < dim; ++panel)
                store(place(row, panel), sums[row * PANELS + panel]);
    }

    template <int ROWS>
    void weigh_rows() {
        const int64_t dim = slab.shape.value_dim;
        for (int64_t column = 0; column < dim;) {
            int beside = panels_beside(ROWS, (dim - column) / LANES);
            if constexpr (panels_beside(ROWS, 8) == 8)
                if (beside == 8) weigh_columns<ROWS, 8>(column);
            if constexpr (panels_beside(ROWS, 4) == 4)
                if (beside == 4) weigh_columns<ROWS, 4>(column);
            if constexpr (panels_beside(ROWS, 2) == 2)
                if (beside == 2) weigh_columns<ROWS, 2>(column);
            if constexpr (panels_beside(ROWS, 1) == 1)
                if (beside == 1) weigh_columns<ROWS, 1>(column);
            column += beside * LANES;
        }
    }

    template <int... BEFORE>
    static constexpr auto scorers(std::integer_sequence<int, BEFORE...>) {
        return std::array{&VectorPass::score_rows<BEFORE + 1>...};
    }
    template <int... BEFORE>
    static constexpr auto weighers(std::integer_sequence<int, BEFORE...>) {
        return std::array{&VectorPass::weigh_rows<BEFORE + 1>...};
    }

   public:
    VectorPass(Slab<T>& slab, const Operation& op, Wanted& wanted)
        : Base(slab, op), wanted(wanted) {}

    static int64_t passes_of(int64_t rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
    // Evenly: a row alone takes half as long as eight.
    static Share rows_of_pass(int64_t rows, int64_t number) {
        int64_t passes = passes_of(rows);
        return {number * rows / passes, (number + 1) * rows / passes};
    }
    // How often wanted is asked at least, for so many rows and blocks.
    static int64_t asks(const AttentionShape& shape, int64_t rows, int64_t blocks) {
        int64_t passes = passes_of(rows), columns = shape.value_dim / LANES;
        int some = int(rows_of_pass(rows, 0).size());
        int64_t segments = (blocks + 3) / 4, others = blocks * (columns / panels_beside(some, columns));
        if (!asks_in_steps(some)) return passes * (segments + others) + rows;
        return passes * (segments * shape.dim + others * LANES) / (STEPS_PER_ASK * T::PACK) + rows;
    }

    void begin_tile(const AttentionTask& task, Blocks tile) {
        kept.begin(task, tile, [&] { wanted.ask(); });
    }

    void run(Share rows, Blocks tile) {
        static constexpr auto score = scorers(std::make_integer_sequence<int, MAX_ROWS>());
        static constexpr auto weigh = weighers(std::make_integer_sequence<int, MAX_ROWS>());
        if (!this->take(rows, tile)) return;
        (this->*score[size_t(count) - 1])();
        this->soften([&] { wanted.ask(); });
        (this->*weigh[size_t(count) - 1])();
    }
};

// Memory that is read behind a tile of keys.
template <class T>
class ReadAhead {
    const Operation& op;
    Wanted& wanted;

   public:
    ReadAhead(const Operation& op, Wanted& wanted) : op(op), wanted(wanted) {}

    void want(const AttentionTask& task, Blocks blocks) {
        auto some = [&](const void* all, int64_t bytes) {
            for (int64_t block = blocks.begin; block < blocks.end && !wanted.full(); ++block)
                wanted.add(static_cast<const char*>(all) + task.numbers[size_t(block - task.begin)] * bytes, bytes);
        };
        if (op.codes != NO_CODES) some(op.scales, BLOCK_SCALES * int64_t(sizeof(uint16_t)));
        some(op.extra, key_block_bytes<T>(op));
        some(op.weights, block_bytes<T>(op, op.n));
    }
};

// The tiles of keys of a task, in so many keys each.
template <int64_t KEYS>
struct KeyTiles {
    const AttentionTask& task;

    int64_t first() const { return task.begin * LANES / KEYS; }
    int64_t last() const { return (task.end() * LANES - 1) / KEYS; }
    Blocks blocks(int64_t tile) const {
        return Blocks{tile * (KEYS / LANES), (tile + 1) * (KEYS / LANES)}.within({task.begin, task.end()});
    }
};

// The rows of a task against all tiles of keys that they see. While a tile is computed, memory is asked for what is read next.
template <class T, class AnyPass>
void attend_to(const Operation& op, const Step& step, const AttentionTask& task, const AttentionTask& next, Wanted& wanted) {
    AttentionShape shape(op);
    Slab<T> slab(shape);
    AnyPass pass(slab, op, wanted);
    ReadAhead<T> ahead(op, wanted);
    KeyTiles<AnyPass::KEYS> tiles{task}, next_tiles{next};
    const int64_t rows = task.queries * shape.group;
    for (int64_t base = 0; base < rows; base += SLAB) {
        slab.begin(op, step, task, base);
        const int64_t passes = AnyPass::passes_of(slab.count);
        for (int64_t tile = tiles.first(); tile <= tiles.last(); ++tile) {
            Blocks blocks = tiles.blocks(tile);
            wanted.clear();
            if (tile < tiles.last()) ahead.want(task, tiles.blocks(tile + 1));
            else if (base + SLAB < rows) ahead.want(task, tiles.blocks(tiles.first()));
            else if (next.queries > 0 && !next.same_keys(task)) ahead.want(next, next_tiles.blocks(next_tiles.first()));
            wanted.spread(AnyPass::asks(shape, slab.count, blocks.size()));
            pass.begin_tile(task, blocks);
            for (int64_t number = 0; number < passes; ++number) pass.run(AnyPass::rows_of_pass(slab.count, number), blocks);
        }
        slab.finish(op, task, base);
    }
}

// All tasks, shared out among the threads. Where each is a token, a thread takes some that follow one another, KV heads of the same
// queries: what these have in a block lies side by side.
template <class T, class AnyPass>
void attend_to_all(const Operation& op, const Operation& before, const Step& step, Work& work) {
    thread_local AttentionTask now, next;
    thread_local Wanted wanted;
    Projected<T> projected(before, step);
    const int64_t tasks = num_tasks_of(op, step), tokens = rows_of(op, step);
    int64_t together = tasks < tokens ? 1 : std::clamp<int64_t>(tasks * op.b / (SHARES / 2 * work.size), 1, op.b), number = 0, left = 0;
    auto look_up_next = [&](AttentionTask& task) {
        if (left == 0) number = work.take(together), left = together;
        --left;
        look_up(op, step, number++, task);
    };
    for (look_up_next(now); now.queries > 0; std::swap(now, next)) {
        look_up_next(next);
        if (is_apart(before, step)) projected.keep(step.offsets[now.row], now.kv_head);
        attend_to<T, AnyPass>(op, step, now, next, wanted);
    }
}

// Behind its QKV, which is `before`; see AttentionShape.
template <class T>
void attend(const Operation& op, const Operation& before, const Step& step, Work& work) {
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
    if constexpr (T::PACK == 2) {
        if (TilePass::fits(AttentionShape(op))) return attend_to_all<T, TilePass>(op, before, step, work);
    }
#endif
    attend_to_all<T, VectorPass<T>>(op, before, step, work);
}

}  // namespace
