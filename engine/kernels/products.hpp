// Rows of inputs against two panels of weights: the inner loop of everything, with vectors or with tiles.
//
// With AVX-512 up to 8 rows share one pass over the panels; with AMX 32 do, and a tile of weights is a panel as it
// lies. Which of the two computes a matrix depends on the machine and on its number of inputs, never on the
// number of rows, so that a row's outputs are the same bits whatever else is in the batch.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "numbers.hpp"

namespace {

template <class T, int ROWS>
inline void multiply(__m512 (&sum)[MAX_ROWS][2], const uint32_t* a, const uint32_t* b, int64_t stride,
                     const uint32_t* const* inputs, int64_t offset, int64_t steps) {
    __m512 first[ROWS], second[ROWS];  // of this function alone, so that they stay in registers
    const uint32_t* from[ROWS];
    for (int row = 0; row < ROWS; ++row) {
        first[row] = sum[row][0], second[row] = sum[row][1];
        from[row] = inputs[row] + offset;
    }
    for (int64_t step = 0; step < steps; ++step) {
        __m512i wa = _mm512_loadu_si512(a + step * stride), wb = _mm512_loadu_si512(b + step * stride);
        for (int row = 0; row < ROWS; ++row) {
            uint32_t input = from[row][step];
            first[row] = T::madd(first[row], wa, input);
            second[row] = T::madd(second[row], wb, input);
        }
    }
    for (int row = 0; row < ROWS; ++row) sum[row][0] = first[row], sum[row][1] = second[row];
}

template <class T>
void multiply(int rows, __m512 (&sum)[MAX_ROWS][2], const uint32_t* a, const uint32_t* b, int64_t stride,
              const uint32_t* const* inputs, int64_t offset, int64_t steps) {
    switch (rows) {
        case 1: return multiply<T, 1>(sum, a, b, stride, inputs, offset, steps);
        case 2: return multiply<T, 2>(sum, a, b, stride, inputs, offset, steps);
        case 3: return multiply<T, 3>(sum, a, b, stride, inputs, offset, steps);
        case 4: return multiply<T, 4>(sum, a, b, stride, inputs, offset, steps);
        case 5: return multiply<T, 5>(sum, a, b, stride, inputs, offset, steps);
        case 6: return multiply<T, 6>(sum, a, b, stride, inputs, offset, steps);
        case 7: return multiply<T, 7>(sum, a, b, stride, inputs, offset, steps);
        default: return multiply<T, 8>(sum, a, b, stride, inputs, offset, steps);
    }
}

void clear(__m512 (&sum)[MAX_ROWS][2]) {
    for (auto& row : sum) row[0] = row[1] = _mm512_setzero_ps();
}

// ---- tiles

constexpr int TILE = 16;       // rows of a tile; also words of 32 bits in each

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)

// The kernel saves the tiles of a process that has asked for them.
bool ask_for_tiles() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

struct TileShapes { uint8_t bytes[8], rows[8]; };
constexpr TileShapes FULL{{64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

void shape_tiles(const TileShapes& shapes) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) config.bytes[tile] = shapes.bytes[tile], config.rows[tile] = shapes.rows[tile];
    _tile_loadconfig(&config);
}

// This thread uses tiles while it lives: full ones.
class TileUse {
    bool used;

   public:
    explicit TileUse(bool use) : used(use) { if (used) shape_tiles(FULL); }
    ~TileUse() { if (used) _tile_release(); }
};

// Within such a use, other ones.
struct TileScope {
    explicit TileScope(const TileShapes& shapes) { shape_tiles(shapes); }
    ~TileScope() { shape_tiles(FULL); }
};

