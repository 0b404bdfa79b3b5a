// The most likely tokens of a row of logits, without sorting it.

#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "../core/numbers.hpp"

namespace {

// e^x for x <= 0, to the last digits of a float; 0 from -104 on. Inlined by force: two registers are handed over in memory.
[[gnu::always_inline]] inline Floats chance_ps(Floats x) {
    x = maximum(x, filled(-104.f));
    Floats n = to_integers(x * filled(1.44269504f));
    Floats f = fnmadd(n, filled(0.693147182f), x);  // ln 2, then what a float leaves out of it
    f = fmadd(n, filled(1.90465432e-9f), f);
    Floats p = filled(1.f / 5040);
    for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) p = fmadd(p, f, filled(c));
    return times_power_of_2(p, n);
}

// Tokens of a row in rising order, of those that may win: the ones that top-k and top-p leave.
class Candidates {
    static constexpr float NEAR = 16.f;  // nats: whoever is further away is rarely needed
    static constexpr float FURTHEST = std::numeric_limits<float>::max();
    std::vector<float> away;      // from the most likely one
    std::vector<float> weights;   // chances, relative to that one's
    std::vector<int32_t> tokens;

    Words keys(int64_t i) const { return load_words(away.data() + i); }  // the order of floats >= 0 is that of their bits
    void put(Mask lanes, Floats far, Floats chances, Words numbers) {
        store_only(away.data() + count, far, lanes);
        store_only(weights.data() + count, chances, lanes);
        store_only(tokens.data() + count, numbers, lanes);
        count += __builtin_popcount(lanes);
    }

    // Keeps those, the most likely first, before which less than `goal` has come of what `weight` gives each, in a tie of
    // lower tokens first. The borderline is found digit by digit (a radix select): nothing is sorted.
    template <class Weight>
    void keep(double goal, Weight weight) {
        constexpr int SHIFTS[] = {20, 10, 0};
        double sums[1 << 12], before = 0;
        uint32_t border = 0;
        for (int level = 0; level < 3; ++level) {
            int shift = SHIFTS[level], above = level == 0 ? 31 : SHIFTS[level - 1];  // a float >= 0 has 31 bits
            uint32_t digits = (1u << (above - shift)) - 1, last = 0;
            std::fill_n(sums, size_t(digits) + 1, 0.0);
            for (int64_t i = 0; i < count; i += LANES) {
                Words bits = keys(i), higher = shift_right(bits, above);
                Mask here = lanes_of(int(count - i));
                here = Mask(here & is_equal(higher, filled_words(int(border >> above))));
                if (here == 0) continue;
                alignas(64) uint32_t digit[LANES];
                store(digit, and_words(shift_right(bits, shift), filled_words(int(digits))));
                for (unsigned left = here; left != 0; left &= left - 1) {
                    int lane = __builtin_ctz(left);
                    sums[digit[lane]] += weight(i + lane);
                    last = std::max(last, digit[lane]);
                }
            }
            uint32_t digit = 0;
            for (; digit < last && before + sums[digit] < goal; ++digit) before += sums[digit];
            border |= digit << shift;
        }
        const int64_t all = count;
        const Words at_border = filled_words(int(border));
        count = 0;
        for (int64_t i = 0; i < all; i += LANES) {
            Mask lanes = lanes_of(int(all - i));
            Mask kept = Mask(lanes & is_less(keys(i), at_border));
            for (unsigned tied = Mask(lanes & is_equal(keys(i), at_border)); tied != 0; tied &= tied - 1) {
                if (before >= goal) break;
                int lane = __builtin_ctz(tied);
                kept |= Mask(1 << lane);
                before += weight(i + lane);
            }
            put(kept, load(away.data() + i), load(weights.data() + i), load_words(tokens.data() + i));
        }
    }

    // A distance within which there are `wanted` tokens at least: as far as so many of the nearest ones, each of other
    // tokens, are.
    template <class At>
    static float reach(int64_t n, int64_t wanted, At at) {
        constexpr int GROUPS = 16;
        if (wanted > GROUPS * LANES) return NEAR;
        Floats nearest[GROUPS];
        std::fill_n(nearest, GROUPS, filled(INFINITY));
        for (int64_t i = 0, group = 0; i < n; i += LANES, group = (group + 1) % GROUPS)
            nearest[group] = minimum(nearest[group], at(i));
        auto* first = reinterpret_cast<float*>(nearest);
        std::nth_element(first, first + wanted - 1, first + GROUPS * LANES);
        return std::min(first[wanted - 1], FURTHEST);
    }

    struct Rest {
        bool is_any;    // further tokens
        double weight;  // of all those
    };

    // Those within a distance.
    template <class At>
    Rest collect(int64_t n, float limit, At at) {
        if (int64_t(tokens.size()) < n + LANES)
            away.resize(size_t(n + LANES)), weights.resize(size_t(n + LANES)), tokens.resize(size_t(n + LANES));
        Doubles others {};
        count = 0;
        bool is_any = false;
        for (int64_t i = 0; i < n; i += LANES) {
            Floats far = at(i), chances = chance_ps(filled(0.f) - far);
            Mask near = is_at_most(far, filled(limit));
            Mask rest = is_less(far, filled(INFINITY)) & ~near;
            if (near != 0) put(near, far, chances, add_words(numbers_to_15(), filled_words(int(i))));
            if (rest != 0) is_any = true, others = add(others, only(rest, chances));
        }
        return {is_any, sum_of(others)};
    }

    double weight() const {
        Doubles total {};
        for (int64_t i = 0; i < count; i += LANES)
            total = add(total, load(weights.data() + i, lanes_of(int(count - i))));
        return sum_of(total);
    }

   public:
    int64_t count = 0;

    // at(i): how far the tokens from number i on are away, infinite where they may not win.
    template <class At>
    void choose(int64_t n, int64_t top_k, double top_p, At at) {
        for (float limit : {top_k > 0 ? reach(n, top_k, at) : NEAR, FURTHEST}) {
            Rest rest = collect(n, limit, at);
            double here = weight(), total = here + rest.weight;
            if (rest.is_any && (top_k > 0 ? count < top_k : here < top_p * total)) continue;
            if (top_k > 0 && top_k < count) keep(double(top_k), [](int64_t) { return 1.0; });
            if (top_k > 0) total = weight();
            if (top_p < 1) keep(top_p * total, [&](int64_t i) { return double(weights[size_t(i)]); });
            return;
        }
    }

    // body(away, tokens) of 16 of them at a time.
    template <class Body>
    void for_each(Body body) const {
        for (int64_t i = 0; i < count; i += LANES) {
            Mask lanes = lanes_of(int(count - i));
            body(load(away.data() + i, lanes, filled(INFINITY)),
                 load_words(tokens.data() + i, lanes));
        }
    }

    // Their numbers, the most likely first.
    std::vector<int32_t> sorted() const {
        std::vector<int64_t> order(static_cast<size_t>(count));
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](int64_t one, int64_t two) {
            return std::make_pair(away[size_t(one)], one) < std::make_pair(away[size_t(two)], two);
        });
        std::vector<int32_t> found;
        for (int64_t i : order) found.push_back(tokens[size_t(i)]);
        return found;
    }
};

}  // namespace
