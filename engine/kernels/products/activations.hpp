// What MLPs do with their middle.

#pragma once

#include "../core/numbers.hpp"

namespace {

enum Activation : int64_t { LINEAR_ONLY, SILU, GELU_TANH, GELU, RELU_SQUARED, XIELU, RELU, CLIPPED, SIGMOID };

inline Floats negative(Floats x) { return filled(0.f) - x; }
inline Floats sigmoid_ps(Floats x) { return filled(1.f) / (filled(1.f) + exp_ps(negative(x))); }
inline Floats tanh_of(Floats x) { return filled(1.f) - filled(2.f) / (filled(1.f) + exp_ps(x + x)); }

// ln(1 + e^x): the greater of x and 0, and the series of ln(1 + z) = 2 artanh(z / (2 + z)) of what is left.
inline Floats softplus_ps(Floats x) {
    Floats z = exp_ps(negative(maximum(x, negative(x)))), s = z / (filled(2.f) + z), square = s * s, p = filled(1.f / 15.f);
    for (float c : {1.f / 13.f, 1.f / 11.f, 1.f / 9.f, 1.f / 7.f, 1.f / 5.f, 1.f / 3.f, 1.f}) p = fmadd(p, square, filled(c));
    return fmadd(p + p, s, maximum(x, filled(0.f)));
}

// 0.5 (1 + erf(x / sqrt(2))): Abramowitz and Stegun, 7.1.26, whose error is below 2e-7.
inline Floats normal_below(Floats x) {
    Floats size = maximum(x, negative(x)) * filled(0.70710678f);
    Floats t = filled(1.f) / fmadd(size, filled(0.3275911f), filled(1.f)), p = filled(1.061405429f);
    for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fmadd(p, t, filled(c));
    Floats tail = filled(0.5f) * p * t * exp_ps(negative(size * size));
    return picked(is_less(x, filled(0.f)), tail, filled(1.f) - tail);
}

// exp(x) - 1 - x of numbers up to 0: near 0 by its series.
inline Floats exp_less_line(Floats x) {
    Floats p = filled(1.f / 5040.f);
    for (float c : {1.f / 720.f, 1.f / 120.f, 1.f / 24.f, 1.f / 6.f, 0.5f}) p = fmadd(p, x, filled(c));
    return picked(is_less(x, filled(-0.5f)), exp_ps(x) - filled(1.f) - x, p * x * x);
}

// with: two factors and the slope at 0, of XIELU.
inline Floats activated(int64_t kind, Floats x, const float* with = nullptr) {
    switch (kind) {
        case SILU: return silu_ps(x);
        case GELU_TANH: return x * sigmoid_ps(filled(1.59576912f) * fmadd(x * x * x, filled(0.044715f), x));
        case GELU: return x * normal_below(x);
        case RELU: return maximum(x, filled(0.f));
        case RELU_SQUARED: {
            Floats some = maximum(x, filled(0.f));
            return some * some;
        }
        case XIELU: {
            Floats curved = picked(is_less(filled(0.f), x), filled(with[0]) * x * x,
                                   filled(with[1]) * exp_less_line(minimum(x, filled(0.f))));
            return fmadd(filled(with[2]), x, curved);
        }
        default: return x;
    }
}

// What a gate makes of its number and that of `up`. with: slope and limit, of CLIPPED.
inline Floats gated(int64_t kind, Floats gate, Floats up, const float* with) {
    if (kind != CLIPPED) return (kind <= SILU ? silu_ps(gate) : activated(kind, gate)) * up;
    Floats most = filled(with[1]), open = minimum(gate, most);
    up = maximum(minimum(up, most), negative(most)) + filled(1.f);
    return up * open * sigmoid_ps(filled(with[0]) * open);
}

// A factor that an operation has, or none.
inline Floats factor_of(double number) { return filled(number == 0 ? 1.f : float(number)); }

}  // namespace
