// The tiles of AMX in software, for a CPU that has none: included before the kernels (tests/engine/kernels/emulation.py), it takes
// the place of the compiler's intrinsics.
//
// What an instruction does is written as in Intel's Software Developer's Manual, volume 2 (LDTILECFG, TILELOADD, TILESTORED, TILEZERO,
// TILERELEASE, TDPBF16PS, TDPBSSD, TDPBUSD): the order of the sums, one rounding to nearest even per multiply-add, denormals taken and given as
// zeros, rows and bytes beyond a tile's shape set to zero. What is an invalid opcode or a protection fault there ends the process here, with a line that says why.
// The registers are a thread's own, as on the CPU.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// The same CPUs as in vectors.hpp: kernels for AVX2 alone have no tiles.
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifndef __AMX_TILE__
#define __AMX_TILE__ 1
#endif
#ifndef __AMX_BF16__
#define __AMX_BF16__ 1
#endif
#ifndef __AMX_INT8__
#define __AMX_INT8__ 1
#endif

namespace {

// The kernel of the system gives tiles to who asks: this one always does.
template <class... Rest>
long syscall(long number, Rest... rest) {
    return number == SYS_arch_prctl ? 0 : ::syscall(number, rest...);
}

namespace emulated {

constexpr int TILES = 8, MOST_ROWS = 16, MOST_BYTES = 64;

[[noreturn]] void fault(const char* what) {
    std::fprintf(stderr, "emulated tiles: %s\n", what);
    std::abort();
}

void check(bool holds, const char* otherwise) {
    if (!holds) fault(otherwise);
}

struct Tile {
    alignas(64) uint8_t bytes[MOST_ROWS][MOST_BYTES];
};

struct Registers {
    bool configured = false;
    int rows[TILES] = {}, row_bytes[TILES] = {};
    Tile tiles[TILES] = {};

    Tile& at(int number) {
        check(configured, "no tiles are configured: invalid opcode");
        check(number >= 0 && number < TILES && rows[number] > 0, "a tile that is not configured: invalid opcode");
        return tiles[number];
    }
    // Zeros wherever a tile's shape does not reach.
    void clear_beyond(int number) {
        for (int row = 0; row < MOST_ROWS; ++row) {
            int kept = row < rows[number] ? row_bytes[number] : 0;
            std::memset(tiles[number].bytes[row] + kept, 0, size_t(MOST_BYTES - kept));
        }
    }
};

inline Registers& registers() {
    thread_local Registers of_this_thread;
    return of_this_thread;
}

inline void load_config(const void* from) {
    const auto* config = static_cast<const uint8_t*>(from);
    Registers fresh;
    check(config[0] <= 1, "a palette that the CPU has not: protection fault");
    if (config[0] == 1) {
        check(config[1] < MOST_ROWS, "a first row beyond all tiles: protection fault");
        for (int byte = 2; byte < 16; ++byte) check(config[byte] == 0, "a reserved byte is set: protection fault");
        for (int tile = 0; tile < MOST_ROWS; ++tile) {
            uint16_t bytes;
            std::memcpy(&bytes, config + 16 + 2 * tile, 2);
            int rows = config[48 + tile];
            if (tile >= TILES) {
                check(bytes == 0 && rows == 0, "more tiles than the CPU has: protection fault");
                continue;
            }
            check(bytes <= MOST_BYTES && rows <= MOST_ROWS, "a tile that is too large: protection fault");
            check((bytes == 0) == (rows == 0), "a tile without rows or without bytes: protection fault");
            fresh.row_bytes[tile] = bytes, fresh.rows[tile] = rows;
        }
        fresh.configured = true;
    }
    registers() = fresh;  // and all tiles are zero
}

inline void release() { registers() = Registers(); }

inline void zero(int number) { std::memset(&registers().at(number), 0, sizeof(Tile)); }

inline void load(int number, const void* base, int64_t stride) {
    Registers& all = registers();
    Tile& tile = all.at(number);
    for (int row = 0; row < all.rows[number]; ++row)
        std::memcpy(tile.bytes[row], static_cast<const uint8_t*>(base) + row * stride, size_t(all.row_bytes[number]));
    all.clear_beyond(number);
}

inline void store(int number, void* base, int64_t stride) {
    Registers& all = registers();
    const Tile& tile = all.at(number);
    for (int row = 0; row < all.rows[number]; ++row)
        std::memcpy(static_cast<uint8_t*>(base) + row * stride, tile.bytes[row], size_t(all.row_bytes[number]));
}

// What a product asks of the shapes of its tiles.
inline void check_shapes(Registers& all, int sum, int one, int other) {
    all.at(sum), all.at(one), all.at(other);
    check(sum != one && sum != other && one != other, "a product with one tile twice: invalid opcode");
    check(all.row_bytes[sum] % 4 == 0 && all.row_bytes[one] % 4 == 0 && all.row_bytes[other] % 4 == 0,
          "a row that is no whole words: invalid opcode");
    check(all.rows[sum] == all.rows[one], "other rows in the sum than in the first tile: invalid opcode");
    check(all.row_bytes[one] / 4 == all.rows[other], "other words in the first tile than rows in the second: invalid opcode");
    check(all.row_bytes[sum] == all.row_bytes[other], "other columns in the sum than in the second tile: invalid opcode");
}

// While this lives: denormals are zeros, rounding to nearest even, no exceptions, whatever the thread had chosen. The compiler moves no load and
// no store over its ends, and so no arithmetic of what is loaded after one and stored before the other.
class Rounding {
    const unsigned had = _mm_getcsr();

