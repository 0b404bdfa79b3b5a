// Rows of inputs against two panels of weights: the inner loop of everything, with vectors or with tiles.
//
// With AVX-512 up to 12 rows share one pass over the panels; with AMX 32 do, and a tile of weights is a panel as it
// lies. Which of the two computes a matrix depends on the machine and on its number of inputs, never on the
// number of rows, so that a row's outputs are the same bits whatever else is in the batch.
//
// The inputs of some matrices are split into parts, each of which is added up by itself: those that tensor-parallel ranks may have a
// part of each. The parts are the same for any number of ranks, and so are the bits of the sum of all.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>
#include <vector>

#include "activations.hpp"
#include "byte_rows.hpp"
#include "coded_rows.hpp"
#include "../adapters/added.hpp"
#include "../core/numbers.hpp"
#include "quantized.hpp"
#include "wanted.hpp"
#if LOCKSTEP_AVX2
#include "multiply_avx2.hpp"
#endif

namespace {

// Panels that come next: a line of each is asked for in every step.
struct Asked {
    const char *one = nullptr, *two = nullptr;
};

#if LOCKSTEP_AVX512

// The products of rows with two panels; rows lie `pitch` bytes apart. ASKS: for how many panels to ask, the first or both. A few
// rows go through their weights as fast as these come by themselves: asking then costs more than it brings.
template <class T, int ROWS, int ASKS>
void multiply(Floats (&sum)[MAX_ROWS][2], const uint32_t* a, const uint32_t* b, const char* in, int64_t pitch, int64_t steps,
              Asked asked) {
    constexpr int GROUP = 3;                     // rows that share a pointer: for one each there are no registers left
    const char* from[(ROWS + GROUP - 1) / GROUP];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row += GROUP) from[row / GROUP] = in + row * pitch;
    Floats first[ROWS], second[ROWS];            // of this function alone, so that they stay in registers
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) first[row] = second[row] = filled(0.f);
    auto* weights = reinterpret_cast<const char*>(a);
    const int64_t to_second = reinterpret_cast<const char*>(b) - weights;
    const char* end = weights + 4 * LANES * steps;
    do {
        Words wa = load_words(weights), wb = load_words(weights + to_second);
        if (ASKS >= 1 && ROWS >= 3) __builtin_prefetch(asked.one, 0, 2), asked.one += 64;
        if (ASKS == 2 && ROWS >= 3) __builtin_prefetch(asked.two, 0, 2), asked.two += 64;
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            Words input = filled_words(*reinterpret_cast<const int*>(from[row / GROUP] + row % GROUP * pitch));
            first[row] = T::madd(first[row], wa, input);
            second[row] = T::madd(second[row], wb, input);
        }
#pragma GCC unroll 16
        for (auto& pointer : from) pointer += 4;
        weights += 4 * LANES;
    } while (weights != end);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) sum[row][0] = first[row], sum[row][1] = second[row];
}

#else

// The products of rows with PANELS panels, the second of which lies so many bytes behind the first, into column `column` of the sums.
template <class T, int ROWS, int PANELS, bool ASKS>
inline void multiply_panels(Floats (&result)[MAX_ROWS][2], int column, const uint32_t* words, int64_t to_second, const char* in,
                            int64_t pitch, int64_t steps, const char* asked) {
    constexpr int GROUP = 3;                     // rows that share a pointer
    const char* from[(ROWS + GROUP - 1) / GROUP];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row += GROUP) from[row / GROUP] = in + row * pitch;
    Floats sum[ROWS * PANELS];                   // of this function alone, so that they stay in registers
#pragma GCC unroll 16
    for (auto& each : sum) each = filled(0.f);
    auto* weights = reinterpret_cast<const char*>(words);
    const char* end = weights + 4 * LANES * steps;
    do {
        if (ASKS) __builtin_prefetch(asked, 0, 2), asked += 64;
#pragma GCC unroll 2
        for (int part = 0; part < T::PARTS; ++part) {
            Floats lines[PANELS];
#pragma GCC unroll 2
            for (int panel = 0; panel < PANELS; ++panel) {
                Words line = load_words(weights + panel * to_second);
                lines[panel] = part == 0 ? T::template of<0>(line) : T::template of<1>(line);
            }
#pragma GCC unroll 16
            for (int row = 0; row < ROWS; ++row) {
                Floats input = filled(*reinterpret_cast<const float*>(from[row / GROUP] + row % GROUP * pitch + 4 * part));
#pragma GCC unroll 2
                for (int panel = 0; panel < PANELS; ++panel)
                    sum[row * PANELS + panel] = T::madd(sum[row * PANELS + panel], lines[panel], input);
            }
        }
#pragma GCC unroll 16
        for (auto& pointer : from) pointer += 4 * T::PARTS;
        weights += 4 * LANES;
    } while (weights != end);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int panel = 0; panel < PANELS; ++panel) result[row][column + panel] = sum[row * PANELS + panel];
}

