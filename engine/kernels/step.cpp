// The forward pass of a decoder as a short list of operations, run by one team of threads.
//
// All matrices are laid out in panels of 16 output rows ("words" of 32 bits: one float, or two bfloat16 that
// are neighbours along K), so that one 512-bit load serves 16 outputs and a row's inputs are broadcast:
// decode reads each weight once at the speed of memory, and nothing is summed across lanes. The KV cache has
// the same layout, so attention is the same inner loop: keys are a panel of 16 "outputs" (scores), values a
// panel along their keys. Every output is summed in one fixed order, whatever else is in the batch.
//
// One file, no dependencies but OpenMP; engine/kernels/program.py writes the operations, docs/kernels.md explains.

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int LANES = 16;      // outputs of a panel; also keys of a block of the cache
constexpr int MAX_ROWS = 8;    // inputs that share one pass over a panel
constexpr int SPINS = 2000;    // before a waiting thread offers its core to others

// ---- numbers: float, and bfloat16 in pairs

struct Float {
    using Element = float;
    static constexpr int PACK = 1;
    static __m512 madd(__m512 sum, __m512i weights, uint32_t input) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(_mm512_set1_epi32(int(input))), sum);
    }
    static __m512 load(const float* from, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, from); }
    static void store(float* to, __m512 value, __mmask16 lanes) { _mm512_mask_storeu_ps(to, lanes, value); }
    static float one(float value) { return value; }
    static float rounded(float value) { return value; }
};

struct BFloat16 {
    using Element = uint16_t;
    static constexpr int PACK = 2;
    static __m512 madd(__m512 sum, __m512i weights, uint32_t input) {
        return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int(input)));
    }
    static __m512 load(const uint16_t* from, __mmask16 lanes) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static void store(uint16_t* to, __m512 value, __mmask16 lanes) {
        _mm256_mask_storeu_epi16(to, lanes, (__m256i)_mm512_cvtneps_pbh(value));
    }
    static float one(uint16_t value) {
        uint32_t bits = uint32_t(value) << 16;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    }
    static float rounded(float value) {  // to the nearest bfloat16, ties to even
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
        std::memcpy(&value, &bits, 4);
        return value;
    }
};

__mmask16 lanes_of(int count) { return count >= LANES ? __mmask16(0xffff) : __mmask16((1u << count) - 1); }

__m512 exp_ps(__m512 x) {  // 2^n * 2^f with |f| <= 1/2; the series of 2^f ends below the precision of a float
    __m512 t = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-104.f)), _mm512_set1_ps(1.44269504f));
    __m512 n = _mm512_roundscale_ps(t, 0);
    __m512 f = _mm512_sub_ps(t, n);
    __m512 p = _mm512_set1_ps(1.5403530e-4f);
    for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, n);
}

__m512 silu_ps(__m512 x) {
    __m512 denominator = _mm512_add_ps(_mm512_set1_ps(1.f), exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x)));
    return _mm512_div_ps(x, denominator);
}

// ---- the team

struct Team {
    int size;
    std::atomic<int> arrived{0};
    std::atomic<int> phase{0};
    std::atomic<int64_t> next{0};  // tasks handed out in this phase

    explicit Team(int threads) : size(threads) {}

    // All threads have passed all that is before it; the task counter starts again.
    void wait() {
        if (size == 1) {
            next.store(0, std::memory_order_relaxed);
            return;
        }
        int mine = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
            arrived.store(0, std::memory_order_relaxed);
            next.store(0, std::memory_order_relaxed);
            phase.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase.load(std::memory_order_acquire) == mine;)
            if (++spins < SPINS) _mm_pause(); else sched_yield();
    }
    int64_t take(int64_t count) { return next.fetch_add(count, std::memory_order_relaxed); }
};

struct Share { int64_t begin, end; };
Share share(int64_t total, int member, int size) { return {total * member / size, total * (member + 1) / size}; }

// ---- the inner loop: ROWS inputs against two panels

