// Sums over the members of a group, each of which gave a part.

#pragma once

#include "../core/numbers.hpp"
#include "linked.hpp"

namespace {

// The sum of a number of each member's: number `at` of the floats from a byte of its arena on.
inline Floats sum_over_ranks(const Exchange& exchange, int64_t begin, int64_t at, Mask lanes) {
    return sum_of_neighbours(exchange.size, [&](int64_t rank) {
        return load(reinterpret_cast<const float*>(exchange.arenas[rank] + begin) + at, lanes);
    });
}

}  // namespace