// The products of rows, as floats, with two panels; rows lie `pitch` bytes apart. ASKS: for how many panels to ask, the first or both.
// One or two rows go through both at once, so that no sum waits for itself; of more rows the sums of one panel fill the registers.
template <class T, int ROWS, int ASKS>
void multiply(Floats (&sum)[MAX_ROWS][2], const uint32_t* a, const uint32_t* b, const char* in, int64_t pitch, int64_t steps,
              Asked asked) {
    if constexpr (ROWS <= 2) {
        const int64_t to_second = reinterpret_cast<const char*>(b) - reinterpret_cast<const char*>(a);
        multiply_panels<T, ROWS, 2, false>(sum, 0, a, to_second, in, pitch, steps, nullptr);
    } else {
        multiply_panels<T, ROWS, 1, ASKS >= 1>(sum, 0, a, 0, in, pitch, steps, asked.one);
        multiply_panels<T, ROWS, 1, ASKS == 2>(sum, 1, b, 0, in, pitch, steps, asked.two);
    }
}

#endif

constexpr int MOST_CODED_ROWS = 8;  // that are multiplied while codes are widened: sums, scales and codes fill the registers

#if LOCKSTEP_AVX512

// The products of rows with `steps` words of two panels of codes, from word `begin` on; each line of words goes from the codes
// right into the products. Asks for the same lines of the panels that come next. KEEPS: all words are also left in `keep`, a's and
// then b's, for more rows.
template <class Codes, bool HAS_ZEROS, bool KEEPS, int ROWS>
void multiply_codes(Floats (&sum)[MAX_ROWS][2], const Panel& a, const Panel& b, int64_t begin, int64_t steps, int64_t whole,
                    const char* in, int64_t pitch, const char* ahead_a, const char* ahead_b, uint32_t* keep) {
    constexpr int LINES = 16 / Codes::BITS;      // of words, in one of codes
    const Codes codes;
    const Quantized& from = *a.quantized;
    const int64_t in_panel = whole / LINES, in_group = in_panel / from.groups, first = begin / LINES, last = first + steps / LINES;
    Floats sums_a[ROWS], sums_b[ROWS];
    for_each_of<ROWS>([&](auto row) { sums_a[row] = sums_b[row] = filled(0.f); });
    constexpr int GROUP = 3;                     // rows that share a pointer
    constexpr int GROUPS = (ROWS + GROUP - 1) / GROUP;
    const char* rows_in[GROUPS];
    for_each_of<GROUPS>([&](auto group) { rows_in[group] = in + 4 * LINES * first + GROUP * group * pitch; });
    for (int64_t line = first; line < last;) {
        const int64_t group = line / in_group, stop = std::min(last, (group + 1) * in_group);
        const int64_t at_a = (a.number * from.groups + group) * LANES, at_b = (b.number * from.groups + group) * LANES;
        alignas(64) Floats scales[2][2], zeros[2][2];
        for (int half = 0; half < 2; ++half) {
            scales[0][half] = twice(load(from.scales + at_a), half), scales[1][half] = twice(load(from.scales + at_b), half);
            zeros[0][half] = HAS_ZEROS ? twice(load(from.zeros + at_a), half) : filled(0.f);
            zeros[1][half] = HAS_ZEROS ? twice(load(from.zeros + at_b), half) : filled(0.f);
        }
        const uint32_t *codes_a = from.codes + a.number * in_panel * LANES, *codes_b = from.codes + b.number * in_panel * LANES;
        for (; line < stop; ++line) {
            const Words coded[2] = {load_words(codes_a + line * LANES), load_words(codes_b + line * LANES)};
            __builtin_prefetch(ahead_a + 64 * line);
            __builtin_prefetch(ahead_b + 64 * line);
            auto multiply_line = [&](auto number) {
                constexpr int ONE = 2 * number, TWO = ONE + 1;
                auto widened = [&](int panel) {
                    Floats one = codes.template of<ONE>(coded[panel]), two = codes.template of<TWO>(coded[panel]);
                    if (HAS_ZEROS) one = one - zeros[panel][0], two = two - zeros[panel][1];
                    return words_of_bfloat16(one * scales[panel][0], two * scales[panel][1]);
                };
                const Words wa = widened(0), wb = widened(1);
                if constexpr (KEEPS) {
                    uint32_t* to = keep + (line * LINES + number) * LANES;
                    store(to, wa), store(to + whole * LANES, wb);
                }
                auto multiply_row = [&](auto row) {
                    Words input = filled_words(*reinterpret_cast<const int*>(rows_in[row / GROUP] + row % GROUP * pitch + 4 * number));
                    sums_a[row] = BFloat16::madd(sums_a[row], wa, input);
                    sums_b[row] = BFloat16::madd(sums_b[row], wb, input);
                };
                for_each_of<ROWS>(multiply_row);
            };
            multiply_line(std::integral_constant<int, 0>());
            multiply_line(std::integral_constant<int, 1>());
            if constexpr (LINES == 4) {
                multiply_line(std::integral_constant<int, 2>());
                multiply_line(std::integral_constant<int, 3>());
            }
            for_each_of<GROUPS>([&](auto group) { rows_in[group] += 4 * LINES; });
        }
    }
    for_each_of<ROWS>([&](auto row) { sum[row][0] = sums_a[row], sum[row][1] = sums_b[row]; });
}

template <class Codes, bool HAS_ZEROS, int... BEFORE>
constexpr auto multiply_codes_of(std::integer_sequence<int, BEFORE...>) {
    return std::array{&multiply_codes<Codes, HAS_ZEROS, false, BEFORE + 1>...,
                      &multiply_codes<Codes, HAS_ZEROS, true, MAX_ROWS>};
}

