// Rows of queries against tiles of keys: what goes before and behind the products of attention.
//
// A row is the query of one head at one position. Its keys are looked at in tiles, which begin at multiples of their size, one after
// the other: scores, their weights relative to the greatest score so far, and the values' sum with these weights, which is
// scaled down whenever a greater score comes. So what is added up in which order depends on the row's position alone: neither on the
// rows that share a tile with it nor on the piece of a prompt in which it came. Keys that a row does not see have the weight 0.

#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../cache/kv_cache.hpp"
#include "../core/numbers.hpp"

namespace {

constexpr int64_t SLAB = 192;              // rows whose sums are kept while all tiles go by: whole passes of 12, and of 32
constexpr float NO_PEAK = -1e30f;          // below all scores; a finite number, so that its distance from itself is 0
constexpr float LOG2_E = 1.44269504f;

// What rows of inputs are in attention: floats, if vectors cannot multiply pairs.
template <class T>
using Input = std::conditional_t<WIDENS_INPUTS, Float, T>;
template <class T>
using InputElement = typename Input<T>::Element;

// Room that a thread keeps; grows.
class Room {
    std::vector<uint32_t> words;

   public:
    template <class Number>
    Number* of(int64_t number) {
        int64_t wanted = (number * int64_t(sizeof(Number)) + 3) / 4 + LANES;
        if (int64_t(words.size()) < wanted) words.resize(size_t(wanted));
        auto address = reinterpret_cast<uintptr_t>(words.data());
        return reinterpret_cast<Number*>((address + 63) / 64 * 64);
    }
};

// What ATTEND is given: in: what qkv leaves; out [tokens, or those selected, heads * value_dim]; a heads, b kv_heads, c dim, n value_dim, d window
// or 0; number: scale; extra: keys, weights: values; codes, scales: how these are kept; more: a logit for each head that joins the
// softmax, or none; cap: scores are cap * tanh(score / cap), 0 for none; factors: what queries are multiplied by, by position, or none.
// groups: in so many tasks are the queries of a KV head; each counts as a KV head in b. SEES_ALL: queries see the keys behind them, too, to
// the end of their row of the step, or as many of them as the window has before them.
struct AttentionShape {
    int64_t heads, kv_heads, group, dim, value_dim, window;
    float scale, cap;
    const float *sinks, *factors;
    bool sees_all;

    explicit AttentionShape(const Operation& op)
        : heads(op.a), kv_heads(op.b), group(op.a / op.b), dim(op.c), value_dim(op.n), window(op.d), scale(float(op.number)),
          cap(float(op.cap)), sinks(static_cast<const float*>(op.more)), factors(op.factors),
          sees_all(op.flags & SEES_ALL) {}
};

// Some queries of a row of the step, which follow one another, and a KV head.
struct AttentionTask {
    int64_t row = 0, first = 0, queries = 0, kv_head = 0;  // no queries: there is no such task
    int64_t keys_of = 0;                                    // KV head in the cache
    int64_t place = 0;                                      // row of the first one's result
    int64_t position = 0;                                   // of the first one
    int64_t length = 0;                                     // of the row, with what was there before this step
    int64_t begin = 0;                                      // the first block of keys that they look at
    std::vector<int64_t> numbers;                           // of the blocks from there on, in the cache; one at least

