// Log-probabilities of a row of logits.

#pragma once

#include "choosing.hpp"

namespace {

// out: the target, its log-probability, its rank, then the `top` most likely tokens and their log-probabilities.
void logprobs(const float* logits, int64_t n, int64_t target, int64_t top, double* out) {
    int64_t best = place_of_best(logits, n);
    const float most = logits[best];
    auto part = [&](int64_t i) { return load(logits + i, lanes_of(int(n - i)), filled(-INFINITY)); };
    auto at = [&](int64_t i) { return filled(most) - part(i); };
    Doubles total{};
    int64_t better = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        total = add(total, chance_ps(filled(0.f) - at(i)));
        better += __builtin_popcount(is_greater(part(i), filled(logits[target])));
    }
    const double log = std::log(sum_of(total));
    auto of = [&](int64_t token) { return double(float(double(logits[token]) - double(most) - log)); };
    out[0] = double(target), out[1] = of(target), out[2] = double(better + 1);
    std::vector<int32_t> found;
    if (top > 0 && std::isfinite(most)) {
        static thread_local Candidates candidates;
        candidates.choose(n, top, 1.0, at);
        found = candidates.sorted();
    }
    const auto left_out = [&](int64_t token) { return !(std::isfinite(most) && most - logits[token] <= std::numeric_limits<float>::max()); };
    for (int64_t token = 0; token < n && int64_t(found.size()) < top; ++token)  // impossible ones, or all is lost
        if (left_out(token)) found.push_back(int32_t(token));
    for (int64_t i = 0; i < top; ++i) out[3 + i] = found[size_t(i)], out[3 + top + i] = of(found[size_t(i)]);
}

}  // namespace

extern "C" {

// Lines [rows, 3 + 2 * top] for rows of logits [rows, n].
void lockstep_logprobs(const void* logits, int64_t rows, int64_t n, const void* targets, int64_t top, void* out, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
    for (int64_t row = 0; row < rows; ++row)
        logprobs(static_cast<const float*>(logits) + row * n, n, static_cast<const int64_t*>(targets)[row], top,
                 static_cast<double*>(out) + row * (3 + 2 * top));
}
}