// The function for so many rows of these codes; or for as many as can be, if their words are kept for more.
inline auto multiply_codes_for(const Quantized& codes, int64_t rows) {
    constexpr auto COUNTS = std::make_integer_sequence<int, MOST_CODED_ROWS>();
    static constexpr std::array OF{multiply_codes_of<FourBits, false>(COUNTS), multiply_codes_of<FourBits, true>(COUNTS),
                                   multiply_codes_of<EightBits, false>(COUNTS), multiply_codes_of<EightBits, true>(COUNTS),
                                   multiply_codes_of<FloatsOfFourBits, false>(COUNTS), multiply_codes_of<FloatsOfEightBits, false>(COUNTS)};
    const size_t kind = codes.is_float ? (codes.bits == 4 ? 4 : 5) : (codes.bits == 4 ? 0 : 2) + (codes.zeros != nullptr ? 1 : 0);
    return OF[kind][size_t(std::min<int64_t>(rows, MOST_CODED_ROWS + 1)) - 1];
}

#endif

// The function for each number of rows, from one on.
template <class T, int ASKS, int... BEFORE>
constexpr auto multiply_of(std::integer_sequence<int, BEFORE...>) {
    return std::array{&multiply<T, BEFORE + 1, ASKS>...};
}

template <class T, int ASKS>
void multiply(int rows, Floats (&sum)[MAX_ROWS][2], const uint32_t* a, const uint32_t* b, const char* in, int64_t pitch,
              int64_t steps, Asked asked = {}) {
    static constexpr auto of = multiply_of<T, ASKS>(std::make_integer_sequence<int, MAX_ROWS>());
    of[size_t(rows) - 1](sum, a, b, in, pitch, steps, asked);
}

// ---- tiles

constexpr int64_t MOST_PARTS = 4;             // of the inputs, each of which is added up by itself
constexpr int64_t PART_SUMS = 4 * TILE * LANES;

// Where weights come from: memory, a cache of this core, or memory in 12 bits each.
enum Source { COLD, WARM, NARROW };

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__)

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
    asm volatile("" : : "r"(&config) : "memory");  // gcc takes the instruction for one that reads its first bytes only
    _tile_loadconfig(&config);
}

// This thread uses tiles while it lives: full ones.
class TileUse {
    bool used;

   public:
    explicit TileUse(bool use) : used(use) { if (used) shape_tiles(FULL); }
    ~TileUse() { if (used) _tile_release(); }
};

constexpr int64_t LEAD = 2;   // tiles that are widened before they are needed: what was just stored cannot be loaded yet

