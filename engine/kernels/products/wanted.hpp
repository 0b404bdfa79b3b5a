// Asking for memory before it is needed.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

// Memory that will be wanted soon, asked for a few lines at a time while something else is computed. What a thread goes on with
// is known; what the hardware would guess is what another one has taken.
class Wanted {
    static constexpr int64_t LINE = 64;
    static constexpr int64_t MOST = (256 << 10) / LINE;  // lines: the second cache has more to keep
    struct Piece { const char *at, *end; };
    std::vector<Piece> pieces;
    size_t piece = 0;
    int64_t lines = 0, each = 0;

   public:
    // Nothing that was wanted is any more.
    void clear() {
        pieces.clear();
        piece = 0, lines = each = 0;
    }
    bool full() const { return lines >= MOST; }
    void add(const void* from, int64_t bytes) {
        auto* at = static_cast<const char*>(from);
        pieces.push_back({at, at + bytes});
        lines += (bytes + LINE - 1) / LINE;
    }
    // All of it is asked for within so many calls of ask().
    void spread(int64_t times) { each = times > 0 ? (lines + times - 1) / times : 0; }
    void ask() {
        for (int64_t left = each; left > 0 && piece < pieces.size();) {
            auto& [at, end] = pieces[piece];
            const char* stop = std::min(end, at + left * LINE);  // most of the time within one piece
            for (; at < stop; at += LINE, --left) __builtin_prefetch(at, 0, 2);
            if (at >= end) ++piece;
        }
    }
};

}  // namespace
