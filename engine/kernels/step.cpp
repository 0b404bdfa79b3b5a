// The forward pass of a decoder as a short list of operations, run by one team of threads.
//
// All matrices are laid out in panels of 16 output rows ("words" of 32 bits: one float, or two bfloat16 that
// are neighbours along K), so that one 512-bit load serves 16 outputs and a row's inputs are broadcast:
// decode reads each weight once at the speed of memory, and nothing is summed across lanes. The KV cache has
// the same layout, so attention is the same inner loop: keys are a panel of 16 "outputs" (scores), values a
// panel along their keys. Every output is summed in one fixed order, whatever else is in the batch.
//
// This file and the headers beside it need nothing but OpenMP; program.py writes the operations, docs/design/kernels.md
// explains.

#include <omp.h>

#include "attention/attention.hpp"
#include "choosing/choosing.hpp"
#include "core/contract.hpp"
#include "experts/experts.hpp"
#include "choosing/logprobs.hpp"
#include "products/products.hpp"
#include "products/rounding.hpp"
#include "choosing/shaping.hpp"
#include "attention/turning.hpp"

namespace {

// ---- operations; each is called by all threads that take part, and returns when all of it is taken

// number: a factor; more: rows of positions that are added, or none. With AS_FLOAT out is float [tokens, k], of the n tokens from
// number a on; 0 for others, which another rank has. Positions are added by one rank, to whichever token.
template <class T>
void embed(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    const Floats factor = factor_of(op.number);
    auto* placed = static_cast<const E*>(op.more);
    if (op.flags & AS_FLOAT) {
        work.for_each(step.tokens, [&](int64_t token) {
            int64_t number = step.ids[token] - op.a;
            bool is_here = number >= 0 && number < op.n;
            const E* from = static_cast<const E*>(op.in) + (is_here ? number * op.k : 0);
            for (int64_t i = 0; i < op.k; i += LANES) {
                Mask lanes = lanes_of(int(op.k - i));
                Floats value = is_here ? T::load(from + i, lanes) * factor : filled(0.f);
                if (placed != nullptr) value = value + T::load(placed + step.positions[token] * op.k + i, lanes);
                store(static_cast<float*>(op.out) + token * op.k + i, value, lanes);
            }
        });
        return;
    }
    work.for_each(step.tokens, [&](int64_t token) {
        E* to = static_cast<E*>(op.out) + token * pitch_of<T>(op.k);
        const E* from = static_cast<const E*>(op.in) + step.ids[token] * op.k;
        if (op.number == 0 && placed == nullptr) return void(std::memcpy(to, from, op.k * sizeof(E)));
        for (int64_t i = 0; i < op.k; i += LANES) {
            Mask lanes = lanes_of(int(op.k - i));
            Floats value = T::load(from + i, lanes) * factor;
            if (placed != nullptr) value = value + T::load(placed + step.positions[token] * op.k + i, lanes);
            T::store(to + i, value, lanes);
        }
    });
}

template <class T>
void select(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    int64_t pitch = pitch_of<T>(op.k);
    work.for_each(step.selected, [&](int64_t row) {
        std::memcpy(static_cast<E*>(op.out) + row * pitch, static_cast<const E*>(op.in) + step.chosen[row] * pitch,
                    op.k * sizeof(E));
    });
}

// out [rows, k] = the norm of in (+ out). n: numbers of a row of in, of which these are part, 0 for k; width: the same of out. more:
// weights [k], with CENTRED the bias [k] behind them; number: what is added to the mean square. b: parts whose squares are added up by
// themselves, if not 0. extra: an exchange of ranks that have parts of such a row: what SQUARES gave of each, from byte a of its arena on;
// c, d: as there
template <class T>
void norm(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    int64_t pitch_in = pitch_of<T>(op.n != 0 ? op.n : op.k), pitch_out = pitch_of<T>(op.width != 0 ? op.width : op.k);
    bool is_centred = op.flags & CENTRED;
    auto* weights = static_cast<const float*>(op.more);
    auto* ranks = static_cast<const Exchange*>(op.extra);
    const Norm norm{weights, is_centred ? weights + op.k : nullptr, float(op.number), is_centred};
    work.for_each(rows_of(op, step), [&](int64_t row) {
        const E* from = static_cast<const E*>(op.in) + row * pitch_in;
        E* to = static_cast<E*>(op.out) + row * pitch_out;
        if (ranks != nullptr) {
            float squares = sum_of(sum_over_ranks(*ranks, op.a, row * BOTH + op.c, Mask(1)), Mask(1));
            scale_row<T>(from, to, norm, op.k, filled(0.f), scale_of(squares, op.d, norm));
        } else if (op.b != 0) {
            scale_row<T>(from, to, norm, op.k, filled(0.f), scale_of(squares_in_parts<T>(from, op.k, op.b), op.k, norm));
        } else if (op.flags & ADD) {
            norm_row<T, true>(from, to, norm, op.k);
        } else {
            norm_row<T>(from, to, norm, op.k);
        }
    });
}

// out float [rows, 2], number c of each row = the sum of the squares of in [rows, k], rows which are part of wider ones, of n numbers, in
// b parts. d: numbers of all ranks; 0 where a rank before this one has the same numbers: what it gives is 0.
template <class T>
void squares(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    work.for_each(rows_of(op, step), [&](int64_t row) {
        const E* from = static_cast<const E*>(op.in) + row * pitch_of<T>(op.n);
        static_cast<float*>(op.out)[row * BOTH + op.c] = op.d == 0 ? 0.f : squares_in_parts<T>(from, op.k, op.b);
    });
}

// out [rows, k] = in * number
template <class T>
void scale(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    const Floats factor = factor_of(op.number);
    work.for_each(rows_of(op, step), [&](int64_t row) {
        for (int64_t i = 0; i < op.k; i += LANES) {
            Mask lanes = lanes_of(int(op.k - i));
            int64_t at = row * pitch_of<T>(op.k) + i;
            T::store(static_cast<E*>(op.out) + at, T::load(static_cast<const E*>(op.in) + at, lanes) * factor, lanes);
        }
    });
}

// out [tokens, n], of each layer k numbers: their norm, plus those of the token in a table [tokens of the vocabulary, n]. more: the norm's
// weights [k]; number: what it adds; factors: on the table's numbers, and on the sum
template <class T>
void inputs(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    const Norm norm{static_cast<const float*>(op.more), nullptr, float(op.number), false};
    const Floats of_table = filled(op.factors[0]), of_sum = filled(op.factors[1]);
    work.for_each(step.tokens, [&](int64_t token) {
        E* to = static_cast<E*>(op.out) + token * pitch_of<T>(op.n);
        const E* table = static_cast<const E*>(op.in) + step.ids[token] * op.n;
        for (int64_t first = 0; first < op.n; first += op.k) norm_row<T>(to + first, to + first, norm, op.k);
        for (int64_t i = 0; i < op.n; i += LANES) {
            Mask lanes = lanes_of(int(op.n - i));
            T::store(to + i, fmadd(T::load(table + i, lanes), of_table, T::load(to + i, lanes)) * of_sum, lanes);
        }
    });
}

// out [rows, k] is multiplied by in, of tokens' rows which are part of wider ones, of n numbers
template <class T>
void times(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    work.for_each(rows_of(op, step), [&](int64_t row) {
        int64_t token = op.flags & SELECTED ? step.chosen[row] : row;
        const E* from = static_cast<const E*>(op.in) + token * pitch_of<T>(op.n);
        E* to = static_cast<E*>(op.out) + row * pitch_of<T>(op.k);
        for (int64_t i = 0; i < op.k; i += LANES) {
            Mask lanes = lanes_of(int(op.k - i));
            T::store(to + i, T::load(to + i, lanes) * T::load(from + i, lanes), lanes);
        }
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

// out [selected, n] float: c * tanh(out / c), where c is the number
void cap(const Operation& op, const Step& step, Work& work) {
    const Floats most = filled(float(op.number));
    work.for_each(step.selected, [&](int64_t row) {
        for (int64_t i = 0; i < op.n; i += LANES) {
            Mask lanes = lanes_of(int(op.n - i));
            float* at = static_cast<float*>(op.out) + row * op.n + i;
            store(at, most * tanh_of(load(at, lanes) / most), lanes);
        }
    });
}

// out [rows, k] = in, rounded to bytes in b parts. more: a Rounding; extra: first row of each of a experts, none: all rows
template <class T>
void round_rows(const Operation& op, const Step& step, Work& work) {
    auto* begins = static_cast<const int64_t*>(op.extra);
    const int64_t first = begins == nullptr ? 0 : begins[0], rows = begins == nullptr ? rows_of(op, step) : begins[op.a] - first;
    auto& how = *static_cast<const Rounding*>(op.more);
    work.for_each(rows, [&](int64_t number) {
        const int64_t row = first + number;
        round_row<T>(how, static_cast<const typename T::Element*>(op.in) + row * pitch_of<T>(op.k), op.k, op.b,
                     static_cast<uint8_t*>(op.out) + row * pitch_of<Bytes>(op.k));
    });
}

// What is there and a row's value, times the sigmoid of the row's logit if the operation has such factors.
template <class T>
inline Floats added_to(const typename T::Element* there, Floats value, Mask lanes, const Operation& op, int64_t row) {
    Floats before = T::load(there, lanes);
    return op.factors ? fmadd(value, sigmoid_ps(filled(op.factors[row])), before) : value + before;
}

// out [tokens, n] = in [tokens, k] x weights (+ bias), activated, times a factor (+ out: see added_to). b: parts of the inputs, 0 for
// one; c: the activation, extra: its numbers; number: the factor, 0 for none; width: numbers of a row of out, of which these are part.
// groups: n outputs for each, with k inputs step_in numbers behind those of the one before, stored step_out numbers behind; n is a
// multiple of 16 then, and of 32 unless step_in is 0. In: what inputs are, Bytes where they were rounded, which parts of rows are not
template <class T, class In = T>
void linear(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    int64_t rows = rows_of(op, step);
    if (rows == 0) return;
    const int64_t groups = std::max<int64_t>(1, op.groups), outputs = groups * op.n, out_width = op.width != 0 ? op.width : outputs;
    const int64_t in_width = op.step_in != 0 ? groups * op.step_in : op.k;
    int64_t panel = op.k / In::PACK * LANES, pairs = (outputs + 2 * LANES - 1) / (2 * LANES);
    int64_t pitch = op.flags & AS_FLOAT ? out_width : pitch_of<T>(out_width);
    auto place_of = [&](int64_t column) { return op.groups == 0 ? column : column / op.n * op.step_out + column % op.n; };
    auto* bias = static_cast<const float*>(op.more);
    const Floats factor = factor_of(op.number);
    struct Columns {
        int64_t first, column, next;  // of rows and columns; those of the second panel
        Mask low, high;
    };
    auto put = [&](void* out, Floats value, Mask lanes, int64_t column, int64_t row) {
        if (bias) value = value + load(bias + column, lanes);
        if (op.c != LINEAR_ONLY) value = activated(op.c, value, static_cast<const float*>(op.extra));
        if (op.number != 0) value = value * factor;
        if (op.flags & AS_FLOAT) return store(static_cast<float*>(out) + column, value, lanes);
        E* to = static_cast<E*>(out) + column;
        if (op.flags & ADD) value = added_to<T>(to, value, lanes, op, row);
        T::store(to, value, lanes);
    };
    const int64_t size = op.flags & AS_FLOAT ? sizeof(float) : sizeof(E);
    auto line = [&](const Columns& to, int64_t row) { return static_cast<char*>(op.out) + (to.first + row) * pitch * size; };
    auto place = [&](const Columns& to, int64_t row) { return line(to, row) + to.column * size; };
    auto products = products_into<In, Columns>([&](const Columns& to, int64_t row, Floats one, Floats two) {
        put(line(to, row), one, to.low, to.column, to.first + row);
        put(line(to, row), two, to.high, to.next, to.first + row);
    }, place, std::max<int64_t>(1, op.b), in_width);
    Weights weights(op, op.k / In::PACK, In::PACK);
    auto panels_of = [&](int64_t pair) { return Panels{weights.panel(2 * pair), weights.panel(2 * pair + 1)}; };
    work.share_out(pairs, CACHED_BYTES / (8 * panel), [&](Share now, Share next) {
        uint32_t* room = room_for<In>(weights, op.k, rows, now.size());
        products.want(weights, {2 * next.begin}, 2 * next.size(), warm_tiles<In>(op.k, rows) * now.size());
        row_blocks<In>(op.k, rows, [&](int64_t first, int64_t count) {
            for (int64_t pair = now.begin; pair < now.end; ++pair) {
                int64_t column = 2 * pair * LANES, then = behind_in(pair, now, next);
                auto* inputs = static_cast<const typename In::Element*>(op.in) + first * pitch_of<In>(in_width) + column / op.n * op.step_in;
                products.multiply(inputs, op.k, count, panels_of(pair), panels_of(then), first == 0,
                                  {first, place_of(column), place_of(column + LANES), lanes_of(int(outputs - column)),
                                   lanes_of(int(std::max<int64_t>(0, outputs - column - LANES)))},
                                  room == nullptr ? nullptr : room + (pair - now.begin) * 2 * panel);
            }
        });
    });
    products.finish();
}

// out [tokens, n] = silu(in x gate) * (in x up); gate's panels come first, then up's. a: the activation, SILU if 0; more: bias [2, n]
template <class T, class In = T>
void gated(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    int64_t rows = rows_of(op, step);
    if (rows == 0) return;
    int64_t words = op.k / In::PACK * LANES, panels = (op.n + LANES - 1) / LANES;
    auto products = gated_products<T, In>(op.n, op.a);
    auto* bias = static_cast<const float*>(op.more);
    Weights weights(op, op.k / In::PACK, In::PACK);
    auto panels_of = [&](int64_t panel) { return Panels{weights.panel(panel), weights.panel(panels + panel)}; };
    work.share_out(panels, CACHED_BYTES / (8 * words), [&](Share now, Share next) {
        uint32_t* room = room_for<In>(weights, op.k, rows, now.size());
        products.want(weights, {next.begin, panels + next.begin}, next.size(), warm_tiles<In>(op.k, rows) * now.size());
        row_blocks<In>(op.k, rows, [&](int64_t first, int64_t count) {
            for (int64_t panel = now.begin; panel < now.end; ++panel) {
                int64_t column = panel * LANES, then = behind_in(panel, now, next);
                products.multiply(static_cast<const typename In::Element*>(op.in) + first * pitch_of<In>(op.k), op.k, count, panels_of(panel),
                                  panels_of(then), first == 0,
                                  {static_cast<E*>(op.out) + first * pitch_of<T>(op.n) + column, lanes_of(int(op.n - column)),
                                   bias ? bias + column : nullptr, bias ? bias + op.n + column : nullptr},
                                  room == nullptr ? nullptr : room + (panel - now.begin) * 2 * words);
            }
        });
    });
    products.finish();
}

// out [rows, n] = what all ranks gave, float [rows, n] from byte a of each arena, neighbours added first (+ bias), times a factor (+ out:
// see added_to). extra: an exchange; number: the factor, 0 for none
template <class T>
void sum(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    auto& exchange = *static_cast<const Exchange*>(op.extra);
    auto* bias = static_cast<const float*>(op.more);
    const Floats factor = factor_of(op.number);
    work.for_each(rows_of(op, step), [&](int64_t row) {
        for (int64_t i = 0; i < op.n; i += LANES) {
            Mask lanes = lanes_of(int(op.n - i));
            Floats total = sum_over_ranks(exchange, op.a, row * op.n + i, lanes);
            if (bias) total = total + load(bias + i, lanes);
            if (op.number != 0) total = total * factor;
            E* to = static_cast<E*>(op.out) + row * pitch_of<T>(op.n) + i;
            if (op.flags & ADD) total = added_to<T>(to, total, lanes, op, row);
            T::store(to, total, lanes);
        }
    });
}

// False if the step did not come to its end.
template <class T>
bool run(const Operation* operations, int64_t count, const Step& step, int threads) {
    Team team(count, threads);
    auto take_part = [&](bool is_caller) {
        TileUse tiles(tiles_allowed);  // also where the type of the model is float: rounded inputs are multiplied by tiles
        for (int64_t number = 0; number < count; number = team.behind(number)) {
            const Operation& op = operations[number];
            if ((is_callers(op.kind) && !is_caller) || !team.enter(number)) continue;
            Work work = team.work(number, is_caller);
            switch (op.kind) {
                case EMBED: embed<T>(op, step, work); break;
                case NORM: norm<T>(op, step, work); break;
                case LINEAR:
                    if (op.flags & ROUNDED) linear<T, Bytes>(op, step, work);
                    else op.flags & WIDE ? linear<Float>(op, step, work) : linear<T>(op, step, work);
                    break;
                case QKV: qkv<T>(op, step, work); break;
                case ATTEND: attend<T>(op, operations[number - 1], step, work); break;  // behind its QKV
                case GATED: op.flags & ROUNDED ? gated<T, Bytes>(op, step, work) : gated<T>(op, step, work); break;
                case ROUTE: route<T>(op, step, work); break;
                case SORT: sort_pairs<T>(op, step, work); break;
                case GATHER: gather<T>(op, work); break;
                case EXPERTS_UP: op.flags & ROUNDED ? experts_up<T, Bytes>(op, work) : experts_up<T>(op, work); break;
                case EXPERTS_DOWN: op.flags & ROUNDED ? experts_down<T, Bytes>(op, work) : experts_down<T>(op, work); break;
                case COMBINE: combine<T>(op, step, work); break;
                case SELECT: select<T>(op, step, work); break;
                case OFFER: offer(op, step, team); break;
                case LOOK: look(op, step, team); break;
                case MEET: meet(op, step, OFFERED, team); break;
                case RETURN: give_back(op); break;
                case HOME: meet(op, step, RETURNED, team); break;
                case CHOOSE: choose(op, step, work); break;
                case SUM: sum<T>(op, step, work); break;
                case BEST_OF_ALL: best_of_all(op, step, work); break;
                case WIDEN: widen<T>(op, step, work); break;
                case CAP: cap(op, step, work); break;
                case ROUND: round_rows<T>(op, step, work); break;
                case SQUARES: squares<T>(op, step, work); break;
                case CLEAR: clear(op, work); break;
                case SCALE: scale<T>(op, step, work); break;
                case INPUTS: inputs<T>(op, step, work); break;
                case TIMES: times<T>(op, step, work); break;
            }
            team.leave(number);
        }
    };
    if (threads == 1) {
        take_part(true);
    } else {
#pragma omp parallel num_threads(threads)
        take_part(omp_get_thread_num() == 0);
    }
    if (team.failed.load(std::memory_order_relaxed)) return false;
    if (step.seconds != nullptr)
        for (int64_t number = 0; number < count; ++number) step.seconds[operations[number].kind] += team.seconds(number);
    return true;
}

}  // namespace

extern "C" {

// Whether a member's word has risen to a target; what has come from it over its link is taken first.
int64_t lockstep_has_arrived(const void* exchange, int64_t rank, const void* word, int64_t target) {
    auto& common = *static_cast<const Exchange*>(exchange);
    const void* now = is_linked(common) ? common.linkage->now : nullptr;
    auto& with = now == nullptr ? common : *static_cast<const Exchange*>(now);
    auto* at = static_cast<const int64_t*>(word);
    for (int64_t which : {OFFERED, RETURNED})
        if (is_linked(with) && at == words_of(with, rank, which) + which && target == *with.rounds) look_at(with, rank, which);
    return has_arrived(at, target);
}

// Runs the operations in order. element: 0 float, 1 bfloat16. Returns 0, or 1 if the step was given up.
int64_t lockstep_run(const void* operations, int64_t count, const void* step, int64_t element, int64_t threads) {
    auto* list = static_cast<const Operation*>(operations);
    auto& with = *static_cast<const Step*>(step);
    bool done = element == 0 ? run<Float>(list, count, with, int(threads)) : run<BFloat16>(list, count, with, int(threads));
    return done ? 0 : 1;
}

// Draws the tokens of rows of logits [rows, n] that are to stand at these positions.
void lockstep_draw(const void* logits, int64_t rows, int64_t n, const void* draws, const void* positions, void* out, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
    for (int64_t row = 0; row < rows; ++row)
        static_cast<int64_t*>(out)[row] = drawn(static_cast<const float*>(logits) + row * n, n, static_cast<const Draw*>(draws)[row],
                                                static_cast<const int64_t*>(positions)[row]);
}

// Lines [rows, 3 + 2 * top] for rows of logits [rows, n].
void lockstep_logprobs(const void* logits, int64_t rows, int64_t n, const void* targets, int64_t top, void* out, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
    for (int64_t row = 0; row < rows; ++row)
        logprobs(static_cast<const float*>(logits) + row * n, n, static_cast<const int64_t*>(targets)[row], top,
                 static_cast<double*>(out) + row * (3 + 2 * top));
}

// Changes rows of logits [rows, n], whose first column is token `first`.
void lockstep_shape(void* logits, int64_t n, int64_t first, const void* shapes, int64_t count, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
    for (int64_t i = 0; i < count; ++i) {
        const Shape& shape = static_cast<const Shape*>(shapes)[i];
        float* row = static_cast<float*>(logits) + shape.row * n;
        if (shape.mask != nullptr) leave_out(row, n, first, shape.mask);
        if (shape.num_tokens > 0) penalise(row, n, first, shape);
    }
}

// The best ones [rows] of a rank's rows of logits [rows, n], whose first column is token `first`.
void lockstep_contestants(const void* logits, int64_t rows, int64_t n, int64_t first, const void* draws, const void* positions,
                          void* out, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
    for (int64_t row = 0; row < rows; ++row)
        static_cast<Best*>(out)[row] = contestant(static_cast<const float*>(logits) + row * n, n, first,
                                                  static_cast<const Draw*>(draws)[row], static_cast<const int64_t*>(positions)[row]);
}

int64_t lockstep_shape_bytes() { return sizeof(Shape); }
int64_t lockstep_draw_bytes() { return sizeof(Draw); }
int64_t lockstep_operation_bytes() { return sizeof(Operation); }
int64_t lockstep_step_bytes() { return sizeof(Step); }
int64_t lockstep_exchange_bytes() { return sizeof(Exchange); }
int64_t lockstep_linkage_bytes() { return sizeof(Linkage); }
int64_t lockstep_peer_bytes() { return sizeof(Peer); }
int64_t lockstep_routing_bytes() { return sizeof(Routing); }
int64_t lockstep_rounding_bytes() { return sizeof(Rounding); }
// 12 bits for each of these weights, laid out in panels of whole tiles: first what they need, then they themselves.
int64_t lockstep_has_avx512() { return LOCKSTEP_AVX512; }
int64_t lockstep_can_compress() { return CAN_COMPRESS; }
const char* lockstep_compiler() { return __VERSION__; }
int64_t lockstep_survey(const void* weights, int64_t tiles, void* uppers, void* begins, int64_t threads) {
    return survey(static_cast<const uint16_t*>(weights), tiles, static_cast<uint8_t*>(uppers), static_cast<uint32_t*>(begins),
                  int(threads));
}
void lockstep_compress(const void* weights, int64_t tiles, const void* uppers, const void* begins, void* patches, void* out,
                       int64_t threads) {
    compress(static_cast<const uint16_t*>(weights), tiles, static_cast<const uint8_t*>(uppers),
             static_cast<const uint32_t*>(begins), static_cast<uint32_t*>(patches), static_cast<uint8_t*>(out), int(threads));
}
// Whether products use AMX: asks for it, or switches it off.
int64_t lockstep_use_tiles(int64_t wanted) { return tiles_allowed = wanted != 0 && ask_for_tiles(); }
}
