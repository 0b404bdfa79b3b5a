// Weights of bfloat16 in 12 bits each, without loss: a step of few rows takes as long as its weights take to come
// from memory, and this is a quarter less.
//
// The upper byte of a weight is its sign and seven of the eight bits of its exponent. The exponents of a model's weights lie
// close together (Zhang et al., DFloat11, arXiv 2504.11651, find 2.6 bits of information in the eight, and give them codes
// of different length), so nearly all upper bytes of a matrix are among sixteen. Half a byte says which: all codes
// have one length, and two instructions widen 32 weights. The few others are patched in.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>

#include "../core/contract.hpp"

namespace {

constexpr int TILE = 16;               // rows of a tile; also words of 32 bits in each
constexpr int64_t TILE_WORDS = TILE * TILE;
constexpr int64_t TILE_WEIGHTS = 2 * TILE_WORDS;
constexpr int64_t TILE_BYTES = 768;    // compressed: lower bytes, then codes
constexpr int64_t CODES_AT = 512;
constexpr int CODES = 16;
constexpr int64_t AHEAD = 4;           // tiles of a panel that are asked for before they are needed

// What Operation::weights points to, if they are compressed.
struct Compressed {
    const uint8_t* tiles;       // [tiles, TILE_BYTES]
    const uint8_t* uppers;      // [CODES] the upper byte of each code
    const uint32_t* begins;     // [tiles + 1] where a tile's patches begin
    const uint32_t* patches;    // place in the tile (upper half), the weight that belongs there
};

#if defined(__AVX512VBMI__)

constexpr bool CAN_COMPRESS = true;

// Words (two weights each) of a tile, as they were. 64 lower bytes are those of two lines in turns; a word of codes is
// one weight each of four lines: of the third, the fourth, the first, the second, from its lowest bits on. Asks for the lines of
// a tile that will be wanted next, `ahead`.
inline void decompress(const Compressed& from, int64_t tile, uint32_t* to, const char* ahead) {
    const uint8_t* bytes = from.tiles + tile * TILE_BYTES;
    const __m512i uppers = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from.uppers)));
    auto put = [&](int line, __m512i codes, __m512i lower) {  // of a code, the upper two bits of six do not matter
        constexpr __mmask64 UPPER = 0xaaaaaaaaaaaaaaaa;
        _mm512_store_si512(to + line * TILE, _mm512_mask_permutexvar_epi8(lower, UPPER, codes, uppers));
    };
    for (int group = 0; group < 4; ++group) {
        for (int line = 0; line < 3; ++line)
            __builtin_prefetch(ahead + 64 * (3 * group + line));
        __m512i codes = _mm512_loadu_si512(bytes + CODES_AT + 64 * group);
        __m512i one = _mm512_loadu_si512(bytes + 128 * group), two = _mm512_loadu_si512(bytes + 128 * group + 64);
        put(4 * group, codes, one);
        put(4 * group + 1, _mm512_srli_epi16(codes, 4), _mm512_srli_epi16(one, 8));
        put(4 * group + 2, _mm512_slli_epi16(codes, 8), two);
        put(4 * group + 3, _mm512_slli_epi16(codes, 4), _mm512_srli_epi16(two, 8));
    }
    auto* weights = reinterpret_cast<char*>(to);
    for (uint32_t number = from.begins[tile]; number < from.begins[tile + 1]; ++number) {
        uint32_t patch = from.patches[number];
        uint16_t weight = uint16_t(patch);
        std::memcpy(weights + 2 * (patch >> 16), &weight, 2);
    }
}

// Two lines of weights: their lower bytes in turns, their upper bytes in turns.
struct Lines {
    __m512i lower, upper;
    explicit Lines(const uint16_t* from) {
        __m512i one = _mm512_loadu_si512(from), two = _mm512_loadu_si512(from + 2 * TILE);
        lower = _mm512_or_si512(_mm512_and_si512(one, _mm512_set1_epi16(0xff)), _mm512_slli_epi16(two, 8));
        upper = _mm512_or_si512(_mm512_srli_epi16(one, 8), _mm512_andnot_si512(_mm512_set1_epi16(0xff), two));
    }
};

// The code of each upper byte, or NONE.
class Coding {
    static constexpr uint8_t NONE = 0xff;
    alignas(64) uint8_t codes[256];

   public:
    explicit Coding(const uint8_t* uppers) {
        std::memset(codes, NONE, sizeof(codes));
        for (int code = CODES - 1; code >= 0; --code) codes[uppers[code]] = uint8_t(code);
    }
    __m512i of(__m512i upper) const {
        auto half = [&](int from) {  // looks at seven bits
            return _mm512_permutex2var_epi8(_mm512_load_si512(codes + from), upper, _mm512_load_si512(codes + from + 64));
        };
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(upper), half(0), half(128));
    }
    static __mmask64 without(__m512i codes) { return _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(char(NONE))); }
};

