// The next token of a row, from its logits: the most likely one, or one drawn among those that top-k, top-p and min-p leave.
//
// What is drawn is what engine/sampler.py draws, but for rounding: an exponential race whose clocks are a function of (seed, position,
// token). Rows are computed one by one, each in one fixed order: neither the batch nor the number of threads changes a token.

#pragma once

#include "candidates.hpp"
#include "experts.hpp"

namespace {

// What a tensor-parallel rank finds for a row.
struct Best {
    int64_t token;
    double logit;
};

// How a row's token is chosen.
struct Draw {
    uint64_t seed;
    int64_t top_k;      // 0: all
    double top_p;
    float temperature;  // 0: the most likely
    float min_p;
};

// Where a row [n] is greatest: the first such place; the first of no number (nan), if there is one.
int64_t place_of_best(const float* from, int64_t n) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    __m512i lane = numbers_to_15(), place = lane;
    __mmask16 nan = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 lanes = lanes_of(int(n - i));
        __m512 x = _mm512_mask_loadu_ps(most, lanes, from + i);
        nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        __mmask16 greater = _mm512_cmp_ps_mask(x, most, _CMP_GT_OQ);
        most = _mm512_mask_mov_ps(most, greater, x);
        place = _mm512_mask_mov_epi32(place, greater, _mm512_add_epi32(lane, _mm512_set1_epi32(int(i))));
    }
    if (nan != 0) return std::find_if(from, from + n, [](float x) { return std::isnan(x); }) - from;
    __mmask16 equal = _mm512_cmp_ps_mask(most, _mm512_set1_ps(_mm512_reduce_max_ps(most)), _CMP_EQ_OQ);
    return _mm512_mask_reduce_min_epi32(equal, place);
}

// -log(1 - u) for 0 < u < 1, to the last digits also near 0.
__m512 clock_ps(__m512 u) {
    const __m512 one = _mm512_set1_ps(1.f);
    __m512 w = _mm512_sub_ps(one, u), lost = _mm512_sub_ps(_mm512_sub_ps(one, w), u);  // 1 - u = w + lost
    __m512i bits = _mm512_castps_si512(w);  // w = 2^n * m, 0.75 <= m < 1.5
    __m512i n = _mm512_srai_epi32(_mm512_sub_epi32(bits, _mm512_castps_si512(_mm512_set1_ps(0.75f))), 23);
    __m512 m = _mm512_castsi512_ps(_mm512_sub_epi32(bits, _mm512_slli_epi32(n, 23))), f = _mm512_sub_ps(m, one);
    __m512 s = _mm512_div_ps(f, _mm512_add_ps(m, one)), z = _mm512_mul_ps(s, s);  // log m = 2 artanh s
    __m512 series = _mm512_set1_ps(2.f / 9);
    for (float c : {2.f / 7, 2.f / 5, 2.f / 3}) series = _mm512_fmadd_ps(series, z, _mm512_set1_ps(c));
    __m512 log = _mm512_fmadd_ps(_mm512_mul_ps(series, z), s, _mm512_add_ps(s, s));
    log = _mm512_fmadd_ps(_mm512_cvtepi32_ps(n), _mm512_set1_ps(0.693147182f), log);
    return _mm512_sub_ps(_mm512_setzero_ps(), _mm512_add_ps(log, lost));
}

// Chance of a row: a number in (0, 1) for each token.
class Chance {
    __m512i low, high;

    static uint64_t split_mix(uint64_t state) {  // SplitMix64 (Steele, Lea, Flood 2014)
        state += 0x9E3779B97F4A7C15;
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
        return state ^ (state >> 31);
    }
    static __m512i mix(__m512i bits) {  // the 32-bit finaliser of MurmurHash3 (Appleby 2011)
        bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
        bits = _mm512_mullo_epi32(bits, _mm512_set1_epi32(int(0x85EBCA6B)));
        bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 13));
        bits = _mm512_mullo_epi32(bits, _mm512_set1_epi32(int(0xC2B2AE35)));
        return _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
    }

   public:
    Chance(uint64_t seed, int64_t position) {
        uint64_t key = split_mix(split_mix(seed) ^ uint64_t(position));
        low = _mm512_set1_epi32(int(uint32_t(key)));
        high = _mm512_set1_epi32(int(uint32_t(key >> 32)));
    }
    __m512 of(__m512i tokens) const {
        __m512i hashed = _mm512_add_epi32(_mm512_mullo_epi32(tokens, _mm512_set1_epi32(int(0x9E3779B9))), low);
        hashed = _mm512_and_si512(mix(_mm512_add_epi32(mix(hashed), high)), _mm512_set1_epi32(0x7FFFFFFF));
        __m512 u = _mm512_mul_ps(_mm512_add_ps(_mm512_cvtepi32_ps(hashed), _mm512_set1_ps(0.5f)), _mm512_set1_ps(0x1p-31f));
        return _mm512_min_ps(u, _mm512_set1_ps(1.f - 0x1p-24f));
    }
};