template <class T, int ROWS>
inline void multiply(__m512 (&sum)[MAX_ROWS][2], const uint32_t* a, const uint32_t* b, int64_t stride,
                     const uint32_t* const* inputs, int64_t offset, int64_t steps) {
    __m512 first[ROWS], second[ROWS];  // of this function alone, so that they stay in registers
    const uint32_t* from[ROWS];
    for (int row = 0; row < ROWS; ++row) {
        first[row] = sum[row][0], second[row] = sum[row][1];
        from[row] = inputs[row] + offset;
    }
    for (int64_t step = 0; step < steps; ++step) {
        __m512i wa = _mm512_loadu_si512(a + step * stride), wb = _mm512_loadu_si512(b + step * stride);
        for (int row = 0; row < ROWS; ++row) {
            uint32_t input = from[row][step];
            first[row] = T::madd(first[row], wa, input);
            second[row] = T::madd(second[row], wb, input);
        }
    }
    for (int row = 0; row < ROWS; ++row) sum[row][0] = first[row], sum[row][1] = second[row];
}

template <class T>
void multiply(int rows, __m512 (&sum)[MAX_ROWS][2], const uint32_t* a, const uint32_t* b, int64_t stride,
              const uint32_t* const* inputs, int64_t offset, int64_t steps) {
    switch (rows) {
        case 1: return multiply<T, 1>(sum, a, b, stride, inputs, offset, steps);
        case 2: return multiply<T, 2>(sum, a, b, stride, inputs, offset, steps);
        case 3: return multiply<T, 3>(sum, a, b, stride, inputs, offset, steps);
        case 4: return multiply<T, 4>(sum, a, b, stride, inputs, offset, steps);
        case 5: return multiply<T, 5>(sum, a, b, stride, inputs, offset, steps);
        case 6: return multiply<T, 6>(sum, a, b, stride, inputs, offset, steps);
        case 7: return multiply<T, 7>(sum, a, b, stride, inputs, offset, steps);
        default: return multiply<T, 8>(sum, a, b, stride, inputs, offset, steps);
    }
}

void clear(__m512 (&sum)[MAX_ROWS][2]) {
    for (auto& row : sum) row[0] = row[1] = _mm512_setzero_ps();
}

// ---- what the caller passes

enum Kind : int64_t { EMBED, NORM, LINEAR, QKV, ATTEND, GATED, ROUTE, SORT, EXPERTS_UP, EXPERTS_DOWN, COMBINE, SELECT };

struct Operation {
    int64_t kind;
    const void* in;
    void* out;
    const uint32_t* weights;
    const void* more;      // bias, norm weights, second weights ...
    const void* extra;
    int64_t n, k;
    int64_t flags;
    double number;
    int64_t a, b, c, d;
};
constexpr int64_t ADD = 1, AS_FLOAT = 2, SELECTED = 4;

struct Step {
    int64_t tokens, selected, num_tasks, table_width, block_size;
    const int64_t* ids;
    const int64_t* slots;        // [tokens] where each token's key and value go
    const int64_t* chosen;       // [selected] tokens whose logits are wanted
    const float* cosines;        // [tokens, half]
    const float* sines;
    const int64_t* starts;       // [rows] position of a row's first token
    const int64_t* counts;       // [rows]
    const int64_t* offsets;      // [rows] index of a row's first token in the step
    const int32_t* tables;       // [rows, table_width]
    const int32_t* tasks;        // [num_tasks, 3] row, first query, queries
    double* seconds;             // [kinds] time spent is added here, if given
};

// ---- operations; each is called by all threads of the team

template <class T>
void embed(const Operation& op, const Step& step, int member, int size) {
    using E = typename T::Element;
    auto [begin, end] = share(step.tokens, member, size);
    for (int64_t token = begin; token < end; ++token)
        std::memcpy(static_cast<E*>(op.out) + token * op.k, static_cast<const E*>(op.in) + step.ids[token] * op.k,
                    op.k * sizeof(E));
}

