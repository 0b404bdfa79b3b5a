// Low-rank adapters (Hu et al. 2021, "LoRA"): what those of a step's rows add to the sums of a product.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "../core/contract.hpp"
#include "../core/numbers.hpp"

namespace {

// How an adapter adds to 16 outputs of a product.
struct AdapterPanel {
    int32_t at;     // number in a low row of the first of its inputs; below 0: it adds nothing
    float factor;
};

// The two matrices of an adapter beside a product.
struct AdapterPart {
    const uint32_t *a, *b;       // panels; null: the adapter has none here
    const AdapterPanel* panels;  // of b
    int64_t num_low, rank;       // numbers that a gives, and those of them that are the inputs of a panel of b
};

// A product beside which adapters add something. low: rows of what a gives, `pitch` words apart. numbers: of the adapters of rows that are
// sorted by expert, each of which has parts of its own; null: rows are a step's. here: the experts here, where there are others elsewhere.
struct AdapterSite {
    const AdapterPart* parts;    // by number, of experts one behind the other
    void* low;
    int64_t pitch;
    const int64_t* numbers;
    int64_t experts;             // 1 where rows are not sorted by them
    const int64_t* here;
    const AdapterPart& part(int64_t number, int64_t expert) const { return parts[number * experts + (here == nullptr ? expert : here[expert])]; }
};

// Adapters of spread experts: number i + 1 has tag i, 0 for none.
struct TaggedAdapters {
    const int64_t* tags;
    int64_t count;
    int64_t number_of(int64_t tag) const {
        if (tag == 0) return 0;
        for (int64_t number = 0; number < count; ++number)
            if (tags[number] == tag) return number + 1;
        std::fprintf(stderr, "rows of another instance have an adapter that is not in memory here\n");
        std::abort();  // else the answer would lack it; the others recover, as from any death
    }
};

// What a low row consists of: what b multiplies.
template <class T>
using Low = std::conditional_t<WIDENS_INPUTS, float, typename T::Element>;

template <class T>
Low<T>* low_row(const AdapterSite& site, int64_t row) {
    return reinterpret_cast<Low<T>*>(static_cast<uint32_t*>(site.low) + row * site.pitch);
}

template <class T>
void put_low(Low<T>* to, Floats value) {
    if constexpr (std::is_same_v<Low<T>, float>) store(to, value);
    else T::store(to, value, lanes_of(LANES));
}

// Adapters of an operation's rows. They add to sums behind the bias: a row's own adapter alone decides what, and in which order.
template <class T>
class Adapters {
    const AdapterSite* site;
    const int64_t* numbers;

    static void multiply_word(Floats& sum, const uint32_t* words, const Low<T>* low, int64_t step) {
        const Words line = load_words(words + step * LANES);
#if LOCKSTEP_AVX512
        sum = T::madd(sum, line, filled_words(reinterpret_cast<const int*>(low)[step]));
#else
        sum = T::madd(sum, T::template of<0>(line), filled(low[T::PARTS * step]));
        if constexpr (T::PARTS == 2) sum = T::madd(sum, T::template of<1>(line), filled(low[T::PARTS * step + 1]));
#endif
    }
    // What a panel gives: its even and odd words, added up apart. STEPS: words, or 0 for `steps`.
    template <int64_t STEPS>
    static void multiply(Floats (&sum)[2], const uint32_t* words, const Low<T>* low, int64_t steps) {
        sum[0] = sum[1] = filled(0.f);
        if (STEPS != 0) steps = STEPS;
#pragma GCC unroll 16
        for (int64_t step = 0; step < steps; step += 2) multiply_word(sum[0], words, low, step), multiply_word(sum[1], words, low, step + 1);
    }
    template <int64_t STEPS>
    [[gnu::noinline]] void add_all(Floats& one, Floats& two, const AdapterPart& part, int64_t row, int64_t first, int64_t second, int64_t steps) const {
        const AdapterPanel &of_one = part.panels[first], &of_two = part.panels[second];
        const Low<T>* low = low_row<T>(*site, row);
        Floats sum[2];
        if (of_one.at >= 0) {
            multiply<STEPS>(sum, part.b + first * steps * LANES, low + of_one.at, steps);
            one = fmadd(sum[0] + sum[1], filled(of_one.factor), one);
        }
        if (of_two.at >= 0) {
            multiply<STEPS>(sum, part.b + second * steps * LANES, low + of_two.at, steps);
            two = fmadd(sum[0] + sum[1], filled(of_two.factor), two);
        }
    }

    // Adds to a row's sums of two panels. Those behind them are asked for, as they are needed behind other products' sums.
    [[gnu::noinline]] void add_own(Floats& one, Floats& two, int64_t row, int64_t first, int64_t second, int64_t expert) const {
        const AdapterPart& part = site->part(numbers[row], expert);
        if (part.b == nullptr) return;
        constexpr int64_t FEW = LANES / T::PACK;  // words of the least rank there is
        const int64_t steps = part.rank / T::PACK;
        if (steps == FEW) add_all<FEW>(one, two, part, row, first, second, FEW);
        else add_all<0>(one, two, part, row, first, second, steps);
        if (row > 0 && numbers[row] == numbers[row - 1]) return;
        const int64_t bytes = steps * LANES * 4, behind = second == first + 1 ? 2 : 1;
        for (const int64_t panel : {first + behind, second + behind})
            for (int64_t line = 0; line < bytes; line += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(part.b) + panel * bytes + line, 0, 2);
    }

   public:
    Adapters(const Operation& op, const Step& step)
        : site(static_cast<const AdapterSite*>(op.added)), numbers(op.flags & SELECTED ? step.chosen_adapters : step.adapters) {}
    // Of rows that are sorted by expert.
    explicit Adapters(const Operation& op)
        : site(static_cast<const AdapterSite*>(op.added)), numbers(site == nullptr ? nullptr : site->numbers) {}
    explicit operator bool() const { return __builtin_expect(site != nullptr, 0); }

    // Makes a row's numbers that b multiplies from the vector of its token, one of those that a has [tokens, rank]. False if the row's
    // adapter has none.
    bool take(int64_t row, int64_t token) const {
        const AdapterPart& part = site->part(numbers[row], 0);
        if (part.b == nullptr) return false;
        auto* from = reinterpret_cast<const typename T::Element*>(part.a) + token * part.rank;
        for (int64_t i = 0; i < part.rank; i += LANES) put_low<T>(low_row<T>(*site, row) + i, T::load(from + i, lanes_of(LANES)));
        return true;
    }
    // Adds to a row's sums of two panels, which keep their registers where there is nothing to add.
    void add(Floats& one, Floats& two, int64_t row, int64_t first, int64_t second, int64_t expert = 0) const {
        Floats sums[] = {one, two};
        add_own(sums[0], sums[1], row, first, second, expert);
        one = sums[0], two = sums[1];
    }
};

}  // namespace
