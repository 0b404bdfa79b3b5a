// The first product of low-rank adapters, of all rows that have one. The second one is made where its result is added (added.hpp).

#pragma once

#include "../products/products.hpp"
#include "added.hpp"

namespace {

// Rows of one adapter, one behind the other: where they are, or copied together.
template <class E>
const E* gathered(const E* in, int64_t pitch, const int64_t* rows, int64_t count) {
    if (rows[count - 1] - rows[0] == count - 1) return in + rows[0] * pitch;  // they rise
    static thread_local std::vector<E> room;
    room.resize(size_t((count + TILE) * pitch));
    for (int64_t row = 0; row < count; ++row) std::memcpy(room.data() + row * pitch, in + rows[row] * pitch, size_t(pitch) * sizeof(E));
    return room.data();
}

// Some low rows = in [rows, k] x numbers from `column` on of an adapter's first matrix.
template <class T>
void make_low(const AdapterSite& site, const AdapterPart& part, const typename T::Element* in, int64_t k, const int64_t* rows, int64_t count,
              int64_t column) {
    struct Columns {
        int64_t column;
        bool is_pair;
    };
    auto place = [&](const Columns& to, int64_t row) { return low_row<T>(site, rows[row]) + to.column; };
    auto products = products_into<T, Columns>([&](const Columns& to, int64_t row, Floats one, Floats two) {
        put_low<T>(place(to, row), one);
        if (to.is_pair) put_low<T>(place(to, row) + LANES, two);
    }, place);  // of these rows alone: it keeps them by their address
    const int64_t panel = k / T::PACK * LANES;
    const uint32_t* words = part.a + column / LANES * panel;
    const bool is_pair = column + LANES < part.num_low;
    const Panels panels{{words}, {is_pair ? words + panel : words}};
    products.multiply(gathered(in, pitch_of<T>(k), rows, count), k, count, panels, panels, true, {column, is_pair}, nullptr);
    products.finish();
}

// Low rows = in [rows, k] x the first matrix of the row's adapter. extra: an AdapterSite; n: most numbers of a low row.
template <class T>
void adapt(const Operation& op, const Step& step, Work& work) {
    const bool is_chosen = op.flags & SELECTED;
    auto& site = *static_cast<const AdapterSite*>(op.extra);
    auto* runs = is_chosen ? step.chosen_runs : step.runs;
    auto* order = is_chosen ? step.chosen_order : step.order;
    const int64_t num_runs = is_chosen ? step.num_chosen_runs : step.num_runs, pairs = (op.n + 2 * LANES - 1) / (2 * LANES);
    work.for_each(num_runs * pairs, [&](int64_t number) {
        const AdapterRun& run = runs[number / pairs];
        const AdapterPart& part = site.part(run.adapter, 0);
        const int64_t column = number % pairs * 2 * LANES;
        if (column < part.num_low)
            make_low<T>(site, part, static_cast<const typename T::Element*>(op.in), op.k, order + run.first, run.count, column);
    });
}

// The same of rows that are sorted by expert: more has the first row of each of a experts.
template <class T>
void adapt_experts(const Operation& op, Work& work) {
    constexpr int64_t MOST = 16;  // rows that go together
    auto& site = *static_cast<const AdapterSite*>(op.extra);
    auto* begins = static_cast<const int64_t*>(op.more);
    const int64_t pairs = (op.n + 2 * LANES - 1) / (2 * LANES);
    work.for_each(op.a * pairs, [&](int64_t task) {
        const int64_t expert = task / pairs, column = task % pairs * 2 * LANES;
        int64_t rows[MOST];
        for (int64_t row = begins[expert], count; row < begins[expert + 1]; row += count) {
            const int64_t number = site.numbers[row];
            for (count = 0; count < MOST && row + count < begins[expert + 1] && site.numbers[row + count] == number; ++count)
                rows[count] = row + count;
            const AdapterPart& part = site.part(number, expert);
            if (column < part.num_low)
                make_low<T>(site, part, static_cast<const typename T::Element*>(op.in), op.k, rows, count, column);
        }
    });
}

}  // namespace

extern "C" {

int64_t lockstep_adapter_part_bytes() { return sizeof(AdapterPart); }
int64_t lockstep_adapter_panel_bytes() { return sizeof(AdapterPanel); }
int64_t lockstep_adapter_site_bytes() { return sizeof(AdapterSite); }
int64_t lockstep_tagged_adapters_bytes() { return sizeof(TaggedAdapters); }
int64_t lockstep_adapter_run_bytes() { return sizeof(AdapterRun); }
}
