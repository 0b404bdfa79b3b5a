// The next token of a row, from its logits: the most likely one, or one drawn among those that top-k, top-p and min-p leave.
//
// What is drawn is what engine/compute/sampler.py draws, but for rounding: an exponential race whose clocks are a function of (seed, position,
// token). Rows are computed one by one, each in one fixed order: neither the batch nor the number of threads changes a token.

#pragma once

#include "candidates.hpp"
#include "../core/contract.hpp"
#include "../exchange/linked.hpp"

namespace {

// What a tensor-parallel rank finds for a row. The greatest score wins: the logit, or the log of the speed in the race.
struct Best {
    int64_t token;
    double score;
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
    Floats most = filled(-INFINITY);
    Words lane = numbers_to_15(), place = lane;
    Mask nan = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        Mask lanes = lanes_of(int(n - i));
        Floats x = load(from + i, lanes, most);
        nan |= is_nan(x);
        Mask greater = is_greater(x, most);
        most = picked(greater, x, most);
        place = picked(greater, add_words(lane, filled_words(int(i))), place);
    }
    if (nan != 0) return std::find_if(from, from + n, [](float x) { return std::isnan(x); }) - from;
    Mask equal = is_equal(most, filled(greatest_of(most)));
    return least_of(place, equal);
}

// -log(1 - u) for 0 < u < 1, to the last digits also near 0.
Floats clock_ps(Floats u) {
    const Floats one = filled(1.f);
    Floats w = one - u, lost = one - w - u;  // 1 - u = w + lost
    Words bits = as_words(w);  // w = 2^n * m, 0.75 <= m < 1.5
    Words n = shift_right_signed<23>(subtract_words(bits, as_words(filled(0.75f))));
    Floats m = as_floats(subtract_words(bits, shift_left<23>(n))), f = m - one;
    Floats s = f / (m + one), z = s * s;  // log m = 2 artanh s
    Floats series = filled(2.f / 9);
    for (float c : {2.f / 7, 2.f / 5, 2.f / 3}) series = fmadd(series, z, filled(c));
    Floats log = fmadd(series * z, s, s + s);
    log = fmadd(converted(n), filled(0.693147182f), log);
    return filled(0.f) - (log + lost);
}

// Chance of a row: a number in (0, 1) for each token.
class Chance {
    Words low, high;

    static uint64_t split_mix(uint64_t state) {  // SplitMix64 (Steele, Lea, Flood 2014)
        state += 0x9E3779B97F4A7C15;
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
        return state ^ (state >> 31);
    }
    static Words mix(Words bits) {  // the 32-bit finaliser of MurmurHash3 (Appleby 2011)
        bits = xor_words(bits, shift_right<16>(bits));
        bits = multiply_words(bits, filled_words(int(0x85EBCA6B)));
        bits = xor_words(bits, shift_right<13>(bits));
        bits = multiply_words(bits, filled_words(int(0xC2B2AE35)));
        return xor_words(bits, shift_right<16>(bits));
    }

   public:
    Chance(uint64_t seed, int64_t position) {
        uint64_t key = split_mix(split_mix(seed) ^ uint64_t(position));
        low = filled_words(int(uint32_t(key)));
        high = filled_words(int(uint32_t(key >> 32)));
    }
    Floats of(Words tokens) const {
        Words hashed = add_words(multiply_words(tokens, filled_words(int(0x9E3779B9))), low);
        hashed = and_words(mix(add_words(mix(hashed), high)), filled_words(0x7FFFFFFF));
        Floats u = (converted(hashed) + filled(0.5f)) * filled(0x1p-31f);
        return minimum(u, filled(1.f - 0x1p-24f));
    }
};

// The race of the tokens of a row, given 16 at a time with how far each is from the most likely one, in nats: rising tokens. Those
// which cannot win any more, as a clock shows u or more, are not computed to the end. Among those that are nearly the fastest a score
// decides, which depends on a token's own logit and clock alone: so the parts of a row that ranks have find the same winner.
class Race {
    static constexpr float FASTEST = 32.f;  // log2 of 1 / u
    static constexpr float NEARLY = 1.f - 1e-4f;
    const Chance chance;
    const float* logits;    // of tokens from `first` on
    const int64_t first;
    const double colder;
    float bar = -INFINITY;  // log2 of the greatest speed, with some room for rounding
    float fastest = 0.f;    // the greatest speed, but for rounding

    void compare(Mask lanes, Words tokens, Floats clocks) {
        alignas(64) int32_t numbers[LANES];
        alignas(64) float clock[LANES];
        store(numbers, tokens), store(clock, clocks);
        for (unsigned left = lanes; left != 0; left &= left - 1) {
            int lane = __builtin_ctz(left);
            double own = double(logits[numbers[lane] - first]) * colder - std::log(double(clock[lane]));
            if (own > score) score = own, winner = numbers[lane];
        }
    }

    // Few come here; with its constants in registers, those that leave early would take twice as long.
    [[gnu::noinline]] void look_at(Floats away, Words tokens, Floats u) {
        Floats clocks = clock_ps(u), speed = chance_ps(filled(0.f) - away) / clocks;
        float most = greatest_of(speed);
        if (!(most >= fastest * NEARLY) || !(most > 0)) return;
        if (most > fastest) fastest = most, bar = std::log2(most) - 0.01f;
        compare(is_at_least(speed, filled(fastest * NEARLY)), tokens, clocks);
    }

