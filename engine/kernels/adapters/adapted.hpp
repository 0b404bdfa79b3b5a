// The first product of low-rank adapters, of all rows that have one. The second one is made where it is added (added.hpp).

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

// Low rows = in [rows, k] x the first matrix of the row's adapter. extra: an AdapterSite; n: most numbers of a low row.
template <class T>
void adapt(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    const bool is_chosen = op.flags & SELECTED;
    auto& site = *static_cast<const AdapterSite*>(op.extra);
    auto* runs = is_chosen ? step.chosen_runs : step.runs;
    auto* order = is_chosen ? step.chosen_order : step.order;
    const int64_t num_runs = is_chosen ? step.num_chosen_runs : step.num_runs, pairs = (op.n + 2 * LANES - 1) / (2 * LANES);
    struct Columns {
        const int64_t* rows;
        int64_t column;
        bool is_pair;
    };
    auto place = [&](const Columns& to, int64_t row) { return low_row<T>(site, to.rows[row]) + to.column; };
    auto put = [](Low<T>* to, Floats value) {
        if constexpr (std::is_same_v<Low<T>, float>) store(to, value);
        else T::store(to, value, lanes_of(LANES));
    };
    work.for_each(num_runs * pairs, [&](int64_t number) {
        const AdapterRun& run = runs[number / pairs];
        const AdapterPart& part = site.parts[run.adapter];
        const int64_t column = number % pairs * 2 * LANES, panel = op.k / T::PACK * LANES;
        if (column >= part.num_low) return;
        const Columns to{order + run.first, column, column + LANES < part.num_low};
        auto products = products_into<T, Columns>([&](const Columns& to, int64_t row, Floats one, Floats two) {
            put(place(to, row), one);
            if (to.is_pair) put(place(to, row) + LANES, two);
        }, place);  // of this run alone: it keeps rows by their address
        const uint32_t* words = part.a + column / LANES * panel;
        const Panels panels{{words}, {to.is_pair ? words + panel : words}};
        products.multiply(gathered(static_cast<const E*>(op.in), pitch_of<T>(op.k), to.rows, run.count), op.k, run.count, panels, panels, true,
                          to, nullptr);
        products.finish();
    });
}

}  // namespace

extern "C" {

int64_t lockstep_adapter_part_bytes() { return sizeof(AdapterPart); }
int64_t lockstep_adapter_panel_bytes() { return sizeof(AdapterPanel); }
int64_t lockstep_adapter_site_bytes() { return sizeof(AdapterSite); }
int64_t lockstep_adapter_run_bytes() { return sizeof(AdapterRun); }
}