template <class T>
void select(const Operation& op, const Step& step, int member, int size) {
    using E = typename T::Element;
    auto [begin, end] = share(step.selected, member, size);
    for (int64_t row = begin; row < end; ++row)
        std::memcpy(static_cast<E*>(op.out) + row * op.k, static_cast<const E*>(op.in) + step.chosen[row] * op.k,
                    op.k * sizeof(E));
}

template <class T>
void norm_row(const typename T::Element* in, typename T::Element* out, const float* weights, int64_t width, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += LANES) {
        __m512 x = T::load(in + i, lanes_of(int(width - i)));
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    float scale = 1.f / std::sqrt(_mm512_reduce_add_ps(squares) / float(width) + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        __mmask16 lanes = lanes_of(int(width - i));
        __m512 x = _mm512_mul_ps(T::load(in + i, lanes), _mm512_set1_ps(scale));
        T::store(out + i, _mm512_mul_ps(x, _mm512_maskz_loadu_ps(lanes, weights + i)), lanes);
    }
}

template <class T>
void norm(const Operation& op, const Step& step, int member, int size) {
    using E = typename T::Element;
    auto [begin, end] = share(op.flags & SELECTED ? step.selected : step.tokens, member, size);
    for (int64_t row = begin; row < end; ++row)
        norm_row<T>(static_cast<const E*>(op.in) + row * op.k, static_cast<E*>(op.out) + row * op.k,
                    static_cast<const float*>(op.more), op.k, float(op.number));
}

// out [tokens, n] = in [tokens, k] x weights (+ bias) (+ out)
template <class T>
void linear(const Operation& op, const Step& step, int member, int size) {
    using E = typename T::Element;
    int64_t rows = op.flags & SELECTED ? step.selected : step.tokens;
    int64_t steps = op.k / T::PACK, panel = steps * LANES, pairs = (op.n + 2 * LANES - 1) / (2 * LANES);
    auto [begin, end] = share(pairs, member, size);
    auto* bias = static_cast<const float*>(op.more);
    for (int64_t pair = begin; pair < end; ++pair) {
        const uint32_t* a = op.weights + 2 * pair * panel;
        for (int64_t first = 0; first < rows; first += MAX_ROWS) {
            int count = int(std::min<int64_t>(MAX_ROWS, rows - first));
            const uint32_t* inputs[MAX_ROWS];
            for (int row = 0; row < count; ++row)
                inputs[row] = reinterpret_cast<const uint32_t*>(static_cast<const E*>(op.in) + (first + row) * op.k);
            __m512 sum[MAX_ROWS][2];
            clear(sum);
            multiply<T>(count, sum, a, a + panel, LANES, inputs, 0, steps);
            for (int half = 0; half < 2; ++half) {
                int64_t column = (2 * pair + half) * LANES;
                if (column >= op.n) break;
                __mmask16 lanes = lanes_of(int(op.n - column));
                __m512 shift = bias ? _mm512_maskz_loadu_ps(lanes, bias + column) : _mm512_setzero_ps();
                for (int row = 0; row < count; ++row) {
                    __m512 value = _mm512_add_ps(sum[row][half], shift);
                    int64_t place = (first + row) * op.n + column;
                    if (op.flags & AS_FLOAT) {
                        _mm512_mask_storeu_ps(static_cast<float*>(op.out) + place, lanes, value);
                    } else {
                        E* to = static_cast<E*>(op.out) + place;
                        if (op.flags & ADD) value = _mm512_add_ps(value, T::load(to, lanes));
                        T::store(to, value, lanes);
                    }
                }
            }
        }
    }
}