// out: [parts][4] blocks of 16 x 16 sums, [ROW_TILES][2] of each part of the steps. next: whose weights are wanted after these. Calls aside() before the tiles of each
// step. NARROW: all words are also left in `keep`, a's and then b's, if there is one.
template <class T, int ROW_TILES, Source SOURCE, class Aside>
void multiply_tiles(const char* in, int64_t pitch, Panels now, Panels next, int64_t steps, int64_t parts, uint32_t* keep,
                    float* out, Aside aside) {
    const auto [a, b] = now;
    alignas(64) uint32_t widened[SOURCE == NARROW ? 4 * LEAD * TILE_WORDS : 1];  // tiles of some steps
    auto words_of = [&](const Panel& panel, int64_t side, int64_t step) -> const uint32_t* {
        if (SOURCE != NARROW) return panel.words + step * LANES;
        return keep != nullptr ? keep + (side * steps + step) * LANES : widened + (step / TILE % (2 * LEAD) * 2 + side) * TILE_WORDS;
    };
    auto ahead = [tiles = steps / TILE](const Panel& panel, const Panel& then, int64_t tile) {
        return tile + AHEAD < tiles ? panel.bytes(tile + AHEAD) : then.bytes(tile + AHEAD - tiles);
    };
    auto widen = [&](int64_t step) {
        int64_t tile = step / TILE;
        decompress(*a.compressed, a.tile + tile, const_cast<uint32_t*>(words_of(a, 0, step)), ahead(a, next.a, tile));
        decompress(*b.compressed, b.tile + tile, const_cast<uint32_t*>(words_of(b, 1, step)), ahead(b, next.b, tile));
        asm volatile("" ::: "memory");  // loads of tiles are not known to read this
    };
    if (SOURCE == NARROW)
        for (int64_t step = 0; step < std::min(steps, LEAD * TILE); step += TILE) widen(step);
    for (int64_t part = 0; part < parts; ++part, out += PART_SUMS) {
        _tile_zero(0);
        _tile_zero(1);
        if (ROW_TILES == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t step = part * steps / parts; step < (part + 1) * steps / parts; step += TILE) {
            aside();
            if (SOURCE == COLD)
                for (int64_t line = 0; line < TILE; ++line) {
                    __builtin_prefetch(ahead(a, next.a, step / TILE) + 64 * line);
                    __builtin_prefetch(ahead(b, next.b, step / TILE) + 64 * line);
                }
            _tile_loadd(4, in + 4 * step, pitch);
            _tile_loadd(6, words_of(a, 0, step), 64);
            _tile_loadd(7, words_of(b, 1, step), 64);
            if constexpr (T::PACK == Bytes::PACK) {
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 4, 7);
            } else {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (ROW_TILES == 2) {
                _tile_loadd(5, in + TILE * pitch + 4 * step, pitch);
                if constexpr (T::PACK == Bytes::PACK) {
                    _tile_dpbusd(2, 5, 6);
                    _tile_dpbusd(3, 5, 7);
                } else {
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            if (SOURCE == NARROW && step + LEAD * TILE < steps) widen(step + LEAD * TILE);
        }
        _tile_stored(0, out, 64);
        _tile_stored(1, out + 256, 64);
        if (ROW_TILES == 2) {
            _tile_stored(2, out + 512, 64);
            _tile_stored(3, out + 768, 64);
        }
    }
}

#else

bool ask_for_tiles() { return false; }
struct TileUse {
    explicit TileUse(bool) {}
};
template <class T, int ROW_TILES, Source SOURCE, class Aside>
void multiply_tiles(const char*, int64_t, Panels, Panels, int64_t, int64_t, uint32_t*, float*, Aside) {}

#endif

bool tiles_allowed = false;

template <class T>
bool use_tiles() { return T::PACK >= 2 && tiles_allowed; }

// Whether tiles multiply rows of k inputs in so many parts. Of whole numbers vectors make the same sums.
template <class T>
bool are_whole_tiles(int64_t k, int64_t parts) { return k / T::PACK % (TILE * (T::PACK == Bytes::PACK ? parts : 1)) == 0; }

template <class T>
constexpr bool widens() { return WIDENS_INPUTS && T::PACK > 1 && (T::PACK != Bytes::PACK || T::PARTS > 1); }

// What a word of weights takes of a row of inputs.
template <class T>
constexpr int64_t WORD_BYTES = widens<T>() ? T::PARTS * sizeof(float) : sizeof(uint32_t);

// Words from one widened row to the next.
template <class T>
int64_t widened_pitch(int64_t k) { return pitch_of<Float>(k / T::PACK * T::PARTS); }

constexpr int64_t WIDENED_ROWS = 16 * MAX_ROWS;   // at most, at a time: each thread keeps room for them

// A row of inputs in the words that AVX2 multiplies: a float each, or two bytes with zeros between them.
template <class T>
void widen_row(const typename T::Element* in, int64_t k, float* out) {
    if constexpr (T::PACK == Bytes::PACK) {
        for (int64_t word = 0; word < k / T::PACK; ++word) {
            uint32_t bytes;
            std::memcpy(&bytes, in + word * T::PACK, sizeof(bytes));
            const uint32_t halves[2] = {bytes & 0x00ff00ff, bytes >> 8 & 0x00ff00ff};
            std::memcpy(out + 2 * word, halves, sizeof(halves));
        }
    } else {
        for (int64_t i = 0; i < k; i += LANES) store(out + i, T::load(in + i, lanes_of(int(k - i))));
    }
}

// Rows as floats: those that were asked for last. They are many panels' inputs, one after the other.
class Widened {
    const void* rows = nullptr;
    int64_t count = 0;

   public:
    // `wanted` rows of [wanted, k] from `in` on, `pitch` numbers apart, which do not change while this lives. The floats lie as
    // pitch_of says.
    template <class T>
    const float* of(const typename T::Element* in, int64_t k, int64_t wanted, int64_t pitch_in) {
        static thread_local std::vector<float> room;
        if (in == rows && count == wanted) return room.data();
        int64_t pitch = widened_pitch<T>(k);
        if (int64_t(room.size()) < wanted * pitch) room.resize(size_t(wanted * pitch));
        for (int64_t row = 0; row < wanted; ++row) widen_row<T>(in + row * pitch_in, k, room.data() + row * pitch);
        rows = in, count = wanted;
        return room.data();
    }
};

// Multiplies rows with pairs of panels; body(tag, row, one, two) gets each row's 16 + 16 sums, to be stored from place(tag, row)
// on. With tiles that is while the next rows are multiplied: storing (and the activation) takes as many cycles as the tiles
// do, and other units. The lines that are stored to are asked for one pass earlier: a store that waits for its line holds up all
// that come after it.
template <class T, class Tag, class Body, class Place>
class Products {
    using E = typename T::Element;
    Body body;
    Place place;
    const int64_t parts, width;           // of the inputs
    alignas(64) float sums[2][MOST_PARTS][PART_SUMS];
    Tag waiting{};                        // whose sums wait in sums[side]: rows next ... count, from row first on
    const E* waiting_in = nullptr;        // their inputs, and the panels
    Panels waiting_panels{};
    int64_t waiting_k = 0;
    int64_t first = 0;
    int side = 0, next = 0, count = 0;
    Wanted wanted;
    Widened widened;

    // Numbers from one row of inputs to the next.
    int64_t pitch_in(int64_t k) const { return pitch_of<T>(width != 0 ? width : k); }

    // The sum of what the parts of a row's inputs give with a panel, of COUNT parts or any number of them (0).
    template <int64_t COUNT = 0, class At>
    Floats sum_of_parts(const Panel& panel, const E* row, int64_t k, const At& at) const {
        auto all = [&](const auto& each) {
            if constexpr (COUNT == 0) return sum_of_neighbours(parts, each);
            else return sum_of_neighbours<COUNT>(each);
        };
        if constexpr (T::PACK != Bytes::PACK) {
            return all(at);
        } else {
            const Rounded* rounded = rounded_of(row, k);
            const Floats scales = load(panel.scales);
            return all([&](int64_t part) {
                Words zeros = multiply_words(filled_words(rounded[part].zero), load_words(panel.sums + part * LANES));
                return as_it_is(converted(subtract_words(as_words(at(part)), zeros)) * scales * filled(rounded[part].scale));
            });
        }
    }

    void finish(int rows) {
        for (int stop = std::min(count, next + rows); next < stop; ++next) {
            const int64_t line = next / TILE * 2 * TILE * LANES + next % TILE * LANES;
            const E* row = waiting_in + (first + next) * pitch_in(waiting_k);
            auto sum = [&](const Panel& panel, int64_t at) {
                return sum_of_parts(panel, row, waiting_k, [&](int64_t part) { return load(sums[side][part] + at); });
            };
            body(waiting, first + next, sum(waiting_panels.a, line), sum(waiting_panels.b, line + TILE * LANES));
        }
    }

    // Rows begin ... stop, up to ROW_TILES tiles of them, while sums that wait are stored.
    template <int ROW_TILES>
    void multiply_some(Source source, const E* in, int64_t k, int64_t begin, int64_t stop, Panels now, Panels then,
                       const Tag& tag, uint32_t* keep) {
        int64_t pitch = pitch_in(k) * int64_t(sizeof(E)), steps = k / T::PACK, tiles = steps / TILE;
        auto* from = reinterpret_cast<const char*>(in) + begin * pitch;
        int some = int((count + tiles - 1) / tiles), claim = int((2 * TILE + tiles - 1) / tiles);
        auto store = [this, &tag, some, claim, row = begin, stop]() mutable {
            finish(some);
            for (int64_t last = std::min(stop, row + claim); row < last; ++row) __builtin_prefetch(place(tag, row), 1);
        };
        auto store_and_ask = [this, &store] { store(), wanted.ask(); };
        float* to = sums[1 - side][0];
        switch (source) {
            case COLD: return multiply_tiles<T, ROW_TILES, COLD>(from, pitch, now, then, steps, parts, keep, to, store);
            case WARM: return multiply_tiles<T, ROW_TILES, WARM>(from, pitch, now, then, steps, parts, keep, to, store_and_ask);
            case NARROW: return multiply_tiles<T, ROW_TILES, NARROW>(from, pitch, now, then, steps, parts, keep, to, store);
        }
    }

    // The words of panels of codes, in `words`: a's, then b's. How many rows, of the first ones, were multiplied on the way.
    int64_t widen_codes(const E* in, int64_t k, int64_t rows, Panels now, Panels then, const Tag& tag, uint32_t* words) {
        const int64_t steps = k / T::PACK;
        // Those of 4 bits are widened so fast that sums of many rows, which fill all registers, would only wait for it.
        if (now.a.quantized->bits == 8 && rows > MAX_ROWS && goes_through_codes(*now.a.quantized, steps))
            return multiply_few(in, k, rows, now, then, tag, words);
        if constexpr (T::PACK <= 2) {
            widen<T>(*now.a.quantized, now.a.number, steps, words, then.a.bytes(0));
            widen<T>(*now.b.quantized, now.b.number, steps, words + steps * LANES, then.b.bytes(0));
        }
        asm volatile("" ::: "memory");  // loads of tiles are not known to read this
        return 0;
    }

    // Whether a few rows are multiplied while codes are widened: each part begins with a line of codes.
    bool goes_through_codes(const Quantized& codes, int64_t steps) const {
        return LOCKSTEP_AVX512 && T::PACK == 2 && steps % (parts * 4) == 0 && !use_tiles<T>() && codes.order == nullptr;
    }

    // Rows with panels of codes; of more than a few the first ones, whose words are left in `keep`. Returns how many.
    int64_t multiply_few([[maybe_unused]] const E* in, [[maybe_unused]] int64_t k, int64_t rows, [[maybe_unused]] Panels now,
                         [[maybe_unused]] Panels then, [[maybe_unused]] const Tag& tag, [[maybe_unused]] uint32_t* keep) {
#if LOCKSTEP_AVX512
        if constexpr (T::PACK == 2) {
            const int64_t steps = k / T::PACK, some = steps / parts;
            Floats sum[MOST_PARTS][MAX_ROWS][2];
            const auto multiply = multiply_codes_for(*now.a.quantized, keep == nullptr ? rows : MOST_CODED_ROWS + 1);
            for (int64_t part = 0; part < parts; ++part)
                multiply(sum[part], now.a, now.b, part * some, some, steps, reinterpret_cast<const char*>(in),
                         pitch_in(k) * int64_t(sizeof(E)), then.a.bytes(0), then.b.bytes(0), keep);
            rows = std::min<int64_t>(rows, MAX_ROWS);  // of which there may be more in a pass: what they give is left
            for (int64_t row = 0; row < rows; ++row) {
                auto total = [&](int panel) {
                    return sum_of_neighbours(parts, [&](int64_t part) { return sum[part][row][panel]; });
                };
                body(tag, row, total(0), total(1));
            }
        }
#endif
        return rows;
    }

    // Rows of bytes with two panels, by the instruction of AVX2 for bytes.
    void multiply_byte_panels(const E* in, int64_t k, int64_t rows, Panels now, Panels then, const Tag& tag) {
        const char* wide = reinterpret_cast<const char*>(widened.of<T>(in, k, rows, pitch_in(k)));
        const int64_t pitch = pitch_in(k) * int64_t(sizeof(E)), wide_pitch = widened_pitch<T>(k) * int64_t(sizeof(float));
        const int64_t some = k / T::PACK / parts;
        alignas(64) Words sum[MOST_PARTS][WIDENED_ROWS][2];
        for (int64_t begin = 0, count; begin < rows; begin += count) {
            count = std::min(WIDENED_ROWS, rows - begin);
            const E* first_row = in + begin * pitch_in(k);
            for (int64_t part = 0; part < parts; ++part)
                multiply_byte_rows(now, then, part * some, some, reinterpret_cast<const char*>(first_row), pitch, wide + begin * wide_pitch,
                                   wide_pitch, count, sum[part]);
            for (int64_t row = 0; row < count; ++row) {
                auto total = [&](const Panel& panel, int which) {
                    return sum_of_parts(panel, first_row + row * pitch_in(k), k,
                                        [&](int64_t part) { return as_floats(sum[part][row][which]); });
                };
                body(tag, begin + row, total(now.a, 0), total(now.b, 1));
            }
        }
    }

#if !LOCKSTEP_AVX512
    // Rows with two panels of codes. Of more than a few, blocks of them go through codes one after the other.
    void multiply_coded_panels(const E* in, int64_t k, int64_t rows, Panels now, Panels then, const Tag& tag) {
        const Quantized& codes = *now.a.quantized;
        const char* inputs = reinterpret_cast<const char*>(in);
        int64_t pitch = pitch_in(k) * int64_t(sizeof(E));
        if constexpr (widens<T>()) {
            inputs = reinterpret_cast<const char*>(widened.of<T>(in, k, rows, pitch_in(k)));
            pitch = widened_pitch<T>(k) * int64_t(sizeof(float));
        }
        const int64_t some = k / parts;
        const bool by_lines = CAN_MULTIPLY_CODES && codes.arithmetic != ANY && some % (32 / codes.bits) == 0;
        float* floats = by_lines ? nullptr : reinterpret_cast<float*>(scratch(2 * k * LANES));
        if (!by_lines)
            for (const auto& [panel, next, side] : {std::tuple(&now.a, &then.a, 0), std::tuple(&now.b, &then.b, 1)})
                widen<InPanels<T>>(codes, panel->number, k, reinterpret_cast<uint32_t*>(floats + side * k * LANES), next->bytes(0));
        alignas(32) Floats sum[MOST_PARTS][WIDENED_ROWS][2];
        for (int64_t begin = 0, count; begin < rows; begin += count) {
            count = std::min(WIDENED_ROWS, rows - begin);
            for (int64_t part = 0; part < parts; ++part)
                if (by_lines) multiply_coded_rows(codes, now, then, {part * some, some, k}, inputs + begin * pitch, pitch, count, sum[part]);
                else multiply_float_rows(floats, {part * some, some, k}, inputs + begin * pitch, pitch, count, sum[part]);
            for (int64_t row = 0; row < count; ++row) {
                auto total = [&](int panel) {
                    return sum_of_neighbours(parts, [&](int64_t part) { return sum[part][row][panel]; });
                };
                body(tag, begin + row, total(0), total(1));
            }
        }
    }
#endif

   public:
    // of_parts: the inputs are these many equal parts, a power of two; each is added up by itself, then neighbours are added.
    // of_width: numbers of a row of which the inputs are part, 0 if they are all.
    Products(Body with, Place at, int64_t of_parts, int64_t of_width) : body(with), place(at), parts(of_parts), width(of_width) {}

    // `rows` rows of `in` [rows, k] (see pitch_of) with two panels. `in` can be read up to a multiple of 16 rows; what lies
    // there does not matter. then: the panels that come next. cold: nobody has seen these panels in this step. keep: room for
    // the words of both, where they are compressed and more rows come than one pass takes, in this call or the next.
    void multiply(const E* in, int64_t k, int64_t rows, Panels now, Panels then, bool cold, Tag tag, uint32_t* keep) {
        int64_t steps = k / T::PACK;
        auto& [a, b] = now;
        int64_t done = 0;  // rows
        if constexpr (CAN_MULTIPLY_BYTES && T::PACK == Bytes::PACK)
            if (rows >= LEAST_BYTE_ROWS) return multiply_byte_panels(in, k, rows, now, then, tag);
#if LOCKSTEP_AVX512
        if (a.quantized != nullptr) {
            if (rows <= MOST_CODED_ROWS && keep == nullptr && goes_through_codes(*a.quantized, steps))
                return void(multiply_few(in, k, rows, now, then, tag, nullptr));
            uint32_t* words = keep != nullptr ? keep : scratch(2 * steps * LANES);
            if (cold || keep == nullptr) done = widen_codes(in, k, rows, now, then, tag, words);
            a = {words}, b = {words + steps * LANES};
            then = now, cold = false;  // the next codes were asked for
        }
#else
        if constexpr (T::PACK <= 2)
            if (a.quantized != nullptr) return multiply_coded_panels(in, k, rows, now, then, tag);
#endif
        if (use_tiles<T>() && are_whole_tiles<T>(k, parts)) {
            if (keep != nullptr) a.words = keep, b.words = keep + steps * LANES;  // for those after the first
            for (int64_t begin = 0; begin < rows; begin += 2 * TILE) {
                int some = int(std::min<int64_t>(2 * TILE, rows - begin));
                Source source = !cold ? WARM : a.compressed != nullptr ? NARROW : COLD;
                if (some > TILE) multiply_some<2>(source, in, k, begin, begin + some, now, then, tag, keep);
                else multiply_some<1>(source, in, k, begin, begin + some, now, then, tag, keep);
                waiting = tag, first = begin, next = 0, count = some, side = 1 - side, cold = false;
                waiting_in = in, waiting_panels = now, waiting_k = k;
            }
            return;
        }
        if (a.compressed != nullptr) {
            uint32_t* words = scratch(2 * steps * LANES);
            for (int64_t tile = 0; tile < steps / TILE; ++tile) {
                decompress(*a.compressed, a.tile + tile, words + tile * TILE_WORDS, a.bytes(tile + AHEAD));
                decompress(*b.compressed, b.tile + tile, words + steps * LANES + tile * TILE_WORDS, b.bytes(tile + AHEAD));
            }
            a.words = words, b.words = words + steps * LANES;
        }
        int64_t passes = (rows - done + MAX_ROWS - 1) / MAX_ROWS;
        const char* inputs = reinterpret_cast<const char*>(in);
        int64_t pitch = pitch_in(k) * int64_t(sizeof(E));
        if constexpr (widens<T>()) {
            inputs = reinterpret_cast<const char*>(widened.of<T>(in, k, rows, pitch_in(k)));
            pitch = widened_pitch<T>(k) * int64_t(sizeof(float));
        }
#if LOCKSTEP_AVX2
        if constexpr (T::PACK <= 2) return sweep(in, inputs, pitch, k, rows, now, then, cold, tag);
#endif
        const int64_t first_rows = (rows + passes - 1) / std::max<int64_t>(1, passes);
        for (int64_t begin = done, now; begin < rows; begin += now) {
            now = (rows - begin + passes - 1) / passes, --passes;  // evenly: a row alone takes half as long as eight
            auto* from = inputs + begin * pitch;
            // What comes next is asked for in as many passes as it has panels: so memory and products have work all the time.
            const int pass = begin == 0 ? 0 : begin == first_rows ? 1 : 2;
            Floats sum[MOST_PARTS][MAX_ROWS][2];
            for (int64_t part = 0, some = steps / parts; part < parts; ++part) {
                const int64_t word = part * some, line = word * LANES;
                auto product = [&](auto asks, Asked asked) {
                    ::multiply<T, asks>(int(now), sum[part], a.words + line, b.words + line, from + word * WORD_BYTES<T>, pitch, some, asked);
                };
                auto bytes = [line](const Panel& panel) { return panel.bytes(0) + 4 * line; };
                if (!cold || pass == 2) product(std::integral_constant<int, 0>(), {});
                else if (first_rows == rows) product(std::integral_constant<int, 2>(), {bytes(then.a), bytes(then.b)});
                else product(std::integral_constant<int, 1>(), {bytes(pass == 0 ? then.a : then.b)});
            }
            auto put = [&](auto count) {
                for (int row = 0; row < now; ++row) {
                    auto total = [&](const Panel& panel, int which) {
                        return sum_of_parts<count>(panel, in + (begin + row) * pitch_in(k), k,
                                                   [&](int64_t part) { return sum[part][row][which]; });
                    };
                    body(tag, begin + row, total(a, 0), total(b, 1));
                }
            };
            if (parts == 1) put(std::integral_constant<int64_t, 1>());
            else if (parts == 2) put(std::integral_constant<int64_t, 2>());
            else put(std::integral_constant<int64_t, 4>());
        }
    }

    // While weights that were seen before are multiplied, by so many tiles of rows, ask for these panels.
    void want(const Weights& weights, std::initializer_list<int64_t> firsts, int64_t panels, int64_t times) {
        wanted.clear();
        if (panels == 0 || times <= 0) return;
        for (int64_t panel : firsts) wanted.add(weights.panel(panel).bytes(0), panels * weights.panel_bytes());
        wanted.spread(times);
    }

    // What still waits.
    void finish() { finish(count); }

   private:
#if LOCKSTEP_AVX2
    // Some rows at a time, whose inputs are floats; see multiply_sweep().
    void sweep(const E* in, const char* inputs, int64_t pitch, int64_t k, int64_t rows, Panels now, Panels then, bool cold, const Tag& tag) {
        const int64_t steps = k / T::PACK, some = steps / parts, sweeps = (rows + SWEPT_ROWS - 1) / SWEPT_ROWS;
        Floats sums[MOST_PARTS][SWEPT_ROWS][2];
        AskedFor wanted{cold, nullptr, nullptr, 0, (rows + MAX_ROWS - 1) / MAX_ROWS};
        for (int64_t number = 0; number < sweeps; ++number) {
            const int64_t begin = number * rows / sweeps, count = (number + 1) * rows / sweeps - begin;
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t word = part * some, line = word * LANES;
                wanted.one = then.a.bytes(0) + 4 * line, wanted.two = then.b.bytes(0) + 4 * line;
                multiply_sweep<T>(sums[part], count, now.a.words + line, now.b.words + line,
                                  inputs + begin * pitch + word * WORD_BYTES<T>, pitch, some, wanted);
            }
            wanted.number += (count + MAX_ROWS - 1) / MAX_ROWS;
            for (int64_t row = 0; row < count; ++row) {
                auto total = [&](int which) { return sum_of_neighbours(parts, [&](int64_t part) { return sums[part][row][which]; }); };
                body(tag, begin + row, total(0), total(1));
            }
        }
    }
#endif
};

template <class T, class Tag, class Body, class Place>
auto products_into(Body body, Place place, int64_t parts = 1, int64_t width = 0) {
    return Products<T, Tag, Body, Place>(body, place, parts, width);
}

// Bytes of weights that rows go through together, a block of rows after the other: they stay in a core's own cache,
// and so do the inputs of a block.
constexpr int64_t CACHED_BYTES = 512 << 10;

// How often tiles of so many rows are multiplied along k inputs with weights that were seen before.
template <class T>
int64_t warm_tiles(int64_t k, int64_t rows) {
    return std::max<int64_t>(0, (rows - 1) / (2 * TILE)) * (k / T::PACK / TILE);
}

// Rows that are widened at a time: blocks of the same size, whose bytes stay in a core's own cache beside the panels that come by.
constexpr int64_t WIDENED_BYTES = 384 << 10, LEAST_WIDENED = 8 * MAX_ROWS;
template <class T>
int64_t widened_rows(int64_t k, int64_t rows) {
    const int64_t most = std::clamp<int64_t>(WIDENED_BYTES / (widened_pitch<T>(k) * int64_t(sizeof(float))), LEAST_WIDENED, WIDENED_ROWS);
    const int64_t blocks = (rows + most - 1) / most, each = (rows + blocks - 1) / blocks;
    return blocks == 1 ? rows : std::min((each + MAX_ROWS - 1) / MAX_ROWS * MAX_ROWS, WIDENED_ROWS);
}

// Calls body(now, next, first, count) for all of so many panels or pairs and all rows, shared out among threads. Where rows are
// widened a thread goes through all panels with some rows before it takes others: so it widens each of them once.
template <class T, class Body>
inline void share_out_panels(Work& work, int64_t k, int64_t rows, int64_t panels, int64_t most, Body body) {
    const int64_t block = widens<T>() ? widened_rows<T>(k, rows) : rows, blocks = (rows + block - 1) / block;
    work.share_out(blocks * panels, most, [&](Share now, Share next) {
        while (now.size() > 0) {
            const int64_t number = now.begin / panels, before = number * panels, first = number * block;
            const Share here{now.begin - before, std::min(now.end - before, panels)};
            now.begin = before + here.end;
            const Share& behind = now.size() > 0 ? now : next;
            const int64_t then = behind.begin % panels;
            body(here, Share{then, then + behind.size()}, first, std::min(block, rows - first));
        }
    });
}

// Calls body(first, count) for blocks of rows: of as many as tiles take, or once for all.
template <class T, class Body>
inline void row_blocks(int64_t k, int64_t rows, Body body) {
    int64_t block = use_tiles<T>() && are_whole_tiles<T>(k, 1) ? 2 * TILE : rows;
    for (int64_t first = 0; first < rows; first += block) body(first, std::min(block, rows - first));
}

// Room for what `pairs` pairs of panels are widened to, if more rows than one pass takes will see them.
template <class T>
uint32_t* room_for(const Weights& weights, int64_t k, int64_t rows, int64_t pairs) {
    return LOCKSTEP_AVX512 && (weights.compressed() || weights.quantized()) && rows > 2 * TILE ? scratch(pairs * 2 * k / T::PACK * LANES) : nullptr;
}

// Where 16 columns of rows of width n go, gated: silu(in x gate) * (in x up), or with another activation.
template <class T>
struct GatedColumns {
    typename T::Element* out;
    Mask lanes;
    const float *gate_bias = nullptr, *up_bias = nullptr;
    const Adapters<T>* adapters = nullptr;
    int64_t first = 0, gate = 0, up = 0, expert = 0;  // of rows; numbers of both panels
};

template <class T, class In>
auto gated_products(int64_t n, int64_t activation, const float* with = nullptr, float factor = 0.f) {
    auto place = [pitch = pitch_of<T>(n)](const GatedColumns<T>& to, int64_t row) { return to.out + row * pitch; };
    return products_into<In, GatedColumns<T>>([place, activation, with, factor](const GatedColumns<T>& to, int64_t row, Floats gate, Floats up) {
        if (to.gate_bias != nullptr) gate = gate + load(to.gate_bias, to.lanes), up = up + load(to.up_bias, to.lanes);
        if (__builtin_expect(to.adapters != nullptr, 0)) to.adapters->add(gate, up, to.first + row, to.gate, to.up, to.expert);
        if (factor != 0) gate = gate * filled(factor);
        T::store(place(to, row), gated(activation, gate, up, with), to.lanes);
    }, place);
}

}  // namespace
