// The KV cache, attention.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "contract.hpp"
#include "products.hpp"
#include "turning.hpp"

namespace {

// Where the block of 16 keys that holds a slot begins, for one KV head (in words of 32 bits).
template <class T>
int64_t block_words(int64_t slot, int64_t head, int64_t heads, int64_t dim, int64_t block_size) {
    int64_t sub = block_size / LANES;
    int64_t block = slot / block_size, within = slot % block_size / LANES;
    return ((block * heads + head) * sub + within) * LANES * dim / T::PACK;
}

// One key or value of a head into lane `lane` of its block.
template <class T>
void store_key(uint32_t* block, const typename T::Element* key, int64_t dim, int64_t lane) {
    for (int64_t word = 0; word < dim / T::PACK; ++word)
        std::memcpy(block + word * LANES + lane, key + word * T::PACK, sizeof(uint32_t));
}

template <class T>
void store_value(uint32_t* block, const typename T::Element* value, int64_t dim, int64_t lane) {
    uint32_t* to = block + lane / T::PACK * dim;
    if constexpr (T::PACK == 1) {
        std::memcpy(to, value, size_t(dim) * sizeof(*value));
    } else {  // one half of each word; dim is a multiple of 16
        for (int64_t i = 0; i < dim; i += LANES) store_halves(to + i, value + i, lane % 2 != 0);
    }
}

// What QKV is given: in [tokens, (heads + 2 kv_heads) * dim], a heads, b kv_heads, c dim; extra: keys, out: values; the rest: Turning.
template <class T>
class Projected {
    using E = typename T::Element;
    const Step& step;
    int64_t heads, kv_heads, dim, pitch;
    E* rows;
    Turning<T> turning;
    uint32_t *all_keys, *all_values;

   public:
    Projected(const Operation& op, const Step& step)
        : step(step), heads(op.a), kv_heads(op.b), dim(op.c), pitch(pitch_of<T>((heads + 2 * kv_heads) * dim)),
          rows(static_cast<E*>(const_cast<void*>(op.in))), turning(op, step),
          all_keys(static_cast<uint32_t*>(const_cast<void*>(op.extra))), all_values(static_cast<uint32_t*>(op.out)) {}

    // Norms and rotates what a token has for a KV head, queries and key, and stores key and value.
    void keep(int64_t token, int64_t head) const {
        int64_t group = heads / kv_heads, position = step.positions[token];
        E* row = rows + token * pitch;
        for (int64_t query = head * group; query < (head + 1) * group; ++query) turning.turn(row + query * dim, query, position);
        E* key = row + (heads + head) * dim;
        const E* value = row + (heads + kv_heads + head) * dim;
        turning.turn(key, heads + head, position);
        int64_t slot = step.slots[token], lane = slot % LANES;
        int64_t place = block_words<T>(slot, head, kv_heads, dim, step.block_size);
        // Weights of keys not written yet are 0, but 0 times what an earlier owner left may not be. The
        // first key of a block comes first, except among the tokens of this step, which other threads store.
        if (lane == 0) {
            auto* values = reinterpret_cast<E*>(all_values + place);
            int64_t written = 1;
            while (written < LANES && token + written < step.tokens && step.slots[token + written] == slot + written) ++written;
            for (int64_t later = written; later < LANES; ++later)
                for (int64_t i = 0; i < dim; ++i) values[(later / T::PACK * dim + i) * T::PACK + later % T::PACK] = E(0);
        }
        store_key<T>(all_keys + place, key, dim, lane);
        store_value<T>(all_values + place, value, dim, lane);
    }

    // Asks for the lines that keep() stores to.
    void fetch_places(int64_t token) const {
        int64_t slot = step.slots[token];
        for (int64_t head = 0; head < kv_heads; ++head) {
            int64_t place = block_words<T>(slot, head, kv_heads, dim, step.block_size);
            for (int64_t word = 0; word < dim / T::PACK; ++word) __builtin_prefetch(all_keys + place + word * LANES, 1);
            const uint32_t* values = all_values + place + slot % LANES / T::PACK * dim;
            for (int64_t word = 0; word < dim; word += LANES) __builtin_prefetch(values + word, 1);
        }
    }
};

// Queries, keys and values of all tokens. Where no row reads what another one of this step stores, ATTEND does it: what a thread
// has stored it reads from its own cache.
template <class T>
void qkv(const Operation& op, const Step& step, Work& work) {
    if (step.apart) return;
    Projected<T> projected(op, step);
    // Where a token goes is known long before it does, and in decode nothing has touched those lines since the last
    // step: asked for one token ahead, they come while this one is turned.
    auto is_near = [&](int64_t token) {  // in the block of the one before it
        return step.slots[token] % LANES != 0 && step.slots[token - 1] == step.slots[token] - 1;
    };
    work.share_out(step.tokens, step.tokens, [&](Share now, Share) {
        projected.fetch_places(now.begin);
        for (int64_t token = now.begin; token < now.end; ++token) {
            if (token + 1 < now.end && !is_near(token + 1)) projected.fetch_places(token + 1);
            for (int64_t head = 0; head < op.b; ++head) projected.keep(token, head);
        }
    });
}

// What a thread needs for the scores and weights of a tile; grows.
class Room {
    std::vector<uint32_t> words;

