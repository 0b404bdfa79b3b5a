// Products of rows and weights, and sums of products that ranks have parts of.

#pragma once

#include "../core/contract.hpp"
#include "../exchange/sums.hpp"
#include "products.hpp"
#include "rounding.hpp"

namespace {

// What is there and a row's value, times the sigmoid of the row's logit if the operation has such factors.
template <class T>
inline Floats added_to(const typename T::Element* there, Floats value, Mask lanes, const Operation& op, int64_t row) {
    Floats before = T::load(there, lanes);
    return op.factors ? fmadd(value, sigmoid_ps(filled(op.factors[row])), before) : value + before;
}

// out [tokens, n] = in [tokens, k] x weights (+ bias), activated, times a factor (+ out: see added_to). b: parts of the inputs, 0 for
// one; c: the activation, extra: its numbers; number: the factor, 0 for none; width: numbers of a row of out, of which these are part.
// added: see Operation. groups: n outputs for each, with k inputs step_in numbers behind those of the one before, stored step_out numbers behind; n is a
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
    const Adapters<T> adapters(op, step);
    auto products = products_into<In, Columns>([&](const Columns& to, int64_t row, Floats one, Floats two) {
        if (bias) one = one + load(bias + to.column, to.low), two = two + load(bias + to.next, to.high);
        if (adapters) adapters.add(one, two, to.first + row, to.column / LANES, to.column / LANES + 1);
        put(line(to, row), one, to.low, to.column, to.first + row);
        put(line(to, row), two, to.high, to.next, to.first + row);
    }, place, std::max<int64_t>(1, op.b), in_width);
    Weights weights(op, op.k / In::PACK, In::PACK);
    auto panels_of = [&](int64_t pair) { return Panels{weights.panel(2 * pair), weights.panel(2 * pair + 1)}; };
    share_out_panels<In>(work, op.k, rows, pairs, CACHED_BYTES / (8 * panel), [&](Share now, Share next, int64_t begin, int64_t some) {
        uint32_t* room = room_for<In>(weights, op.k, some, now.size());
        products.want(weights, {2 * next.begin}, 2 * next.size(), warm_tiles<In>(op.k, some) * now.size());
        row_blocks<In>(op.k, some, [&](int64_t behind, int64_t count) {
            const int64_t first = begin + behind;
            for (int64_t pair = now.begin; pair < now.end; ++pair) {
                int64_t column = 2 * pair * LANES, then = behind_in(pair, now, next);
                auto* inputs = static_cast<const typename In::Element*>(op.in) + first * pitch_of<In>(in_width) + column / op.n * op.step_in;
                products.multiply(inputs, op.k, count, panels_of(pair), panels_of(then), behind == 0,
                                  {first, place_of(column), place_of(column + LANES), lanes_of(int(outputs - column)),
                                   lanes_of(int(std::max<int64_t>(0, outputs - column - LANES)))},
                                  room == nullptr ? nullptr : room + (pair - now.begin) * 2 * panel);
            }
        });
    });
    products.finish();
}

// out [tokens, n] = silu(in x gate) * (in x up); gate's panels come first, then up's. a: the activation, SILU if 0; more: bias [2, n]; added: see Operation;
// number: a factor on the gate before the activation, 0 for none
template <class T, class In = T>
void gated(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    int64_t rows = rows_of(op, step);
    if (rows == 0) return;
    int64_t words = op.k / In::PACK * LANES, panels = (op.n + LANES - 1) / LANES;
    auto products = gated_products<T, In>(op.n, op.a, nullptr, float(op.number));
    auto* bias = static_cast<const float*>(op.more);
    const Adapters<T> adapters(op, step);
    Weights weights(op, op.k / In::PACK, In::PACK);
    auto panels_of = [&](int64_t panel) { return Panels{weights.panel(panel), weights.panel(panels + panel)}; };
    share_out_panels<In>(work, op.k, rows, panels, CACHED_BYTES / (8 * words), [&](Share now, Share next, int64_t begin, int64_t some) {
        uint32_t* room = room_for<In>(weights, op.k, some, now.size());
        products.want(weights, {next.begin, panels + next.begin}, next.size(), warm_tiles<In>(op.k, some) * now.size());
        row_blocks<In>(op.k, some, [&](int64_t behind, int64_t count) {
            const int64_t first = begin + behind;
            for (int64_t panel = now.begin; panel < now.end; ++panel) {
                int64_t column = panel * LANES, then = behind_in(panel, now, next);
                products.multiply(static_cast<const typename In::Element*>(op.in) + first * pitch_of<In>(op.k), op.k, count, panels_of(panel),
                                  panels_of(then), behind == 0,
                                  {static_cast<E*>(op.out) + first * pitch_of<T>(op.n) + column, lanes_of(int(op.n - column)),
                                   bias ? bias + column : nullptr, bias ? bias + op.n + column : nullptr,
                                   adapters ? &adapters : nullptr, first, panel, panels + panel},
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

// LINEAR and GATED with inputs of the kind that the weights multiply.
template <class T>
void linear_of_kind(const Operation& op, const Step& step, Work& work) {
    if (op.flags & ROUNDED) linear<T, Bytes>(op, step, work);
    else op.flags & WIDE ? linear<Float>(op, step, work) : linear<T>(op, step, work);
}
template <class T>
void gated_of_kind(const Operation& op, const Step& step, Work& work) {
    op.flags & ROUNDED ? gated<T, Bytes>(op, step, work) : gated<T>(op, step, work);
}

}  // namespace