// The race of the tokens of a row, given 16 at a time with how far each is from the most likely one, in nats: rising tokens. Those
// which cannot win any more, as a clock shows u or more, are not computed to the end.
class Race {
    static constexpr float FASTEST = 32.f;  // log2 of 1 / u
    const Chance chance;
    float fastest = 0.f, bar = -INFINITY;   // the speed of the first one, and its log2 with some room for rounding

   public:
    int64_t winner;

    Race(const Draw& how, int64_t position, int64_t best) : chance(how.seed, position), winner(best) {}
    void run(__m512 away, __m512i tokens) {
        __m512 log2 = _mm512_mul_ps(away, _mm512_set1_ps(-1.44269504f));
        if (_mm512_cmp_ps_mask(log2, _mm512_set1_ps(bar - FASTEST), _CMP_GE_OQ) == 0) return;
        __m512 u = chance.of(tokens);
        if (_mm512_cmp_ps_mask(_mm512_sub_ps(log2, _mm512_getexp_ps(u)), _mm512_set1_ps(bar), _CMP_GE_OQ) == 0) return;
        __m512 speed = _mm512_div_ps(chance_ps(_mm512_sub_ps(_mm512_setzero_ps(), away)), clock_ps(u));
        float most = _mm512_reduce_max_ps(speed);
        if (!(most > fastest)) return;
        __mmask16 first = _mm512_cmp_ps_mask(speed, _mm512_set1_ps(most), _CMP_EQ_OQ);
        alignas(64) int32_t numbers[LANES];
        _mm512_store_si512(numbers, tokens);
        winner = numbers[__builtin_ctz(first)];
        fastest = most, bar = std::log2(most) - 0.01f;
    }
};

// The token of a row of logits [n] that is to stand at a position.
int64_t drawn(const float* logits, int64_t n, const Draw& how, int64_t position) {
    int64_t best = place_of_best(logits, n);
    float most = logits[best];
    if (how.temperature <= 0 || !std::isfinite(most)) return best;
    const float colder = std::min(1 / how.temperature, std::numeric_limits<float>::max());
    const float limit = how.min_p > 0 ? -std::log(how.min_p) : std::numeric_limits<float>::max();
    auto at = [&](int64_t i) {
        __m512 x = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes_of(int(n - i)), logits + i);
        __m512 away = _mm512_mul_ps(_mm512_sub_ps(_mm512_set1_ps(most), x), _mm512_set1_ps(colder));
        return _mm512_mask_mov_ps(away, _mm512_cmp_ps_mask(away, _mm512_set1_ps(limit), _CMP_GT_OQ), _mm512_set1_ps(INFINITY));
    };
    Race race(how, position, best);
    if (how.top_k > 0 || how.top_p < 1) {
        static thread_local Candidates candidates;
        candidates.choose(n, how.top_k, how.top_p, at);
        candidates.for_each([&](__m512 away, __m512i tokens) { race.run(away, tokens); });
    } else {
        for (int64_t i = 0; i < n; i += LANES) race.run(at(i), _mm512_add_epi32(numbers_to_15(), _mm512_set1_epi32(int(i))));
    }
    return race.winner;
}

// out [selected] int64: the token of each row of in [selected, n], float. With AS_FLOAT out is [selected] of Best, and
// column 0 is token a.
void choose(const Operation& op, const Step& step, Work& work) {
    if (!step.choose) return;
    auto* draws = static_cast<const Draw*>(step.draws);
    work.for_each(step.selected, [&](int64_t row) {
        const float* from = static_cast<const float*>(op.in) + row * op.n;
        if (draws != nullptr) {
            static_cast<int64_t*>(op.out)[row] = drawn(from, op.n, draws[row], step.positions[step.chosen[row]] + 1);
            return;
        }
        int64_t found = place_of_best(from, op.n);
        if (op.flags & AS_FLOAT) static_cast<Best*>(op.out)[row] = {op.a + found, double(from[found])};
        else static_cast<int64_t*>(op.out)[row] = found;
    });
}

// out [selected] int64: the token that CHOOSE would find in the logits of all ranks, of which each one's Best [selected] is at byte
// a of its arena. extra: an exchange
void best_of_all(const Operation& op, const Step& step, Work& work) {
    if (!step.choose) return;
    auto& exchange = *static_cast<const Exchange*>(op.extra);
    work.for_each(step.selected, [&](int64_t row) {
        auto of = [&](int64_t rank) { return reinterpret_cast<const Best*>(exchange.arenas[rank] + op.a)[row]; };
        Best found = of(0);
        for (int64_t rank = 1; rank < exchange.size && !std::isnan(found.logit); ++rank)
            if (Best other = of(rank); other.logit > found.logit || std::isnan(other.logit)) found = other;
        static_cast<int64_t*>(op.out)[row] = found.token;
    });
}

}  // namespace