   public:
    uint32_t* of(int64_t number) {
        if (int64_t(words.size()) < number + LANES) words.resize(size_t(number + LANES));
        auto address = reinterpret_cast<uintptr_t>(words.data());
        return reinterpret_cast<uint32_t*>((address + 63) / 64 * 64);
    }
};

// Asks for what is needed soon: the blocks of a row lie anywhere, so nobody else can foresee them.
inline void fetch(const uint32_t* from, int64_t words) {
    for (int64_t i = 0; i < words; i += LANES) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T0);
}

// What rows of inputs are in attention: floats, if vectors cannot multiply pairs.
template <class T>
using Input = std::conditional_t<WIDENS_INPUTS, Float, T>;

// Adds products of rows with panels: line `step` of a panel lies `next` words behind the one before it.
template <class T, int ROWS, int PANELS>
inline void multiply_beside(Floats (&sum)[ROWS][PANELS], const uint32_t* const (&panels)[PANELS], int64_t next,
                            const char* from, const int64_t (&behind)[ROWS], int64_t steps, Wanted& wanted) {
    using Operand = decltype(T::template of<0>(Words{}));
    Floats sums[ROWS * PANELS];  // of this function alone, so that they stay in registers
#pragma GCC unroll 32
    for (int i = 0; i < ROWS * PANELS; ++i) sums[i] = sum[i / PANELS][i % PANELS];
    for (int64_t step = 0; step < steps; ++step, from += 4 * T::PARTS) {
        wanted.ask();
#pragma GCC unroll 2
        for (int part = 0; part < T::PARTS; ++part) {
            auto line = [&](int panel) {
                Words words = load_words(panels[panel] + step * next);
                return part == 0 ? T::template of<0>(words) : T::template of<T::PARTS - 1>(words);
            };
            auto input = [&](int row) {
                return Input<T>::template of<0>(filled_words(*reinterpret_cast<const int*>(from + behind[row] + 4 * part)));
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
    }
#pragma GCC unroll 32
    for (int i = 0; i < ROWS * PANELS; ++i) sum[i / PANELS][i % PANELS] = sums[i];
}

// One KV head against a few queries of one row: up to MOST query vectors at a time.
template <class T, int MOST>
struct Attended {
    using E = typename T::Element;
    int64_t dim, begin, blocks, length;  // keys begin ... begin + length of the row are looked at
    int count = 0;
    const E* queries[MOST];
    E* outputs[MOST];
    int64_t at[MOST];                    // positions of the queries
    float inverse[MOST];
    float* scores;                       // [MOST, length]
    typename Input<T>::Element* weights; // [MOST, length]
    const int64_t* places;               // [blocks] where the words of each block begin
    const uint32_t *keys, *values;       // of the whole cache
    int64_t cold;                        // blocks from this one on have neither been seen nor asked for
    Wanted* wanted;                      // by the next task

    // Before the scores of some blocks: the keys of as many behind them, and the values of these.
    void fetch_around(int64_t block, int64_t beside) const {
        for (int64_t i = block; i < std::min(block + beside, blocks); ++i) {
            if (i >= cold) fetch(values + places[i], LANES * dim / T::PACK);
            if (i + beside >= cold && i + beside < blocks) fetch(keys + places[i + beside], LANES * dim / T::PACK);
        }
    }

    template <int ROWS>
    void score_rows(Room& query_room) {
        constexpr int BESIDE = std::min(4, panels_beside(ROWS, 8));
        int64_t behind[ROWS];
        auto* first = reinterpret_cast<const char*>(queries[0]);
        if constexpr (sizeof(typename Input<T>::Element) == sizeof(E)) {
            for (int i = 0; i < ROWS; ++i) behind[i] = reinterpret_cast<const char*>(queries[i]) - first;
        } else {
            auto* wide = reinterpret_cast<float*>(query_room.of(ROWS * dim));
            first = reinterpret_cast<const char*>(wide);
            for (int i = 0; i < ROWS; ++i) {
                behind[i] = i * dim * int64_t(sizeof(float));
                for (int64_t at = 0; at < dim; at += LANES) store(wide + i * dim + at, T::load(queries[i] + at, lanes_of(LANES)));
            }
        }
        for (int64_t block = 0; block < blocks; block += BESIDE) {
            const uint32_t* panels[BESIDE];
            for (int i = 0; i < BESIDE; ++i) panels[i] = keys + places[std::min(block + i, blocks - 1)];
            fetch_around(block, BESIDE);
            Floats sum[ROWS][BESIDE] = {};
            multiply_beside<T>(sum, panels, LANES, first, behind, dim / T::PACK, *wanted);
            for (int i = 0; i < ROWS; ++i)
                for (int j = 0; j < BESIDE && block + j < blocks; ++j)
                    store(scores + i * length + (block + j) * LANES, sum[i][j]);
        }
    }

    void softmax(float factor, int64_t window) {
        for (int i = 0; i < count; ++i) {
            wanted->ask();
            float* line = scores + i * length;
            auto* weight_line = weights + i * length;
            int64_t seen = at[i] + 1 - begin, hidden = window > 0 ? std::max<int64_t>(0, at[i] - window + 1 - begin) : 0;
            Floats most = filled(-INFINITY), scale = filled(factor);
            auto visible = [&](int64_t key) {
                Mask lanes = key >= seen ? Mask(0) : lanes_of(int(seen - key));
                return key < hidden ? Mask(lanes & ~lanes_of(int(hidden - key))) : lanes;
            };
            int64_t end = std::min(length, (seen + LANES - 1) / LANES * LANES), key = hidden / LANES * LANES;
            for (int64_t none = 0; none < key; none += LANES) Input<T>::store(weight_line + none, filled(0.f), 0xffff);
            for (int64_t none = end; none < length; none += LANES) Input<T>::store(weight_line + none, filled(0.f), 0xffff);
            for (int64_t k = key; k < end; k += LANES)
                most = maximum(most, load(line + k) * scale, visible(k));
            Floats peak = filled(greatest_of(most)), total = filled(0.f);
            for (int64_t k = key; k < end; k += LANES) {
                Floats weight = exp_ps(fmsub(load(line + k), scale, peak));
                weight = only(visible(k), weight);
                total = total + weight;
                Input<T>::store(weight_line + k, weight, Mask(0xffff));
            }
            inverse[i] = 1.f / sum_of(total);
        }
    }

    // Columns from `column` on of the values' sum, as many as PANELS have.
    template <int ROWS, int PANELS>
    void weigh_columns(int64_t column) {
        int64_t behind[ROWS];
        for (int i = 0; i < ROWS; ++i) behind[i] = i * length * int64_t(sizeof(*weights));
        Floats sum[ROWS][PANELS] = {};
        for (int64_t block = 0; block < blocks; ++block) {
            const uint32_t* panels[PANELS];
            for (int j = 0; j < PANELS; ++j) panels[j] = values + places[block] + std::min(column + j * LANES, dim - LANES);
            auto* from = reinterpret_cast<const char*>(weights + block * LANES);
            multiply_beside<T>(sum, panels, dim, from, behind, LANES / T::PACK, *wanted);
        }
        for (int i = 0; i < ROWS; ++i)
            for (int j = 0; j < PANELS && column + j * LANES < dim; ++j)
                T::store(outputs[i] + column + j * LANES, sum[i][j] * filled(inverse[i]), lanes_of(LANES));
    }

    template <int ROWS>
    void weigh_rows() {
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
        return std::array{&Attended::score_rows<BEFORE + 1>...};
    }
    template <int... BEFORE>
    static constexpr auto weighers(std::integer_sequence<int, BEFORE...>) {
        return std::array{&Attended::weigh_rows<BEFORE + 1>...};
    }
    void score(Room& query_room) {
        static constexpr auto of = scorers(std::make_integer_sequence<int, MOST>());
        (this->*of[size_t(count) - 1])(query_room);
    }
    void weigh() {
        static constexpr auto of = weighers(std::make_integer_sequence<int, MOST>());
        (this->*of[size_t(count) - 1])();
    }
    // How often wanted is asked at least, for so many rows.
    static int64_t asks(int64_t rows, int64_t blocks, int64_t dim) {
        int64_t beside = panels_beside(int(std::min<int64_t>(rows, MOST)), dim / LANES);
        return ((blocks + 3) / 4 * dim + blocks * (dim / LANES / beside) * LANES) / T::PACK;
    }
};

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

// The same with tiles: a block of keys is a tile as it lies, and so are 16 columns of a block of values.
struct AttendedInTiles : Attended<BFloat16, TILE> {
    static constexpr TileShapes SHAPES{{64, 64, 64, 64, 64, 32, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 8}};

    static bool fits(int64_t dim) { return use_tiles<BFloat16>() && dim % (2 * TILE) == 0; }
    static int64_t asks(int64_t, int64_t blocks, int64_t dim) { return blocks / 2 + blocks * dim / (2 * LANES); }

    void score(Room& query_room) {
        auto* query_rows = reinterpret_cast<E*>(query_room.of(TILE * dim / 2));
        for (int i = 0; i < count; ++i) std::memcpy(query_rows + i * dim, queries[i], size_t(dim) * sizeof(E));
        for (int64_t block = 0; block < blocks; block += 2) {
            const uint32_t *one = keys + places[block], *two = keys + places[std::min(block + 1, blocks - 1)];
            fetch_around(block, 2);
            wanted->ask();
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t step = 0; step < dim / 2; step += TILE) {
                _tile_loadd(4, query_rows + 2 * step, dim * 2);
                _tile_loadd(6, one + step * LANES, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(6, two + step * LANES, 64);
                _tile_dpbf16ps(1, 4, 6);
            }
            _tile_stored(0, scores + block * LANES, length * 4);
            if (block + 1 < blocks) _tile_stored(1, scores + (block + 1) * LANES, length * 4);
        }
    }

    void weigh() {
        alignas(64) float sums[TILE * 2 * LANES];
        for (int64_t column = 0; column < dim; column += 2 * LANES) {
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t block = 0; block < blocks; ++block) {
                const uint32_t* panel = values + places[block] + column;
                wanted->ask();
                _tile_loadd(5, weights + block * LANES, length * 2);
                _tile_loadd(7, panel, dim * 4);
                _tile_dpbf16ps(0, 5, 7);
                _tile_loadd(7, panel + LANES, dim * 4);
                _tile_dpbf16ps(1, 5, 7);
            }
            _tile_stored(0, sums, 8 * LANES);
            _tile_stored(1, sums + LANES, 8 * LANES);
            for (int i = 0; i < count; ++i)
                for (int half = 0; half < 2; ++half)
                    BFloat16::store(outputs[i] + column + half * LANES,
                                    load(sums + (2 * i + half) * LANES) * filled(inverse[i]),
                                    Mask(0xffff));
        }
    }
};

#endif

// Some queries of a row, which follow one another, and a KV head.
struct AttentionTask {
    int64_t row = 0, first = 0, queries = 0, kv_head = 0;  // no queries: there is no such task
    int64_t place = 0;                                      // row of the first one's result
    int64_t begin = 0;                                      // the first key that they look at
    std::vector<int64_t> places;                            // where the words of each block of keys from there on begin
    int64_t asked = 0;                                      // blocks that were asked for before the task begins

    int64_t blocks() const { return int64_t(places.size()); }
    bool same_keys(const AttentionTask& other) const { return row == other.row && kv_head == other.kv_head; }
};

inline int64_t num_tasks_of(const Operation& op, const Step& step) { return op.flags & SELECTED ? step.num_chosen_tasks : step.num_tasks; }

// The task of this number of those of an operation.
template <class T>
void look_up(const Operation& op, const Step& step, int64_t number, AttentionTask& task) {
    int64_t kv_heads = op.b, window = op.d;
    task.queries = task.asked = 0;
    if (number >= num_tasks_of(op, step) * kv_heads) return;
    const int32_t* described = (op.flags & SELECTED ? step.chosen_tasks : step.tasks) + 4 * (number / kv_heads);
    task.row = described[0], task.first = described[1], task.queries = described[2], task.place = described[3];
    task.kv_head = number % kv_heads;
    int64_t position = step.starts[task.row] + task.first, last = position + task.queries - 1;
    task.begin = window > 0 ? std::max<int64_t>(0, position - window + 1) / LANES * LANES : 0;
    const int32_t* table = step.tables + task.row * step.table_width;
    task.places.clear();
    for (int64_t key = task.begin; key <= last; key += LANES) {
        int64_t slot = int64_t(table[key / step.block_size]) * step.block_size + key % step.block_size;
        task.places.push_back(block_words<T>(slot, task.kv_head, kv_heads, op.c, step.block_size));
    }
}

// While a task is computed, memory is asked for what the next one reads and no other thread writes in this step.
template <class T, class Tile, int MOST>
void attend_to(const Operation& op, const Step& step, const AttentionTask& task, AttentionTask& next, Wanted& wanted) {
    using E = typename T::Element;
    thread_local Room score_room, query_room;
    int64_t heads = op.a, kv_heads = op.b, dim = op.c, window = op.d, group = heads / kv_heads;
    int64_t pitch = pitch_of<T>((heads + 2 * kv_heads) * dim), position = step.starts[task.row] + task.first;
    Tile tile;
    tile.dim = dim, tile.begin = task.begin, tile.blocks = task.blocks(), tile.length = tile.blocks * LANES;
    tile.places = task.places.data(), tile.keys = static_cast<const uint32_t*>(op.extra), tile.values = op.weights;
    tile.scores = reinterpret_cast<float*>(score_room.of(2 * MOST * tile.length));
    tile.weights = reinterpret_cast<typename Input<T>::Element*>(tile.scores + MOST * tile.length);
    tile.wanted = &wanted;
    wanted.clear();
    int64_t cached = next.queries == 0 || next.same_keys(task) ? 0
                     : step.apart                              ? next.blocks()
                                                               : (step.starts[next.row] - next.begin + LANES - 1) / LANES;
    for (next.asked = 0; next.asked < std::min(cached, next.blocks()) && !wanted.full(); ++next.asked) {
        wanted.add(tile.keys + next.places[next.asked], LANES * dim / T::PACK * 4);
        wanted.add(tile.values + next.places[next.asked], LANES * dim / T::PACK * 4);
    }
    int64_t all = task.queries * group, passes = (all + MOST - 1) / MOST;
    wanted.spread(passes * Tile::asks(all, tile.blocks, dim) + all);
    for (int64_t base = 0; base < all; base += MOST) {
        tile.count = int(std::min<int64_t>(MOST, all - base));
        for (int i = 0; i < tile.count; ++i) {
            int64_t query = (base + i) / group, head = task.kv_head * group + (base + i) % group;
            int64_t token = step.offsets[task.row] + task.first + query;
            tile.queries[i] = static_cast<const E*>(op.in) + token * pitch + head * dim;
            tile.outputs[i] = static_cast<E*>(op.out) + (task.place + query) * pitch_of<T>(heads * dim) + head * dim;
            tile.at[i] = position + query;
        }
        tile.cold = base == 0 ? task.asked : tile.blocks;
        tile.score(query_room);
        tile.softmax(float(op.number), window);
        tile.weigh();
    }
}

// All tasks, shared out among the threads. A thread takes some that follow one another, KV heads of the same queries: what
// these have in a block lies side by side.
template <class T, class Tile, int MOST>
void attend_to_all(const Operation& op, const Operation& before, const Step& step, Work& work) {
    thread_local AttentionTask now, next;
    thread_local Wanted wanted;
    Projected<T> projected(before, step);
    int64_t together = std::clamp<int64_t>(num_tasks_of(op, step) * op.b / (SHARES / 2 * work.size), 1, op.b), number = 0, left = 0;
    auto look_up_next = [&](AttentionTask& task) {
        if (left == 0) number = work.take(together), left = together;
        --left;
        look_up<T>(op, step, number++, task);
    };
    for (look_up_next(now); now.queries > 0; std::swap(now, next)) {
        look_up_next(next);
        if (step.apart) projected.keep(step.offsets[now.row], now.kv_head);
        attend_to<T, Tile, MOST>(op, step, now, next, wanted);
    }
}

// in: what qkv leaves, which is `before`; out [tokens, or those selected, heads * dim]; number: scale, d: window or 0; weights: values, extra: keys
template <class T>
void attend(const Operation& op, const Operation& before, const Step& step, Work& work) {
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
    if constexpr (T::PACK == 2) {
        if (AttendedInTiles::fits(op.c)) {
            TileScope shapes(AttendedInTiles::SHAPES);
            return attend_to_all<T, AttendedInTiles, TILE>(op, before, step, work);
        }
    }
#endif
    attend_to_all<T, Attended<T, MAX_ROWS>, MAX_ROWS>(op, before, step, work);
}

}  // namespace