// One pair of panels, gate and up: out = silu(gate) * up, for rows given by pointers.
template <class T>
void gated_panel(const uint32_t* gate, const uint32_t* up, int64_t steps, const uint32_t* const* inputs, int count,
                 typename T::Element* const* outputs, int64_t column, int64_t n) {
    __m512 sum[MAX_ROWS][2];
    clear(sum);
    multiply<T>(count, sum, gate, up, LANES, inputs, 0, steps);
    __mmask16 lanes = lanes_of(int(n - column));
    for (int row = 0; row < count; ++row)
        T::store(outputs[row] + column, _mm512_mul_ps(silu_ps(sum[row][0]), sum[row][1]), lanes);
}

// out [tokens, n] = silu(in x gate) * (in x up); gate's panels come first, then up's
template <class T>
void gated(const Operation& op, const Step& step, int member, int size) {
    using E = typename T::Element;
    int64_t steps = op.k / T::PACK, panels = (op.n + LANES - 1) / LANES;
    auto [begin, end] = share(panels, member, size);
    for (int64_t panel = begin; panel < end; ++panel) {
        const uint32_t* gate = op.weights + panel * steps * LANES;
        for (int64_t first = 0; first < step.tokens; first += MAX_ROWS) {
            int count = int(std::min<int64_t>(MAX_ROWS, step.tokens - first));
            const uint32_t* inputs[MAX_ROWS];
            E* outputs[MAX_ROWS];
            for (int row = 0; row < count; ++row) {
                inputs[row] = reinterpret_cast<const uint32_t*>(static_cast<const E*>(op.in) + (first + row) * op.k);
                outputs[row] = static_cast<E*>(op.out) + (first + row) * op.n;
            }
            gated_panel<T>(gate, gate + panels * steps * LANES, steps, inputs, count, outputs, panel * LANES, op.n);
        }
    }
}

// ---- attention

// Rotates one head by its position, after its norm if it has one.
template <class T>
void turn(typename T::Element* head, int64_t dim, const float* weights, float eps, const float* cosines, const float* sines) {
    if (weights) norm_row<T>(head, head, weights, dim, eps);
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        __mmask16 lanes = lanes_of(int(half - i));
        __m512 low = T::load(head + i, lanes), high = T::load(head + half + i, lanes);
        __m512 c = _mm512_maskz_loadu_ps(lanes, cosines + i), s = _mm512_maskz_loadu_ps(lanes, sines + i);
        T::store(head + i, _mm512_fmsub_ps(low, c, _mm512_mul_ps(high, s)), lanes);
        T::store(head + half + i, _mm512_fmadd_ps(high, c, _mm512_mul_ps(low, s)), lanes);
    }
}

// Where the block of 16 keys that holds a slot begins, for one KV head (in words of 32 bits).
template <class T>
int64_t block_words(int64_t slot, int64_t head, int64_t heads, int64_t dim, int64_t block_size) {
    int64_t sub = block_size / LANES;
    int64_t block = slot / block_size, within = slot % block_size / LANES;
    return ((block * heads + head) * sub + within) * LANES * dim / T::PACK;
}