// out: [ROW_TILES][2] blocks of 16 x 16 sums; COLD: these rows are the first to see the weights. Calls aside() before
// the tiles of each step.
template <int ROW_TILES, bool COLD, class Aside>
void multiply_tiles(const char* in, int64_t pitch, const uint32_t* a, const uint32_t* b, int64_t steps, float* out, Aside aside) {
    _tile_zero(0);
    _tile_zero(1);
    if (ROW_TILES == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; step += TILE) {
        aside();
        if (COLD)
            for (int line = 0; line < TILE; ++line) {
                _mm_prefetch(reinterpret_cast<const char*>(a + (step + 4 * TILE + line) * LANES), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(b + (step + 4 * TILE + line) * LANES), _MM_HINT_T0);
            }
        _tile_loadd(4, in + 4 * step, pitch);
        _tile_loadd(6, a + step * LANES, 64);
        _tile_loadd(7, b + step * LANES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (ROW_TILES == 2) {
            _tile_loadd(5, in + TILE * pitch + 4 * step, pitch);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, 64);
    _tile_stored(1, out + 256, 64);
    if (ROW_TILES == 2) {
        _tile_stored(2, out + 512, 64);
        _tile_stored(3, out + 768, 64);
    }
}

#else

bool ask_for_tiles() { return false; }
struct TileUse {
    explicit TileUse(bool) {}
};
template <int ROW_TILES, bool COLD, class Aside>
void multiply_tiles(const char*, int64_t, const uint32_t*, const uint32_t*, int64_t, float*, Aside) {}

#endif

bool tiles_allowed = false;

template <class T>
bool use_tiles() { return T::PACK == 2 && tiles_allowed; }

// Multiplies rows with pairs of panels; body(tag, row, one, two) gets each row's 16 + 16 sums. With tiles that is
// while the next rows are multiplied: storing (and the activation) takes as many cycles as the tiles do, and other units.
template <class T, class Tag, class Body>
class Products {
    using E = typename T::Element;
    Body body;
    alignas(64) float sums[2][4 * TILE * LANES];
    Tag waiting{};                        // whose sums wait in sums[side]: rows next ... count, from row first on
    int64_t first = 0;
    int side = 0, next = 0, count = 0;

    void finish(int rows) {
        for (int stop = std::min(count, next + rows); next < stop; ++next) {
            const float* line = sums[side] + next / TILE * 2 * TILE * LANES + next % TILE * LANES;
            body(waiting, first + next, _mm512_load_ps(line), _mm512_load_ps(line + TILE * LANES));
        }
    }

   public:
    explicit Products(Body with) : body(with) {}

    // `rows` rows of `in` [rows, k] with panels a and b. `in` can be read up to a multiple of 16 rows; what lies there
    // does not matter. cold: nobody has seen these panels in this step.
    void multiply(const E* in, int64_t k, int64_t rows, const uint32_t* a, const uint32_t* b, bool cold, Tag tag) {
        int64_t steps = k / T::PACK;
        if (use_tiles<T>() && steps % TILE == 0) {
            for (int64_t begin = 0; begin < rows; begin += 2 * TILE) {
                auto* from = reinterpret_cast<const char*>(in + begin * k);
                int now = int(std::min<int64_t>(2 * TILE, rows - begin));
                int64_t pitch = k * int64_t(sizeof(E)), tiles = steps / TILE;
                auto aside = [this, some = int((count + tiles - 1) / tiles)] { finish(some); };
                float* to = sums[1 - side];
                if (now > TILE && cold) multiply_tiles<2, true>(from, pitch, a, b, steps, to, aside);
                else if (now > TILE) multiply_tiles<2, false>(from, pitch, a, b, steps, to, aside);
                else if (cold) multiply_tiles<1, true>(from, pitch, a, b, steps, to, aside);
                else multiply_tiles<1, false>(from, pitch, a, b, steps, to, aside);
                waiting = tag, first = begin, next = 0, count = now, side = 1 - side, cold = false;
            }
            return;
        }
        for (int64_t begin = 0; begin < rows; begin += MAX_ROWS) {
            int now = int(std::min<int64_t>(MAX_ROWS, rows - begin));
            const uint32_t* inputs[MAX_ROWS];
            for (int row = 0; row < now; ++row) inputs[row] = reinterpret_cast<const uint32_t*>(in + (begin + row) * k);
            __m512 sum[MAX_ROWS][2];
            clear(sum);
            ::multiply<T>(now, sum, a, b, LANES, inputs, 0, steps);
            for (int row = 0; row < now; ++row) body(tag, begin + row, sum[row][0], sum[row][1]);
        }
    }

    // What still waits.
    void finish() { finish(count); }
};

template <class T, class Tag, class Body>
Products<T, Tag, Body> products_into(Body body) { return Products<T, Tag, Body>(body); }

// Bytes of weights that rows go through together, a block of rows after the other: they stay in a core's own cache,
// and so do the inputs of a block.
constexpr int64_t CACHED_BYTES = 512 << 10;

// Calls body(first, count) for blocks of rows, or once for all where a row's inputs are read by vectors.
template <class T, class Body>
inline void row_blocks(int64_t k, int64_t rows, Body body) {
    int64_t block = use_tiles<T>() && k / T::PACK % TILE == 0 ? 2 * TILE : rows;
    for (int64_t first = 0; first < rows; first += block) body(first, std::min(block, rows - first));
}

// Where 16 columns of rows of width n go, gated: silu(in x gate) * (in x up).
template <class T>
struct GatedColumns {
    typename T::Element* out;
    __mmask16 lanes;
};

template <class T>
auto gated_products(int64_t n) {
    return products_into<T, GatedColumns<T>>([n](const GatedColumns<T>& to, int64_t row, __m512 gate, __m512 up) {
        T::store(to.out + row * n, _mm512_mul_ps(silu_ps(gate), up), to.lanes);
    });
}

}  // namespace