    int64_t end() const { return begin + int64_t(numbers.size()); }
    bool same_keys(const AttentionTask& other) const { return row == other.row && keys_of == other.keys_of; }
};

inline int64_t num_tasks_of(const Operation& op, const Step& step) { return op.flags & SELECTED ? step.num_chosen_tasks : step.num_tasks; }

// Position of the last key that a query of a task sees: its own, that of its image, or any of the row that its window reaches.
inline int64_t last_seen(const Step& step, const AttentionTask& task, int64_t query, bool sees_all, int64_t window) {
    if (step.sees != nullptr && (window > 0 || !step.windows_see)) return step.sees[step.offsets[task.row] + task.first + query];
    const int64_t position = task.position + query;
    return !sees_all ? position : window > 0 ? std::min(task.length - 1, position + window - 1) : task.length - 1;
}

// The task of this number of those of an operation.
inline void look_up(const Operation& op, const Step& step, int64_t number, AttentionTask& task) {
    int64_t kv_heads = op.b, window = op.d;
    task.queries = 0;
    if (number >= num_tasks_of(op, step) * kv_heads) return;
    const int32_t* described = (op.flags & SELECTED ? step.chosen_tasks : step.tasks) + 4 * (number / kv_heads);
    task.row = described[0], task.first = described[1], task.queries = described[2], task.place = described[3];
    task.kv_head = number % kv_heads;
    const int64_t groups = std::max<int64_t>(1, op.groups);
    task.keys_of = task.kv_head / groups;
    task.position = step.starts[task.row] + task.first;
    task.length = step.starts[task.row] + step.counts[task.row];
    int64_t behind = last_seen(step, task, task.queries - 1, op.flags & SEES_ALL, window) / LANES + 1, sub = step.block_size / LANES;
    task.begin = window > 0 ? std::max<int64_t>(0, task.position - window + 1) / LANES : 0;
    const int32_t* table = step.tables + task.row * step.table_width;
    task.numbers.clear();
    for (int64_t block = task.begin, within = block % sub, entry = block / sub; block < behind; ++entry, within = 0) {
        int64_t first = (table[entry] * (kv_heads / groups) + task.keys_of) * sub;
        for (; within < sub && block < behind; ++within, ++block) task.numbers.push_back(first + within);
    }
}

// Some blocks of keys of a row of the step, counted from its first one.
struct Blocks {
    int64_t begin, end;
    int64_t size() const { return std::max<int64_t>(0, end - begin); }
    Blocks within(Blocks other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
};

// The keys and values of a tile, in blocks of numbers of the model's type: where they are kept, or widened from codes for all rows of a
// slab. Then scales belong to them, which scores and weights are multiplied by.
template <class T, int64_t KEYS>
class KeysAndValues {
    const Operation& op;
    const int64_t key_words, value_words;
    const uint32_t *keys, *values;
    const int64_t* numbers = nullptr;  // of the blocks, from the first one on
    Blocks blocks{};
    float *key_scales = nullptr, *value_scales = nullptr;  // from the tile's first key on
    int64_t first_key = 0;

    static const int64_t* own_numbers() {
        static const auto all = [] {
            std::array<int64_t, KEYS / LANES> each{};
            for (size_t i = 0; i < each.size(); ++i) each[i] = int64_t(i);
            return each;
        }();
        return all.data();
    }

    // Of a block's keys, what is apart from codes: divided by the scales of these, since all scores are multiplied by them.
    void widen_apart(int64_t number, const float* scales, uint32_t* to) const {
        if (apart_of(op) == 0) return;
        alignas(64) float inverse[T::PACK * LANES];  // in the order of a block's numbers
        for (int64_t lane = 0; lane < LANES; ++lane)
            for (int64_t i = 0; i < T::PACK; ++i) inverse[lane * T::PACK + i] = scales[lane] == 0.f ? 0.f : 1.f / scales[lane];
        auto* from = reinterpret_cast<const uint16_t*>(static_cast<const char*>(op.extra) + number * key_block_bytes<T>(op));
        auto* out = reinterpret_cast<typename T::Element*>(to);
        auto divided = [&](int64_t i) { return BFloat16::load(from + i, Mask(0xffff)) * load(inverse + i % (T::PACK * LANES)); };
        for (int64_t i = 0; i < LANES * apart_of(op); i += 2 * LANES) T::store(out + i, divided(i), divided(i + LANES));
    }