// in [tokens, (heads + 2 kv_heads) * dim]: norm and rotate queries and keys, store keys and values.
// a heads, b kv_heads, c dim; extra: keys, out: values; more: norm weights of queries then keys, or none
template <class T>
void qkv(const Operation& op, const Step& step, int member, int size) {
    using E = typename T::Element;
    int64_t heads = op.a, kv_heads = op.b, dim = op.c, half = dim / 2, width = (heads + 2 * kv_heads) * dim;
    auto* norms = static_cast<const float*>(op.more);
    auto* all_keys = static_cast<uint32_t*>(const_cast<void*>(op.extra));
    auto* all_values = static_cast<uint32_t*>(op.out);
    auto [begin, end] = share(step.tokens, member, size);
    for (int64_t token = begin; token < end; ++token) {
        E* row = static_cast<E*>(const_cast<void*>(op.in)) + token * width;
        const float *c = step.cosines + token * half, *s = step.sines + token * half;
        for (int64_t head = 0; head < heads; ++head) turn<T>(row + head * dim, dim, norms, float(op.number), c, s);
        int64_t slot = step.slots[token], lane = slot % LANES;
        for (int64_t head = 0; head < kv_heads; ++head) {
            E* key = row + (heads + head) * dim;
            const E* value = row + (heads + kv_heads + head) * dim;
            turn<T>(key, dim, norms ? norms + dim : nullptr, float(op.number), c, s);
            int64_t place = block_words<T>(slot, head, kv_heads, dim, step.block_size);
            auto* keys = reinterpret_cast<E*>(all_keys + place);
            auto* values = reinterpret_cast<E*>(all_values + place);
            // Weights of keys not written yet are 0, but 0 times what an earlier owner left may not be. The
            // first key of a block comes first, except among the tokens of this step, which other threads store.
            if (lane == 0) {
                int64_t written = 1;
                while (written < LANES && token + written < step.tokens && step.slots[token + written] == slot + written)
                    ++written;
                for (int64_t later = written; later < LANES; ++later)
                    for (int64_t i = 0; i < dim; ++i) values[(later / T::PACK * dim + i) * T::PACK + later % T::PACK] = E(0);
            }
            for (int64_t i = 0; i < dim; ++i) {
                keys[(i / T::PACK * LANES + lane) * T::PACK + i % T::PACK] = key[i];
                values[(lane / T::PACK * dim + i) * T::PACK + lane % T::PACK] = value[i];
            }
        }
    }
}

// One KV head against a few queries of one row.
template <class T>
void attend_tile(const Operation& op, const Step& step, const int32_t* task, int64_t kv_head, std::vector<uint32_t>& room) {
    using E = typename T::Element;
    int64_t heads = op.a, kv_heads = op.b, dim = op.c, window = op.d, group = heads / kv_heads;
    int64_t width = (heads + 2 * kv_heads) * dim, row = task[0], first = task[1], queries = task[2];
    int64_t position = step.starts[row] + first, last = position + queries - 1;
    int64_t begin = window > 0 ? std::max<int64_t>(0, position - window + 1) / LANES * LANES : 0;
    int64_t blocks = (last - begin) / LANES + 1, length = blocks * LANES;
    const int32_t* table = step.tables + row * step.table_width;
    auto* keys = static_cast<const uint32_t*>(op.extra);
    auto* values = op.weights;
    auto place = [&](int64_t block) {
        int64_t key = begin + block * LANES;
        int64_t slot = int64_t(table[key / step.block_size]) * step.block_size + key % step.block_size;
        return block_words<T>(slot, kv_head, kv_heads, dim, step.block_size);
    };
    int64_t vectors = queries * group;
    for (int64_t base = 0; base < vectors; base += MAX_ROWS) {
        int count = int(std::min<int64_t>(MAX_ROWS, vectors - base));
        room.resize(size_t(count) * length * 2);
        auto* scores = reinterpret_cast<float*>(room.data());
        auto* weights = reinterpret_cast<E*>(room.data() + count * length);
        const uint32_t* inputs[MAX_ROWS];
        E* outputs[MAX_ROWS];
        int64_t at[MAX_ROWS];
        for (int i = 0; i < count; ++i) {
            int64_t query = (base + i) / group, head = kv_head * group + (base + i) % group;
            int64_t token = step.offsets[row] + first + query;
            inputs[i] = reinterpret_cast<const uint32_t*>(static_cast<const E*>(op.in) + token * width + head * dim);
            outputs[i] = static_cast<E*>(op.out) + (token * heads + head) * dim;
            at[i] = position + query;
        }
        for (int64_t block = 0; block < blocks; block += 2) {
            int64_t next = std::min(block + 1, blocks - 1);
            __m512 sum[MAX_ROWS][2];
            clear(sum);
            multiply<T>(count, sum, keys + place(block), keys + place(next), LANES, inputs, 0, dim / T::PACK);
            for (int i = 0; i < count; ++i) {
                _mm512_storeu_ps(scores + i * length + block * LANES, sum[i][0]);
                _mm512_storeu_ps(scores + i * length + next * LANES, sum[i][next == block ? 0 : 1]);
            }
        }
        float inverse[MAX_ROWS];
        for (int i = 0; i < count; ++i) {
            float* line = scores + i * length;
            int64_t seen = at[i] + 1 - begin, hidden = window > 0 ? std::max<int64_t>(0, at[i] - window + 1 - begin) : 0;
            __m512 most = _mm512_set1_ps(-INFINITY), scale = _mm512_set1_ps(float(op.number));
            for (int64_t key = 0; key < length; key += LANES) {
                __mmask16 visible = key >= seen ? __mmask16(0) : lanes_of(int(seen - key));
                if (key < hidden) visible &= ~lanes_of(int(hidden - key));
                __m512 score = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), visible, _mm512_loadu_ps(line + key), scale);
                _mm512_storeu_ps(line + key, score);
                most = _mm512_max_ps(most, score);
            }
            __m512 peak = _mm512_set1_ps(_mm512_reduce_max_ps(most)), total = _mm512_setzero_ps();
            for (int64_t key = 0; key < length; key += LANES) {
                __m512 score = _mm512_loadu_ps(line + key);
                __mmask16 visible = _mm512_cmp_ps_mask(score, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ);
                __m512 weight = _mm512_maskz_mov_ps(visible, exp_ps(_mm512_sub_ps(score, peak)));
                total = _mm512_add_ps(total, weight);
                T::store(weights + i * length + key, weight, __mmask16(0xffff));
            }
            inverse[i] = 1.f / _mm512_reduce_add_ps(total);
            inputs[i] = reinterpret_cast<const uint32_t*>(weights + i * length);
        }
        for (int64_t column = 0; column < dim; column += 2 * LANES) {
            __m512 sum[MAX_ROWS][2];
            clear(sum);
            for (int64_t block = 0; block < blocks; ++block) {
                const uint32_t* panel = values + place(block) + column;
                multiply<T>(count, sum, panel, column + LANES < dim ? panel + LANES : panel, dim, inputs, block * LANES / T::PACK, LANES / T::PACK);
            }
            for (int i = 0; i < count; ++i)
                for (int half = 0; half < 2 && column + half * LANES < dim; ++half)
                    T::store(outputs[i] + column + half * LANES,
                             _mm512_mul_ps(sum[i][half], _mm512_set1_ps(inverse[i])), __mmask16(0xffff));
        }
    }
}