   public:
    int64_t winner;
    double score = -INFINITY;  // the winner's: the log of its speed, but for a constant of the row

    Race(const Draw& how, int64_t position, const float* logits, int64_t first, float colder, int64_t best)
        : chance(how.seed, position), logits(logits), first(first), colder(colder), winner(first + best) {}
    void run(Floats away, Words tokens) {
        Floats log2 = away * filled(-1.44269504f);
        if (is_at_least(log2, filled(bar - FASTEST)) == 0) return;
        Floats u = chance.of(tokens);
        if (is_at_least(log2 - exponents(u), filled(bar)) == 0) return;
        look_at(away, tokens, u);
    }
};

// A row of logits [n] of which one is drawn, the first one of token `first`.
struct Drawn {
    const float* logits;
    const int64_t n, first, best = place_of_best(logits, n);
    const float most = logits[best], colder, limit;

    Drawn(const float* logits, int64_t n, int64_t first, const Draw& how)
        : logits(logits), n(n), first(first), colder(std::min(1 / how.temperature, std::numeric_limits<float>::max())),
          limit(how.min_p > 0 ? -std::log(how.min_p) : std::numeric_limits<float>::max()) {}

    // Whether there is only one to choose; else the rest is finite.
    bool is_clear(const Draw& how) const { return how.temperature <= 0 || !std::isfinite(most); }
    // How far the tokens from number i on are from the most likely one, in nats; infinite where min-p leaves them out.
    Floats at(int64_t i) const {
        Floats x = load(logits + i, lanes_of(int(n - i)), filled(-INFINITY));
        Floats away = (filled(most) - x) * filled(colder);
        return picked(is_greater(away, filled(limit)), filled(INFINITY), away);
    }
    void run(Race& race) const {
        for (int64_t i = 0; i < n; i += LANES) race.run(at(i), add_words(numbers_to_15(), filled_words(int(first + i))));
    }
    Race race(const Draw& how, int64_t position) const { return Race(how, position, logits, first, colder, best); }
};

// The token of a row of logits [n] that is to stand at a position.
int64_t drawn(const float* logits, int64_t n, const Draw& how, int64_t position) {
    const Drawn row(logits, n, 0, how);
    if (row.is_clear(how)) return row.best;
    Race race = row.race(how, position);
    if (how.top_k > 0 || how.top_p < 1) {
        static thread_local Candidates candidates;
        candidates.choose(n, how.top_k, how.top_p, [&](int64_t i) { return row.at(i); });
        candidates.for_each([&](Floats away, Words tokens) { race.run(away, tokens); });
    } else {
        row.run(race);
    }
    return race.winner;
}

// The same among those of one rank, the first one of token `first`, to be compared with those of the others; all take part.
Best contestant(const float* logits, int64_t n, int64_t first, const Draw& how, int64_t position) {
    const Drawn row(logits, n, first, how);
    if (row.is_clear(how)) return {first + row.best, double(row.most)};
    Race race = row.race(how, position);
    row.run(race);
    return {race.winner, race.score};
}

// out [selected] int64: the token of each row of in [selected, n], float. With AS_FLOAT out is [selected] of Best, and
// column 0 is token a; of draws, then, only those that all tokens take part in.
void choose(const Operation& op, const Step& step, Work& work) {
    if (!step.choose) return;
    auto* draws = static_cast<const Draw*>(step.draws);
    work.for_each(step.selected, [&](int64_t row) {
        const float* from = static_cast<const float*>(op.in) + row * op.n;
        const Draw how = draws != nullptr ? draws[row] : Draw{};
        const int64_t position = draws != nullptr ? step.positions[step.chosen[row]] + 1 : 0;
        if (op.flags & AS_FLOAT) static_cast<Best*>(op.out)[row] = contestant(from, op.n, op.a, how, position);
        else static_cast<int64_t*>(op.out)[row] = drawn(from, op.n, how, position);
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
        for (int64_t rank = 1; rank < exchange.size && !std::isnan(found.score); ++rank)
            if (Best other = of(rank); other.score > found.score || std::isnan(other.score)) found = other;
        static_cast<int64_t*>(op.out)[row] = found.token;
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

}  // namespace

extern "C" {

// Draws the tokens of rows of logits [rows, n] that are to stand at these positions.
void lockstep_draw(const void* logits, int64_t rows, int64_t n, const void* draws, const void* positions, void* out, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
    for (int64_t row = 0; row < rows; ++row)
        static_cast<int64_t*>(out)[row] = drawn(static_cast<const float*>(logits) + row * n, n, static_cast<const Draw*>(draws)[row],
                                                static_cast<const int64_t*>(positions)[row]);
}

// The best ones [rows] of a rank's rows of logits [rows, n], whose first column is token `first`.
void lockstep_contestants(const void* logits, int64_t rows, int64_t n, int64_t first, const void* draws, const void* positions,
                          void* out, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
    for (int64_t row = 0; row < rows; ++row)
        static_cast<Best*>(out)[row] = contestant(static_cast<const float*>(logits) + row * n, n, first,
                                                  static_cast<const Draw*>(draws)[row], static_cast<const int64_t*>(positions)[row]);
}

int64_t lockstep_draw_bytes() { return sizeof(Draw); }
}