    // ahead(): asks for memory.
    template <class Ahead>
    void widen(const AttentionTask& task, Ahead ahead) {
        thread_local Room key_room, value_room, scale_room;
        auto* widened_keys = key_room.of<uint32_t>(KEYS / LANES * key_words);
        auto* widened_values = value_room.of<uint32_t>(KEYS / LANES * value_words);
        key_scales = scale_room.of<float>(2 * KEYS), value_scales = key_scales + KEYS;
        std::fill(key_scales, key_scales + 2 * KEYS, 0.f);
        first_key = blocks.begin * LANES / KEYS * KEYS;
        for (int64_t at = 0; at < blocks.size(); ++at) {
            ahead();
            const int64_t number = task.numbers[size_t(blocks.begin - task.begin + at)], first = (blocks.begin + at) * LANES - first_key;
            const uint16_t* scales = scales_of(op, number);
            store(key_scales + first, BFloat16::load(scales, Mask(0xffff)));
            store(value_scales + first, BFloat16::load(scales + LANES, Mask(0xffff)));
            auto one = [&](const void* all, int64_t bytes, int64_t skipped, int64_t dim, uint32_t* to) {
                decode<T>(op.codes, static_cast<const int8_t*>(all) + number * bytes + 2 * LANES * skipped, LANES * dim,
                          to + block_words<T>(skipped));
            };
            widen_apart(number, key_scales + first, widened_keys + at * key_words);
            one(op.extra, key_block_bytes<T>(op), apart_of(op), op.c - apart_of(op), widened_keys + at * key_words);
            one(op.weights, LANES * op.n, 0, op.n, widened_values + at * value_words);
        }
        keys = widened_keys, values = widened_values, numbers = own_numbers();
    }

   public:
    explicit KeysAndValues(const Operation& op)
        : op(op), key_words(block_words<T>(op.c)), value_words(block_words<T>(op.n)), keys(static_cast<const uint32_t*>(op.extra)),
          values(op.weights) {}

    template <class Ahead>
    void begin(const AttentionTask& task, Blocks some, Ahead ahead) {
        blocks = some;
        if (op.codes != NO_CODES) widen(task, ahead);
        else numbers = task.numbers.data() + (some.begin - task.begin);
    }
    const uint32_t* keys_of(int64_t block) const { return keys + numbers[block - blocks.begin] * key_words; }
    const uint32_t* values_of(int64_t block) const { return values + numbers[block - blocks.begin] * value_words; }
    Blocks all() const { return blocks; }
    bool has_scales() const { return key_scales != nullptr; }
    const float* scales_of_keys(int64_t key) const { return key_scales + (key - first_key); }
    const float* scales_of_values(int64_t key) const { return value_scales + (key - first_key); }
};

// The blocks that rows from one position to another see.
inline Blocks blocks_seen(int64_t first, int64_t last, int64_t window) {
    return {window > 0 ? std::max<int64_t>(0, first - window + 1) / LANES : 0, last / LANES + 1};
}

// Up to SLAB rows of a task, and what is known of each so far.
template <class T>
struct Slab {
    const AttentionShape& shape;
    int64_t count = 0;
    int64_t query_pitch;          // numbers
    InputElement<T>* queries;     // [count, filled up to whole tiles, query_pitch]
    float* sums;                  // [the same, value_dim] of values, with weights relative to the peak; from a pass's first tile on
    float* totals;                // [the same, 16] of weights
    float* peaks;                 // the greatest score so far, times log2(e)
    int64_t at[SLAB];             // positions
    int64_t until[SLAB];          // the last key that each sees
    float scales[SLAB];           // of scores

    explicit Slab(const AttentionShape& shape) : shape(shape), query_pitch(pitch_of<Input<T>>(shape.dim)) {
        thread_local Room query_room, sum_room, total_room;
        queries = query_room.of<InputElement<T>>(SLAB * query_pitch);
        sums = sum_room.of<float>(SLAB * shape.value_dim);
        totals = total_room.of<float>(SLAB * (LANES + 1));
        peaks = totals + SLAB * LANES;
    }

