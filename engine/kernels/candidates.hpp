// The most likely tokens of a row of logits, without sorting it.

#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "numbers.hpp"

namespace {

__m512i numbers_to_15() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// e^x for x <= 0, to the last digits of a float; 0 from -104 on.
__m512 chance_ps(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147182f), x);  // ln 2, then what a float leaves out of it
    f = _mm512_fmadd_ps(n, _mm512_set1_ps(1.90465432e-9f), f);
    __m512 p = _mm512_set1_ps(1.f / 5040);
    for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    return _mm512_scalef_ps(p, n);
}

__m512d plus(__m512d total, __m512 x) {
    total = _mm512_add_pd(total, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
    return _mm512_add_pd(total, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
}

// Tokens of a row in rising order, of those that may win: the ones that top-k and top-p leave.
class Candidates {
    static constexpr float NEAR = 16.f;  // nats: whoever is further away is rarely needed
    static constexpr float FURTHEST = std::numeric_limits<float>::max();
    std::vector<float> away;      // from the most likely one
    std::vector<float> weights;   // chances, relative to that one's
    std::vector<int32_t> tokens;

    __m512i keys(int64_t i) const { return _mm512_loadu_si512(away.data() + i); }  // the order of floats >= 0 is that of their bits
    void put(__mmask16 lanes, __m512 far, __m512 chances, __m512i numbers) {
        _mm512_storeu_ps(away.data() + count, _mm512_maskz_compress_ps(lanes, far));
        _mm512_storeu_ps(weights.data() + count, _mm512_maskz_compress_ps(lanes, chances));
        _mm512_storeu_si512(tokens.data() + count, _mm512_maskz_compress_epi32(lanes, numbers));
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
                __m512i bits = keys(i), higher = _mm512_srl_epi32(bits, _mm_cvtsi32_si128(above));
                __mmask16 here = lanes_of(int(count - i));
                here = _mm512_mask_cmpeq_epi32_mask(here, higher, _mm512_set1_epi32(int(border >> above)));
                if (here == 0) continue;
                alignas(64) uint32_t digit[LANES];
                _mm512_store_si512(digit, _mm512_and_si512(_mm512_srl_epi32(bits, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(int(digits))));
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
        const __m512i at_border = _mm512_set1_epi32(int(border));
        count = 0;
        for (int64_t i = 0; i < all; i += LANES) {
            __mmask16 lanes = lanes_of(int(all - i));
            __mmask16 kept = _mm512_mask_cmplt_epi32_mask(lanes, keys(i), at_border);
            for (unsigned tied = _mm512_mask_cmpeq_epi32_mask(lanes, keys(i), at_border); tied != 0; tied &= tied - 1) {
                if (before >= goal) break;
                int lane = __builtin_ctz(tied);
                kept |= __mmask16(1 << lane);
                before += weight(i + lane);
            }
            put(kept, _mm512_loadu_ps(away.data() + i), _mm512_loadu_ps(weights.data() + i), _mm512_loadu_si512(tokens.data() + i));
        }
    }

    // A distance within which there are `wanted` tokens at least: as far as so many of the nearest ones, each of other
    // tokens, are.
    template <class At>
    static float reach(int64_t n, int64_t wanted, At at) {
        constexpr int GROUPS = 16;
        if (wanted > GROUPS * LANES) return NEAR;
        __m512 nearest[GROUPS];
        std::fill_n(nearest, GROUPS, _mm512_set1_ps(INFINITY));
        for (int64_t i = 0, group = 0; i < n; i += LANES, group = (group + 1) % GROUPS)
            nearest[group] = _mm512_min_ps(nearest[group], at(i));
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
        __m512d others = _mm512_setzero_pd();
        count = 0;
        bool is_any = false;
        for (int64_t i = 0; i < n; i += LANES) {
            __m512 far = at(i), chances = chance_ps(_mm512_sub_ps(_mm512_setzero_ps(), far));
            __mmask16 near = _mm512_cmp_ps_mask(far, _mm512_set1_ps(limit), _CMP_LE_OQ);
            __mmask16 rest = _mm512_cmp_ps_mask(far, _mm512_set1_ps(INFINITY), _CMP_LT_OQ) & ~near;
            if (near != 0) put(near, far, chances, _mm512_add_epi32(numbers_to_15(), _mm512_set1_epi32(int(i))));
            if (rest != 0) is_any = true, others = plus(others, _mm512_maskz_mov_ps(rest, chances));
        }
        return {is_any, _mm512_reduce_add_pd(others)};
    }

    double weight() const {
        __m512d total = _mm512_setzero_pd();
        for (int64_t i = 0; i < count; i += LANES)
            total = plus(total, _mm512_maskz_loadu_ps(lanes_of(int(count - i)), weights.data() + i));
        return _mm512_reduce_add_pd(total);
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
            __mmask16 lanes = lanes_of(int(count - i));
            body(_mm512_mask_loadu_ps(_mm512_set1_ps(INFINITY), lanes, away.data() + i),
                 _mm512_maskz_loadu_epi32(lanes, tokens.data() + i));
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