// The upper bytes that get a code: the most frequent ones (of every sixteenth tile), the first of equals.
void choose_uppers(const uint16_t* weights, int64_t tiles, uint8_t* uppers) {
    constexpr int64_t EVERY = 16;
    int64_t counts[256] = {};
    for (int64_t tile = 0; tile < tiles; tile += EVERY)
        for (int64_t i = 0; i < TILE_WEIGHTS; ++i) ++counts[weights[tile * TILE_WEIGHTS + i] >> 8];
    uint8_t order[256];
    std::iota(order, order + 256, 0);
    std::stable_sort(order, order + 256, [&](uint8_t one, uint8_t other) { return counts[one] > counts[other]; });
    std::copy(order, order + CODES, uppers);
}

// The upper bytes that have a code, and where the patches of each tile begin. Returns the number of patches, of all.
int64_t survey(const uint16_t* weights, int64_t tiles, uint8_t* uppers, uint32_t* begins, int threads) {
    choose_uppers(weights, tiles, uppers);
    const Coding coding(uppers);
#pragma omp parallel for num_threads(threads)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        int without = 0;
        for (int line = 0; line < TILE; line += 2)
            without += __builtin_popcountll(Coding::without(coding.of(Lines(weights + tile * TILE_WEIGHTS + 2 * TILE * line).upper)));
        begins[tile + 1] = uint32_t(without);
    }
    int64_t total = begins[0] = 0;
    for (int64_t tile = 0; tile < tiles; ++tile) begins[tile + 1] = uint32_t(total += begins[tile + 1]);
    return total;
}

// After the survey.
void compress(const uint16_t* weights, int64_t tiles, const uint8_t* uppers, const uint32_t* begins, uint32_t* patches,
              uint8_t* out, int threads) {
    const Coding coding(uppers);
    const __m512i first = _mm512_set1_epi16(0xf), second = _mm512_set1_epi16(0xf00);
#pragma omp parallel for num_threads(threads)
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const uint16_t* from = weights + tile * TILE_WEIGHTS;
        uint8_t* to = out + tile * TILE_BYTES;
        uint32_t patch = begins[tile];
        __m512i words = _mm512_setzero_si512();
        for (int line = 0; line < TILE; line += 2) {
            Lines lines(from + 2 * TILE * line);
            __m512i codes = coding.of(lines.upper);
            _mm512_storeu_si512(to + 32 * line, lines.lower);
            __m512i one = _mm512_and_si512(codes, first), two = _mm512_and_si512(codes, second);
            if (line % 4 == 0) {
                words = _mm512_or_si512(_mm512_slli_epi16(one, 8), _mm512_slli_epi16(two, 4));
            } else {
                words = _mm512_or_si512(words, _mm512_or_si512(one, _mm512_srli_epi16(two, 4)));
                _mm512_storeu_si512(to + CODES_AT + 16 * (line - 2), words);
            }
            for (__mmask64 without = Coding::without(codes); without != 0; without &= without - 1) {
                int which = __builtin_ctzll(without);
                uint32_t place = uint32_t(2 * TILE * (line + which % 2) + which / 2);
                patches[patch++] = place << 16 | from[place];
            }
        }
    }
}

#else

constexpr bool CAN_COMPRESS = false;
void decompress(const Compressed&, int64_t, uint32_t*, const char*) {}
int64_t survey(const uint16_t*, int64_t, uint8_t*, uint32_t*, int) { return 0; }
void compress(const uint16_t*, int64_t, const uint8_t*, const uint32_t*, uint32_t*, uint8_t*, int) {}

#endif

// Memory of this thread for so many words, until it asks again.
uint32_t* scratch(int64_t words) {
    struct Free {
        void operator()(uint32_t* memory) const { std::free(memory); }
    };
    thread_local std::unique_ptr<uint32_t, Free> memory;
    thread_local int64_t room = 0;
    if (words > room) {
        room = words;
        memory.reset(static_cast<uint32_t*>(std::aligned_alloc(64, (4 * size_t(words) + 63) / 64 * 64)));
    }
    return memory.get();
}

}  // namespace

extern "C" {

int64_t lockstep_can_compress() { return CAN_COMPRESS; }

// 12 bits for each of these weights, laid out in panels of whole tiles: first what they need, then they themselves.
int64_t lockstep_survey(const void* weights, int64_t tiles, void* uppers, void* begins, int64_t threads) {
    return survey(static_cast<const uint16_t*>(weights), tiles, static_cast<uint8_t*>(uppers), static_cast<uint32_t*>(begins),
                  int(threads));
}

void lockstep_compress(const void* weights, int64_t tiles, const void* uppers, const void* begins, void* patches, void* out,
                       int64_t threads) {
    compress(static_cast<const uint16_t*>(weights), tiles, static_cast<const uint8_t*>(uppers),
             static_cast<const uint32_t*>(begins), static_cast<uint32_t*>(patches), static_cast<uint8_t*>(out), int(threads));
}
}
