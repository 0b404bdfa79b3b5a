// Rows of logits, changed by what came before, or by which tokens may come.

#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "../core/numbers.hpp"

namespace {

// What concerns a row of logits [n], of which the first one is token `first`.
struct Shape {
    int64_t row;
    const int64_t* tokens;  // prompt and output so far
    int64_t num_tokens, num_prompt;
    const uint8_t* mask;    // bits of the tokens that may come, of the whole vocabulary, the lowest of a byte first; null: all may
    float repetition, presence, frequency;
};

// Only tokens that the mask has: the others get -infinity.
void leave_out(float* logits, int64_t n, int64_t first, const uint8_t* mask) {
    auto may = [&](int64_t token) { return (mask[token / 8] >> token % 8 & 1) != 0; };
    int64_t i = 0;
    for (; i < n && (first + i) % 8 != 0; ++i)
        if (!may(first + i)) logits[i] = -INFINITY;
    for (; i + LANES <= n; i += LANES) {
        uint16_t bits;
        std::memcpy(&bits, mask + (first + i) / 8, sizeof bits);
        store(logits + i, picked(bits, load(logits + i), filled(-INFINITY)));  // whole: stores of some lanes take long with AVX2
    }
    for (; i < n; ++i)
        if (!may(first + i)) logits[i] = -INFINITY;
}

// Repetition over prompt and output (multiplies), then frequency and presence over the output (subtract).
void penalise(float* logits, int64_t n, int64_t first, const Shape& shape) {
    static thread_local std::vector<int32_t> seen;  // one more than how often the output has each token; 0 where none has
    if (int64_t(seen.size()) < n) seen.resize(size_t(n));
    auto each = [&](auto body) {
        for (int64_t i = 0; i < shape.num_tokens; ++i)
            if (int64_t token = shape.tokens[i] - first; token >= 0 && token < n) body(i, token);
    };
    each([&](int64_t i, int64_t token) { seen[size_t(token)] = std::max(seen[size_t(token)], 1) + (i >= shape.num_prompt); });
    each([&](int64_t, int64_t token) {
        int32_t count = seen[size_t(token)] - 1;
        if (count < 0) return;  // done before
        float value = logits[token];
        value = value > 0 ? value / shape.repetition : value * shape.repetition;
        value -= shape.frequency * float(count);
        logits[token] = value - (count > 0 ? shape.presence : 0.f);
        seen[size_t(token)] = 0;
    });
}

}  // namespace

extern "C" {

// Changes rows of logits [rows, n], whose first column is token `first`.
void lockstep_shape(void* logits, int64_t n, int64_t first, const void* shapes, int64_t count, int64_t threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(threads))
    for (int64_t i = 0; i < count; ++i) {
        const Shape& shape = static_cast<const Shape*>(shapes)[i];
        float* row = static_cast<float*>(logits) + shape.row * n;
        if (shape.mask != nullptr) leave_out(row, n, first, shape.mask);
        if (shape.num_tokens > 0) penalise(row, n, first, shape);
    }
}

int64_t lockstep_shape_bytes() { return sizeof(Shape); }
}
