// The products of attention with AMX.

#pragma once

#include <algorithm>
#include <cstring>

#include "attention_rows.hpp"
#include "../products/products.hpp"
#include "../products/wanted.hpp"

namespace {

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

// The products of a pass with tiles: two by two of them, each the sums of 16 rows with 16 keys, or with 16 columns of values. A block of
// keys is a tile as it lies, for 32 of their numbers. Of values a tile has two blocks, which lie anywhere: those of a tile of keys are put
// side by side once, for all passes. Which two blocks share a tile depends on their positions alone.
class TilePass : public Pass<BFloat16, 2 * TILE, 128> {
    static constexpr int64_t PAIR = 2;                                   // blocks whose values a tile has
    static constexpr int64_t VALUES = TILE * LANES;                      // words of a tile
    uint32_t* gathered;                 // [KEYS / 32][columns / 16] tiles of values
    Wanted& wanted;

    int64_t columns() const { return slab.shape.value_dim / LANES; }
    uint32_t* tile_of_values(int64_t pair, int64_t column) const {
        return gathered + (pair % (KEYS / LANES / PAIR) * columns() + column) * VALUES;
    }
    // Loads of tiles are not known to read what was stored before.
    static void finish_stores() { asm volatile("" ::: "memory"); }

    template <int ROW_TILES>
    void score_rows() {
        const int64_t pitch = slab.query_pitch;
        const auto* from = slab.queries + first * pitch;
        const Blocks there = kept.all();
        auto keys_of = [&](int64_t block) { return kept.keys_of(std::clamp(block, there.begin, there.end - 1)); };  // of one that nobody sees any
        finish_stores();
        for (int64_t block = blocks.begin; block < blocks.end; block += 2) {
            const uint32_t *one = keys_of(block), *two = keys_of(block + 1);
            float* to = scores + (block - blocks.begin) * LANES;
            _tile_zero(0);
            _tile_zero(1);
            if (ROW_TILES == 2) {
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t word = 0; word < slab.shape.dim / 2; word += TILE) {
                wanted.ask();
                _tile_loadd(4, from + 2 * word, 2 * pitch);
                _tile_loadd(6, one + word * LANES, 4 * LANES);
                _tile_loadd(7, two + word * LANES, 4 * LANES);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (ROW_TILES == 2) {
                    _tile_loadd(5, from + TILE * pitch + 2 * word, 2 * pitch);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, to, 4 * SCORE_PITCH);
            _tile_stored(1, to + LANES, 4 * SCORE_PITCH);
            if (ROW_TILES == 2) {
                _tile_stored(2, to + TILE * SCORE_PITCH, 4 * SCORE_PITCH);
                _tile_stored(3, to + TILE * SCORE_PITCH + LANES, 4 * SCORE_PITCH);
            }
        }
    }

    template <int ROW_TILES>
    void weigh_rows() {
        const int64_t dim = slab.shape.value_dim, pitch = 4 * dim, second = TILE * dim;
        constexpr int64_t WEIGHTS = WEIGHT_PITCH;
        float* sums = slab.sums + first * dim;
        for (int row = 0; row < count && !is_first; ++row)
            if (factors[row] != 1.f)
                for (int64_t i = 0; i < dim; i += LANES) store(sums + row * dim + i, load(sums + row * dim + i) * filled(factors[row]));
        finish_stores();
        for (int64_t column = 0; column < columns(); column += 2) {
            float* to = sums + column * LANES;
            if (is_first) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            } else {
                _tile_loadd(0, to, pitch);
                _tile_loadd(1, to + LANES, pitch);
                if (ROW_TILES == 2) {
                    _tile_loadd(2, to + second, pitch);
                    _tile_loadd(3, to + second + LANES, pitch);
                }
            }
            const auto* from = weights;
            for (int64_t pair = blocks.begin / PAIR; pair < blocks.end / PAIR; ++pair, from += PAIR * LANES) {
                wanted.ask();
                _tile_loadd(4, from, 2 * WEIGHTS);
                _tile_loadd(6, tile_of_values(pair, column), 4 * LANES);
                _tile_loadd(7, tile_of_values(pair, column + 1), 4 * LANES);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (ROW_TILES == 2) {
                    _tile_loadd(5, from + TILE * WEIGHTS, 2 * WEIGHTS);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, to, pitch);
            _tile_stored(1, to + LANES, pitch);
            if (ROW_TILES == 2) {
                _tile_stored(2, to + second, pitch);
                _tile_stored(3, to + second + LANES, pitch);
            }
        }
    }

   public:
    TilePass(Slab<BFloat16>& slab, const Operation& op, Wanted& wanted)
        : Pass(slab, op), wanted(wanted) {
        thread_local Room room;
        gathered = room.of<uint32_t>(KEYS / 2 * slab.shape.value_dim);
    }

    static bool fits(const AttentionShape& shape) {
        return use_tiles<BFloat16>() && shape.dim % (2 * TILE) == 0 && shape.value_dim % (2 * TILE) == 0;
    }
    static int64_t passes_of(int64_t rows) { return (rows + 2 * TILE - 1) / (2 * TILE); }
    // Full ones, and then what is left: tiles of two passes have no row in common.
    static Share rows_of_pass(int64_t rows, int64_t number) { return {number * 2 * TILE, std::min(rows, (number + 1) * 2 * TILE)}; }
    static int64_t asks(const AttentionShape& shape, int64_t rows, int64_t blocks) {
        return blocks + passes_of(rows) * (blocks / PAIR * (shape.dim + shape.value_dim) / (2 * TILE) + rows);
    }

    // Puts the values of these blocks side by side, and zeros where a tile has room for one more.
    void begin_tile(const AttentionTask& task, Blocks some) {
        const int64_t dim = slab.shape.value_dim, half = VALUES / PAIR;
        kept.begin(task, some, [&] { wanted.ask(); });
        for (int64_t block = some.begin / PAIR * PAIR; block < (some.end + PAIR - 1) / PAIR * PAIR; ++block) {
            wanted.ask();
            bool is_there = block >= some.begin && block < some.end;
            const uint32_t* from = is_there ? kept.values_of(block) : nullptr;
            for (int64_t column = 0; column < columns(); ++column) {
                uint32_t* to = tile_of_values(block / PAIR, column) + block % PAIR * half;
                for (int64_t line = 0; line < half; line += LANES)
                    store(to + line, is_there ? load_words(from + line / LANES * dim + column * LANES) : filled_words(0));
            }
        }
    }

    void run(Share rows, Blocks tile) {
        if (!take(rows, tile)) return;
        blocks = {blocks.begin / PAIR * PAIR, (blocks.end + PAIR - 1) / PAIR * PAIR};
        line_begin = blocks.begin * LANES;
        count > TILE ? score_rows<2>() : score_rows<1>();
        soften([&] { wanted.ask(); });
        count > TILE ? weigh_rows<2>() : weigh_rows<1>();
    }
};

#endif

}  // namespace