// in: what qkv left; out [tokens, heads * dim]; number: scale, d: window or 0; weights: values, extra: keys
template <class T>
void attend(const Operation& op, const Step& step, Team& team) {
    thread_local std::vector<uint32_t> room;
    int64_t total = step.num_tasks * op.b;
    for (int64_t task = team.take(1); task < total; task = team.take(1))
        attend_tile<T>(op, step, step.tasks + 3 * (task / op.b), task % op.b, room);
}

// ---- mixture of experts

// in: logits as float [tokens, n]; out: weights [tokens, k] as float; extra: ids [tokens, k] int64.
// Softmax over all, the k largest in descending order, divided by their sum if ADD.
template <class T>
void route(const Operation& op, const Step& step, int member, int size) {
    auto [begin, end] = share(step.tokens, member, size);
    auto* ids = static_cast<int64_t*>(const_cast<void*>(op.extra));
    for (int64_t token = begin; token < end; ++token) {
        const float* logits = static_cast<const float*>(op.in) + token * op.n;
        float* weights = static_cast<float*>(op.out) + token * op.k;
        int64_t* chosen = ids + token * op.k;
        float peak = -INFINITY, total = 0.f, sum = 0.f;
        for (int64_t expert = 0; expert < op.n; ++expert) peak = std::max(peak, T::rounded(logits[expert]));
        for (int64_t expert = 0; expert < op.n; ++expert) total += std::exp(T::rounded(logits[expert]) - peak);
        for (int64_t place = 0; place < op.k; ++place) {
            int64_t best = -1;
            for (int64_t expert = 0; expert < op.n; ++expert) {
                if (std::find(chosen, chosen + place, expert) != chosen + place) continue;
                if (best < 0 || T::rounded(logits[expert]) > T::rounded(logits[best])) best = expert;
            }
            chosen[place] = best;
            weights[place] = std::exp(T::rounded(logits[best]) - peak) / total;
            sum += weights[place];
        }
        for (int64_t place = 0; place < op.k; ++place)
            weights[place] = T::rounded(op.flags & ADD ? weights[place] / sum : weights[place]);
    }
}