    // Takes rows from `base` on of a task.
    void begin(const Operation& op, const Step& step, const AttentionTask& task, int64_t base) {
        using E = typename T::Element;
        count = std::min(SLAB, task.queries * shape.group - base);
        int64_t pitch = pitch_of<T>(projected_width(op)), token = step.offsets[task.row] + task.first;
        for (int64_t row = 0, query = base / shape.group, within = base % shape.group; row < count; ++row) {
            int64_t head = task.kv_head * shape.group + within;
            const E* from = static_cast<const E*>(op.in) + (token + query) * pitch + head * shape.dim;
            InputElement<T>* to = queries + row * query_pitch;
            if constexpr (std::is_same_v<InputElement<T>, E>) std::memcpy(to, from, size_t(shape.dim) * sizeof(E));
            else
                for (int64_t i = 0; i < shape.dim; i += LANES) Input<T>::store(to + i, T::load(from + i, Mask(0xffff)), Mask(0xffff));
            at[row] = task.position + query;
            until[row] = last_seen(step, task, query, shape.sees_all, shape.window);
            scales[row] = shape.factors == nullptr ? shape.scale : shape.scale * shape.factors[at[row]];
            store(totals + row * LANES, only(Mask(shape.sinks != nullptr), filled(1.f)));
            peaks[row] = shape.sinks == nullptr ? NO_PEAK : shape.sinks[head] * LOG2_E;
            if (++within == shape.group) within = 0, ++query;
        }
    }

    // Leaves the results of all rows.
    void finish(const Operation& op, const AttentionTask& task, int64_t base) {
        using E = typename T::Element;
        int64_t pitch = pitch_of<T>(shape.heads * shape.value_dim);
        for (int64_t row = 0; row < count; ++row) {
            int64_t head = task.kv_head * shape.group + (base + row) % shape.group;
            E* to = static_cast<E*>(op.out) + (task.place + (base + row) / shape.group) * pitch + head * shape.value_dim;
            Floats inverse = filled(1.f / sum_of(load(totals + row * LANES)));
            for (int64_t i = 0; i < shape.value_dim; i += LANES)
                T::store(to + i, load(sums + row * shape.value_dim + i) * inverse, Mask(0xffff));
        }
    }
};

// Rows first ... first + count of a slab against the blocks of a tile that one of them sees.
template <class T, int MOST, int64_t KEYS_OF_TILE>
struct Pass {
    static constexpr int64_t KEYS = KEYS_OF_TILE;
    // Lines of scores do not all begin in the same set of the first cache. Their weights take their place, one line after the other.
    static constexpr int64_t SCORE_PITCH = KEYS + LANES;
    static constexpr int64_t WEIGHT_PITCH = SCORE_PITCH * int64_t(sizeof(float) / sizeof(InputElement<T>));
    static constexpr int FILLED = (MOST + LANES - 1) / LANES * LANES;
    Slab<T>& slab;
    KeysAndValues<T, KEYS> kept;
    float* scores;                  // [MOST, SCORE_PITCH]
    InputElement<T>* weights;       // [MOST, WEIGHT_PITCH], in the same place
    int64_t first = 0;
    int count = 0;
    Blocks blocks{};
    bool is_first = false;          // of the tiles that the rows see
    int64_t line_begin = 0;         // the key with which a line of scores begins
    alignas(64) float factors[FILLED];  // by which the greatest scores of this tile scale down what was added up before

    Pass(Slab<T>& slab, const Operation& op) : slab(slab), kept(op) {
        thread_local Room room;
        scores = room.of<float>(MOST * SCORE_PITCH);
        weights = reinterpret_cast<InputElement<T>*>(scores);
    }

