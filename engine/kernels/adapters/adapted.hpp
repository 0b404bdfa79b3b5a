// Low-rank adapters: what those of a step's rows add to a product (Hu et al. 2021, "LoRA").

#pragma once

#include "../core/contract.hpp"
#include "../products/products.hpp"

namespace {

// One of the two matrices of an adapter beside a product.
struct AdapterPart {
    const uint32_t* weights;  // panels; null: the adapter has none here
    int64_t k, n;             // inputs, and outputs in whole pairs of panels
    double factor;
};

constexpr float NOTHING = -0.f;  // what changes no sum, not even one of -0

// out [rows, n] = in [rows, k of the adapter] x the weights of the row's adapter, times its factor. Rows without one are left as they are;
// with AS_FLOAT out is float [rows, n], and they and those whose adapter has no weights here get NOTHING. extra: an AdapterPart for each
// number; width: numbers of a row of in.
template <class T>
void adapt(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    const bool is_chosen = op.flags & SELECTED, as_float = op.flags & AS_FLOAT;
    auto* runs = is_chosen ? step.chosen_runs : step.runs;
    const int64_t num_runs = is_chosen ? step.num_chosen_runs : step.num_runs, pairs = (op.n + 2 * LANES - 1) / (2 * LANES);
    auto* parts = static_cast<const AdapterPart*>(op.extra);
    const int64_t size = as_float ? sizeof(float) : sizeof(E), pitch = as_float ? op.n : pitch_of<T>(op.n), from = pitch_of<T>(op.width);
    struct Columns {
        int64_t first, column;  // of rows and columns
        Mask low, high;
        Floats factor;
    };
    auto place = [&](const Columns& to, int64_t row) { return static_cast<char*>(op.out) + ((to.first + row) * pitch + to.column) * size; };
    auto put = [&](char* out, Floats value, Mask lanes) {
        if (as_float) store(reinterpret_cast<float*>(out), value, lanes);
        else T::store(reinterpret_cast<E*>(out), value, lanes);
    };
    auto products = products_into<T, Columns>([&](const Columns& to, int64_t row, Floats one, Floats two) {
        put(place(to, row), one * to.factor, to.low);
        put(place(to, row) + LANES * size, two * to.factor, to.high);
    }, place, 1, op.width);
    work.for_each(num_runs * pairs, [&](int64_t number) {
        const AdapterRun& run = runs[number / pairs];
        const AdapterPart& part = parts[run.adapter];
        const int64_t column = number % pairs * 2 * LANES;
        const Columns to{run.first, column, lanes_of(int(op.n - column)), lanes_of(int(std::max<int64_t>(0, op.n - column - LANES))),
                         filled(float(part.factor))};
        if (part.weights == nullptr || column >= part.n) {
            if (as_float)
                for (int64_t row = 0; row < run.count; ++row)
                    put(place(to, row), filled(NOTHING), to.low), put(place(to, row) + LANES * size, filled(NOTHING), to.high);
            return;
        }
        const uint32_t* words = part.weights + column * (part.k / T::PACK);
        const Panels panels{{words}, {words + LANES * (part.k / T::PACK)}};
        products.multiply(static_cast<const E*>(op.in) + run.first * from, part.k, run.count, panels, panels, true, to, nullptr);
    });
    products.finish();
}

}  // namespace

extern "C" {

int64_t lockstep_adapter_part_bytes() { return sizeof(AdapterPart); }
int64_t lockstep_adapter_run_bytes() { return sizeof(AdapterRun); }
}