// extra: expert of each pair [a]; out: int64 [n + 1] begin of each expert's pairs, then [a] pairs by expert
void sort_pairs(const Operation& op, const Step& step) {
    int64_t pairs = op.a < 0 ? step.tokens * -op.a : op.a;  // k per token, or a fixed number
    auto* experts = static_cast<const int64_t*>(op.extra);
    auto* begins = static_cast<int64_t*>(op.out);
    int64_t* order = begins + op.n + 1;
    std::fill(begins, begins + op.n + 1, 0);
    for (int64_t pair = 0; pair < pairs; ++pair) ++begins[experts[pair] + 1];
    for (int64_t expert = 0; expert < op.n; ++expert) begins[expert + 1] += begins[expert];
    std::vector<int64_t> next(begins, begins + op.n);
    for (int64_t pair = 0; pair < pairs; ++pair) order[next[experts[pair]]++] = pair;
}

// Calls body(expert, panel, pairs of the expert, how many) for all that have any, shared out among the threads.
template <class Body>
void for_experts(const int64_t* begins, int64_t num_experts, int64_t panels, Team& team, Body body) {
    const int64_t* order = begins + num_experts + 1;
    int64_t total = num_experts * panels;
    for (int64_t task = team.take(1); task < total; task = team.take(1)) {
        int64_t expert = task / panels, count = begins[expert + 1] - begins[expert];
        if (count > 0) body(expert, task % panels, order + begins[expert], count);
    }
}

// out [pairs, n] = silu(gate) * up of in [tokens, k]; weights by expert: gate's panels, then up's.
// extra: what sort_pairs wrote; a: experts; b: pairs per token
template <class T>
void experts_up(const Operation& op, Team& team) {
    using E = typename T::Element;
    int64_t steps = op.k / T::PACK, panels = (op.n + LANES - 1) / LANES, panel_words = steps * LANES;
    for_experts(static_cast<const int64_t*>(op.extra), op.a, panels, team,
                [&](int64_t expert, int64_t panel, const int64_t* pairs, int64_t total) {
        const uint32_t* gate = op.weights + (expert * 2 * panels + panel) * panel_words;
        for (int64_t first = 0; first < total; first += MAX_ROWS) {
            int count = int(std::min<int64_t>(MAX_ROWS, total - first));
            const uint32_t* inputs[MAX_ROWS];
            E* outputs[MAX_ROWS];
            for (int row = 0; row < count; ++row) {
                int64_t pair = pairs[first + row];
                inputs[row] = reinterpret_cast<const uint32_t*>(static_cast<const E*>(op.in) + pair / op.b * op.k);
                outputs[row] = static_cast<E*>(op.out) + pair * op.n;
            }
            gated_panel<T>(gate, gate + panels * panel_words, steps, inputs, count, outputs, panel * LANES, op.n);
        }
    });
}