   public:
    Rounding() {
        constexpr unsigned MASKED = 0x1f80, DENORMAL_INPUTS = 0x0040, DENORMAL_RESULTS = 0x8000;
        _mm_setcsr(MASKED | DENORMAL_INPUTS | DENORMAL_RESULTS);
        asm volatile("" ::: "memory");
    }
    ~Rounding() {
        asm volatile("" ::: "memory");
        _mm_setcsr(had);
    }
};

// TDPBF16PS: the even and the odd numbers of a row are added up apart, then the two sums to each other, then to the tile.
[[gnu::noinline]] inline void multiply_bfloat16(int sum, int one, int other) {
    Registers& all = registers();
    check_shapes(all, sum, one, other);
    Rounding rounding;
    for (int row = 0; row < all.rows[sum]; ++row) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int word = 0; word < all.row_bytes[one] / 4; ++word) {
            uint32_t pair;
            std::memcpy(&pair, all.tiles[one].bytes[row] + 4 * word, 4);
            const __m512i words = _mm512_load_si512(all.tiles[other].bytes[word]), upper = _mm512_set1_epi32(int(0xffff0000u));
            even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(int(pair << 16))),
                                   _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), even);
            odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(int(pair & 0xffff0000u))),
                                  _mm512_castsi512_ps(_mm512_and_si512(words, upper)), odd);
        }
        float* to = reinterpret_cast<float*>(all.tiles[sum].bytes[row]);
        _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_add_ps(even, odd)));
    }
    all.clear_beyond(sum);
}

// TDPBSSD, and with unsigned bytes in the first tile TDPBUSD: four products of bytes to each sum of 32 bits, which wraps around.
template <class First>
[[gnu::noinline]] inline void multiply_bytes(int sum, int one, int other) {
    Registers& all = registers();
    check_shapes(all, sum, one, other);
    for (int row = 0; row < all.rows[sum]; ++row)
        for (int word = 0; word < all.row_bytes[one] / 4; ++word)
            for (int column = 0; column < all.row_bytes[sum] / 4; ++column) {
                uint32_t total;
                std::memcpy(&total, all.tiles[sum].bytes[row] + 4 * column, 4);
                for (int byte = 0; byte < 4; ++byte)
                    total += uint32_t(int(First(all.tiles[one].bytes[row][4 * word + byte])) *
                                      int(int8_t(all.tiles[other].bytes[word][4 * column + byte])));
                std::memcpy(all.tiles[sum].bytes[row] + 4 * column, &total, 4);
            }
    all.clear_beyond(sum);
}

}  // namespace emulated
}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig(config) emulated::load_config(config)
#define _tile_release() emulated::release()
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, base, stride) emulated::load(tile, base, int64_t(stride))
#define _tile_stored(tile, base, stride) emulated::store(tile, base, int64_t(stride))
#define _tile_dpbf16ps(sum, one, other) emulated::multiply_bfloat16(sum, one, other)
#define _tile_dpbssd(sum, one, other) emulated::multiply_bytes<int8_t>(sum, one, other)
#define _tile_dpbusd(sum, one, other) emulated::multiply_bytes<uint8_t>(sum, one, other)

#endif
