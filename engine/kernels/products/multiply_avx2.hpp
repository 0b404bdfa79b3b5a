// The innermost loops of products of floats with AVX2, and the order in which they go through many rows.
//
// Up to six rows go through a panel of weights, or up to three through two panels. The instructions are written down, since twelve
// sums, weights and inputs fill all 16 registers: compilers keep some of them in memory, or load the weights again for each row, and
// a loop takes up to twice as long. An output's products are added up in the order of its inputs, one at a time, by any of the loops.

#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "../core/numbers.hpp"

namespace {

alignas(32) constexpr uint32_t UPPER_HALVES[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

// Inputs of each row. Rows lie `pitch` bytes apart; `more` is the fourth one.
#define ROW_0 "(%[in])"
#define ROW_1 "(%[in],%[pitch])"
#define ROW_2 "(%[in],%[pitch],2)"
#define ROW_3 "(%[more])"
#define ROW_4 "(%[more],%[pitch])"
#define ROW_5 "(%[more],%[pitch],2)"

// Weights of eight outputs, `at` bytes behind a line of the first panel or of the second one: floats, or lower or upper halves of words.
#define FIRST "(%[weights])"
#define SECOND "(%[weights],%[second])"
#define WHOLE(at, panel, to) "vmovups " #at panel ", %%ymm" #to "\n\t"
#define LOWER(at, panel, to) WHOLE(at, panel, to) "vpslld $16, %%ymm" #to ", %%ymm" #to "\n\t"
#define UPPER(at, panel, to) WHOLE(at, panel, to) "vandps %[mask], %%ymm" #to ", %%ymm" #to "\n\t"
#define UPPER_BY(mask, at, panel, to) "vandps " #at panel ", %%ymm" #mask ", %%ymm" #to "\n\t"

#define INPUT(at, row, to) "vbroadcastss " #at row ", %%ymm" #to "\n\t"
#define FUSED(weights, input, sum) "vfmadd231ps %%ymm" #weights ", %%ymm" #input ", %%ymm" #sum "\n\t"

// Four to six rows with a panel, whose line is in registers 12 and 13. The sums of row i are in registers 2 i and 2 i + 1.
#define NARROW_ROW(at, row, one, two) INPUT(at, row, 14) FUSED(12, 14, one) FUSED(13, 14, two)
#define NARROW_4(at) NARROW_ROW(at, ROW_0, 0, 1) NARROW_ROW(at, ROW_1, 2, 3) NARROW_ROW(at, ROW_2, 4, 5) NARROW_ROW(at, ROW_3, 6, 7)
#define NARROW_5(at) NARROW_4(at) NARROW_ROW(at, ROW_4, 8, 9)
#define NARROW_6(at) NARROW_5(at) NARROW_ROW(at, ROW_5, 10, 11)
#define NARROW(rows, load, line, at) load(line, FIRST, 12) load(line + 32, FIRST, 13) NARROW_##rows(at)
#define UPPER_4(at, panel, to) UPPER_BY(15, at, panel, to)
#define UPPER_5(at, panel, to) UPPER_BY(15, at, panel, to)
#define UPPER_6(at, panel, to) UPPER_BY(15, at, panel, to)

// One to three rows with two panels, the rows' inputs in registers 12 to 14. The sums of row i are in registers 4 i to 4 i + 3.
#define INPUTS_1(at) INPUT(at, ROW_0, 12)
#define INPUTS_2(at) INPUTS_1(at) INPUT(at, ROW_1, 13)
#define INPUTS_3(at) INPUTS_2(at) INPUT(at, ROW_2, 14)
#define WIDE_1(one, two, three) FUSED(15, 12, one)
#define WIDE_2(one, two, three) WIDE_1(one, two, three) FUSED(15, 13, two)
#define WIDE_3(one, two, three) WIDE_2(one, two, three) FUSED(15, 14, three)
#define WIDE(rows, load, line, at) \
    INPUTS_##rows(at) load(line, FIRST, 15) WIDE_##rows(0, 4, 8) load(line + 32, FIRST, 15) WIDE_##rows(1, 5, 9) \
    load(line, SECOND, 15) WIDE_##rows(2, 6, 10) load(line + 32, SECOND, 15) WIDE_##rows(3, 7, 11)
#define UPPER_1(at, panel, to) UPPER_BY(11, at, panel, to)
#define UPPER_2(at, panel, to) UPPER_BY(11, at, panel, to)
#define UPPER_3 UPPER  // no register is left for the mask

// Sums come from memory and go there; those of the next row are 128 bytes behind.
#define LOADED(at, number) "vmovaps " #at "(%[sums]), %%ymm" #number "\n\t"
#define STORED(at, number) "vmovaps %%ymm" #number ", " #at "(%[sums])\n\t"
#define SUMS_1(move) move(0, 0) move(32, 1) move(64, 2) move(96, 3)
#define SUMS_2(move) SUMS_1(move) move(128, 4) move(160, 5) move(192, 6) move(224, 7)
#define SUMS_3(move) SUMS_2(move) move(256, 8) move(288, 9) move(320, 10) move(352, 11)
#define SUMS_4(move) move(0, 0) move(32, 1) move(128, 2) move(160, 3) move(256, 4) move(288, 5) move(384, 6) move(416, 7)
#define SUMS_5(move) SUMS_4(move) move(512, 8) move(544, 9)
#define SUMS_6(move) SUMS_5(move) move(640, 10) move(672, 11)
#define MASK_TO(number) "vmovaps %[mask], %%ymm" #number "\n\t"

// `left` times some lines of a panel, `bytes` of it and `taken` of a row; asks for memory that is wanted later.
#define LOOP(rows, before, lines, asks, bytes, taken) \
    asm volatile(SUMS_##rows(LOADED) before "1:\n\t" asks lines \
                 "add $" #bytes ", %[weights]\n\tadd $" #taken ", %[in]\n\tadd $" #taken ", %[more]\n\t" \
                 "dec %[left]\n\tjnz 1b\n\t" SUMS_##rows(STORED) "vzeroupper" \
                 : [weights] "+r"(weights), [in] "+r"(in), [more] "+r"(more), [asked] "+r"(asked), [left] "+r"(left) \
                 : [sums] "r"(sums), [pitch] "r"(pitch), [second] "r"(second), [stride] "r"(stride), [mask] "m"(UPPER_HALVES) \
                 : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
                   "xmm12", "xmm13", "xmm14", "xmm15")
#define NARROW_ASKS "prefetcht1 (%[asked])\n\tadd %[stride], %[asked]\n\t"
#define NARROW_ASKS_TWICE "prefetcht1 (%[asked])\n\tprefetcht1 64(%[asked])\n\tadd %[stride], %[asked]\n\t"
#define WIDE_ASKS "prefetcht1 (%[asked])\n\tprefetcht1 (%[asked],%[second])\n\tadd %[stride], %[asked]\n\t"
#define WIDE_ASKS_TWICE "prefetcht1 64(%[asked])\n\tprefetcht1 64(%[asked],%[second])\n\t" WIDE_ASKS
#define HALVES(rows, SHAPE, before, asks) LOOP(rows, before, SHAPE(rows, LOWER, 0, 0) SHAPE(rows, UPPER_##rows, 0, 4), asks, 64, 8)
#define TWO_FLOATS(rows, SHAPE, asks) LOOP(rows, "", SHAPE(rows, WHOLE, 0, 0) SHAPE(rows, WHOLE, 64, 4), asks, 128, 8)
#define PRODUCTS(rows, SHAPE, before) \
    if constexpr (ROWS == rows) { \
        if constexpr (T::PACK == 2) { \
            if constexpr (ASKS) HALVES(rows, SHAPE, before, SHAPE##_ASKS); \
            else HALVES(rows, SHAPE, before, ""); \
        } else { \
            const bool is_odd = left % 2 != 0; \
            if (left /= 2, stride *= 2; left > 0) { \
                if constexpr (ASKS) TWO_FLOATS(rows, SHAPE, SHAPE##_ASKS_TWICE); \
                else TWO_FLOATS(rows, SHAPE, ""); \
            } \
            if (left = 1; is_odd) LOOP(rows, "", SHAPE(rows, WHOLE, 0, 0), "", 64, 4); \
        } \
    }

// Adds the products of ROWS rows and `left` words of a panel, or of two, `second` bytes apart. Asks for what is at `asked`, and
// `stride` bytes further with each word.
template <class T, int ROWS, bool ASKS>
void add_products(Floats* sums, const char* weights, int64_t second, const char* in, int64_t pitch, int64_t left, const char* asked,
                  int64_t stride) {
    const char* more = in + 3 * pitch;
    PRODUCTS(1, WIDE, MASK_TO(11))
    PRODUCTS(2, WIDE, MASK_TO(11))
    PRODUCTS(3, WIDE, "")
    PRODUCTS(4, NARROW, MASK_TO(15))
    PRODUCTS(5, NARROW, MASK_TO(15))
    PRODUCTS(6, NARROW, MASK_TO(15))
}

#undef ROW_0
#undef ROW_1
#undef ROW_2
#undef ROW_3
#undef ROW_4
#undef ROW_5
#undef FIRST
#undef SECOND
#undef WHOLE
#undef LOWER
#undef UPPER
#undef UPPER_BY
#undef INPUT
#undef FUSED
#undef NARROW_ROW
#undef NARROW_4
#undef NARROW_5
#undef NARROW_6
#undef NARROW
#undef UPPER_4
#undef UPPER_5
#undef UPPER_6
#undef INPUTS_1
#undef INPUTS_2
#undef INPUTS_3
#undef WIDE_1
#undef WIDE_2
#undef WIDE_3
#undef WIDE
#undef UPPER_1
#undef UPPER_2
#undef UPPER_3
#undef LOADED
#undef STORED
#undef SUMS_1
#undef SUMS_2
#undef SUMS_3
#undef SUMS_4
#undef SUMS_5
#undef SUMS_6
#undef MASK_TO
#undef LOOP
#undef NARROW_ASKS
#undef NARROW_ASKS_TWICE
#undef WIDE_ASKS
#undef WIDE_ASKS_TWICE
#undef HALVES
#undef TWO_FLOATS
#undef PRODUCTS

template <class T, bool ASKS, int... BEFORE>
constexpr auto add_products_of(std::integer_sequence<int, BEFORE...>) { return std::array{&add_products<T, BEFORE + 1, ASKS>...}; }

constexpr int64_t MOST_WIDE = 3;                 // rows that go through two panels at once
constexpr int64_t SWEPT_ROWS = 4 * MAX_ROWS;     // whose sums are kept before they are handed on
constexpr int64_t MOST_ASKING = 4;               // groups of rows that ask for panels which come next
constexpr int64_t MOST_NEXT = 256 << 10;         // bytes of the next two panels, a part of the second cache, that one group asks for
constexpr int64_t AHEAD_IN_PANEL = 8 << 10;      // bytes, where it asks for what it goes through itself

// How panels that come from memory are asked for.
struct AskedFor {
    bool is_cold;                                // nobody has seen these panels in this step
    const char *one, *two;                       // what comes behind the two
    int64_t number, size;                        // of the first group of rows, and of all
};

// The products of up to SWEPT_ROWS rows, `pitch` bytes apart, with two panels: added up from 0 on. Groups of rows ask for the panels that
// come next, each for a part of them, so that memory and products have work all the time. One group of float32 asks for its own panel, or
// for nothing where it has up to three rows: they go through it as fast as it comes by itself.
template <class T>
void multiply_sweep(Floats (*sums)[2], int64_t rows, const uint32_t* a, const uint32_t* b, const char* in, int64_t pitch, int64_t steps,
                    AskedFor wanted) {
    constexpr auto COUNTS = std::make_integer_sequence<int, MAX_ROWS>();
    static constexpr std::array OF{add_products_of<T, false>(COUNTS), add_products_of<T, true>(COUNTS)};
    const int64_t groups = (rows + MAX_ROWS - 1) / MAX_ROWS, asking = std::min(wanted.size, MOST_ASKING), line = 4 * LANES;
    const int64_t second = reinterpret_cast<const char*>(b) - reinterpret_cast<const char*>(a);
    const bool asks_in_panel = asking == 1 && (T::PACK == 1 || 2 * steps * line > MOST_NEXT);
    for (int64_t row = 0; row < rows; ++row) sums[row][0] = sums[row][1] = filled(0.f);
    for (int panel = 0; panel < 2; ++panel) {
        auto* weights = reinterpret_cast<const char*>(panel == 0 ? a : b);
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t first = group * rows / groups, count = (group + 1) * rows / groups - first, number = wanted.number + group;
            if (panel == 1 && count <= MOST_WIDE) continue;
            const bool asks = wanted.is_cold && number < asking && (T::PACK == 2 || count > MOST_WIDE);
            const char* asked = asks_in_panel ? weights + AHEAD_IN_PANEL : (panel == 0 ? wanted.one : wanted.two) + number * steps * line / asking;
            OF[asks][size_t(count) - 1](sums[first] + panel, weights, second, in + first * pitch, pitch, steps, asked, line / asking);
        }
    }
}

}  // namespace