// out [pairs, n] = in [pairs, k] x weights of its expert
template <class T>
void experts_down(const Operation& op, Team& team) {
    using E = typename T::Element;
    int64_t steps = op.k / T::PACK, pairs_of_panels = (op.n + 2 * LANES - 1) / (2 * LANES), words = steps * LANES;
    for_experts(static_cast<const int64_t*>(op.extra), op.a, pairs_of_panels, team,
                [&](int64_t expert, int64_t panel, const int64_t* pairs, int64_t total) {
        const uint32_t* a = op.weights + (expert * pairs_of_panels + panel) * 2 * words;
        for (int64_t first = 0; first < total; first += MAX_ROWS) {
            int count = int(std::min<int64_t>(MAX_ROWS, total - first));
            const uint32_t* inputs[MAX_ROWS];
            for (int row = 0; row < count; ++row)
                inputs[row] = reinterpret_cast<const uint32_t*>(static_cast<const E*>(op.in) + pairs[first + row] * op.k);
            __m512 sum[MAX_ROWS][2];
            clear(sum);
            multiply<T>(count, sum, a, a + words, LANES, inputs, 0, steps);
            for (int row = 0; row < count; ++row)
                for (int half = 0; half < 2; ++half) {
                    int64_t column = (2 * panel + half) * LANES;
                    if (column < op.n)
                        T::store(static_cast<E*>(op.out) + pairs[first + row] * op.n + column, sum[row][half],
                                 lanes_of(int(op.n - column)));
                }
        }
    });
}

// out [tokens, n] += sum over its k pairs, in order, of extra (weights, float) * in [pairs, n]
template <class T>
void combine(const Operation& op, const Step& step, int member, int size) {
    using E = typename T::Element;
    auto* weights = static_cast<const float*>(op.extra);
    auto [begin, end] = share(step.tokens, member, size);
    for (int64_t token = begin; token < end; ++token)
        for (int64_t i = 0; i < op.n; i += LANES) {
            __mmask16 lanes = lanes_of(int(op.n - i));
            __m512 sum = _mm512_setzero_ps();
            for (int64_t place = 0; place < op.k; ++place) {
                int64_t pair = token * op.k + place;
                sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[pair]),
                                      T::load(static_cast<const E*>(op.in) + pair * op.n + i, lanes), sum);
            }
            E* to = static_cast<E*>(op.out) + token * op.n + i;
            T::store(to, op.flags & ADD ? _mm512_add_ps(sum, T::load(to, lanes)) : sum, lanes);
        }
}

template <class T>
void run(const Operation* operations, int64_t count, const Step& step, int threads) {
    Team team(threads);
    auto work = [&](int member) {
        auto began = std::chrono::steady_clock::now();
        for (int64_t number = 0; number < count; ++number) {
            const Operation& op = operations[number];
            switch (op.kind) {
                case EMBED: embed<T>(op, step, member, threads); break;
                case NORM: norm<T>(op, step, member, threads); break;
                case LINEAR: linear<T>(op, step, member, threads); break;
                case QKV: qkv<T>(op, step, member, threads); break;
                case ATTEND: attend<T>(op, step, team); break;
                case GATED: gated<T>(op, step, member, threads); break;
                case ROUTE: route<T>(op, step, member, threads); break;
                case SORT: if (member == 0) sort_pairs(op, step); break;
                case EXPERTS_UP: experts_up<T>(op, team); break;
                case EXPERTS_DOWN: experts_down<T>(op, team); break;
                case COMBINE: combine<T>(op, step, member, threads); break;
                case SELECT: select<T>(op, step, member, threads); break;
            }
            team.wait();
            if (member == 0 && step.seconds != nullptr) {
                auto now = std::chrono::steady_clock::now();
                step.seconds[op.kind] += std::chrono::duration<double>(now - began).count();
                began = now;
            }
        }
    };
    if (threads == 1) return work(0);
#pragma omp parallel num_threads(threads)
    work(omp_get_thread_num());
}

}  // namespace

extern "C" {

// Runs the operations in order. element: 0 float, 1 bfloat16.
void lockstep_run(const void* operations, int64_t count, const void* step, int64_t element, int64_t threads) {
    auto* list = static_cast<const Operation*>(operations);
    auto& with = *static_cast<const Step*>(step);
    if (element == 0) run<Float>(list, count, with, int(threads));
    else run<BFloat16>(list, count, with, int(threads));
}

int64_t lockstep_operation_bytes() { return sizeof(Operation); }
int64_t lockstep_step_bytes() { return sizeof(Step); }
}