    // Goes on with these rows, and the blocks of a tile that one of them sees; false if there are none.
    bool take(Share rows, Blocks tile) {
        first = rows.begin, count = int(rows.size());
        Blocks seen = blocks_seen(slab.at[first], slab.until[first + count - 1], slab.shape.window);
        blocks = tile.within(seen);
        is_first = blocks.begin == seen.begin;
        line_begin = blocks.begin * LANES;
        return blocks.size() > 0;
    }

    // Hides the keys that a row does not see: from `begin` to `end` of its line.
    static void hide(float* line, int64_t begin, int64_t end) {
        for (; begin < end; begin += LANES) store(line + begin, filled(-INFINITY), lanes_of(int(end - begin)));
    }

    // Scores times the scale, once they are capped; what is left to multiply them by.
    float capped(float* line, int64_t length, float scale) const {
        const float cap = slab.shape.cap;
        if (cap == 0.f) return scale * LOG2_E;
        for (int64_t key = 0; key < length; key += LANES) store(line + key, tanh_ps(load(line + key) * filled(scale / cap)));
        return cap * LOG2_E;
    }

    // Weights from scores; between two lines it calls between().
    template <class Between>
    void soften(Between between) {
        const int64_t window = slab.shape.window, length = blocks.size() * LANES;
        alignas(64) float peaks[FILLED], scales[FILLED];
        for (int row = 0; row < count; ++row) {
            float* line = scores + row * SCORE_PITCH;
            const int64_t at = slab.at[first + row] - line_begin, until = slab.until[first + row] - line_begin;
            if (kept.has_scales())
                for (int64_t key = 0; key < length; key += LANES)
                    store(line + key, load(line + key) * load(kept.scales_of_keys(line_begin + key)));
            scales[row] = capped(line, length, slab.scales[first + row]);
            if (window > 0) hide(line, 0, std::min(length, at - window + 1));
            hide(line, std::max<int64_t>(0, until + 1), length);
            Floats most = load(line);
            for (int64_t key = LANES; key < length; key += LANES) most = maximum(most, load(line + key));
            peaks[row] = greatest_of(most) * scales[row];
            between();
        }
        for (int row = 0; row < count; row += LANES) {
            Mask lanes = lanes_of(count - row);
            float* known = slab.peaks + first + row;
            Floats before = load(known, lanes), now = maximum(before, load(peaks + row, lanes));
            store(factors + row, exp2_ps<T>(before - now));
            store(known, now, lanes);
        }
        kept.has_scales() ? weigh<true>(scales, between) : weigh<false>(scales, between);
    }

    // The last part of soften(); SCALED: what is stored are weights times the scales of values.
    template <bool SCALED, class Between>
    void weigh(const float* scales, Between between) {
        const int64_t length = blocks.size() * LANES;
        const float* value_scales = SCALED ? kept.scales_of_values(line_begin) : nullptr;
        for (int row = 0; row < count; ++row) {
            const float* line = scores + row * SCORE_PITCH;
            auto* to = weights + row * WEIGHT_PITCH;
            Floats scale = filled(scales[row]), peak = filled(slab.peaks[first + row]);
            float* totals = slab.totals + (first + row) * LANES;
            Floats total = load(totals) * filled(factors[row]);
            auto weight = [&](int64_t key) { return exp2_ps<T>(fmsub(load(line + key), scale, peak)); };
            auto scaled = [&](Floats value, int64_t key) { return SCALED ? value * load(value_scales + key) : value; };
            int64_t key = 0;
            for (; key + LANES < length; key += 2 * LANES) {
                Floats one = weight(key), two = weight(key + LANES);
                total = total + one + two;
                Input<T>::store(to + key, scaled(one, key), scaled(two, key + LANES));
            }
            if (key < length) {
                Floats one = weight(key);
                total = total + one;
                Input<T>::store(to + key, scaled(one, key), Mask(0xffff));
            }
            store(totals, total);
            between();
        }
    }
};

}  // namespace
