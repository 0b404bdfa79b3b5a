// Products of rows of bytes with panels of bytes on AVX2, exact, as many at a time as the instruction for bytes takes.
//
// vpmaddubsw multiplies bytes without a sign by bytes with one and adds neighbours, in 16 bits: two neighbours of more than 128 together
// may be more than that holds. So what they are beyond is taken off the second one, in a block of weights that all rows go through.
// The excess is multiplied by itself, as numbers of 16 bits, where there is any: few lines of a model's weights have some. Of 128 or less,
// 255 times it is at most 32,640. Sums of whole numbers have no order, so they are those of the other kernels.

#pragma once

#include "coded_rows.hpp"

namespace {

#if LOCKSTEP_AVX2

constexpr bool CAN_MULTIPLY_BYTES = true;
constexpr int64_t LEAST_BYTE_ROWS = 9;    // that are worth a block
constexpr int64_t BLOCK_WORDS = 128;      // along the inputs

// Words of a panel of which no two neighbours overflow, and the excess that was taken off.
class EvenWords {
    static constexpr int HALF = 8;        // words in a register
    static constexpr int16_t MOST = 128;  // that neighbours may be together
    alignas(64) uint32_t words[BLOCK_WORDS * LANES];
    alignas(32) uint32_t excess[2][BLOCK_WORDS][HALF];  // of half a line each, one after the other
    int32_t places[2][BLOCK_WORDS];                     // the word that each belongs to
    int64_t counts[2];

   public:
    void take(const uint32_t* from, int64_t count) {
        counts[0] = counts[1] = 0;
        for (int64_t word = 0; word < count; ++word) {
            const Words line = load_words(from + word * LANES);
            store(words + word * LANES, line);
            const __m256i sums[2] = {sums_of_neighbours(line.low), sums_of_neighbours(line.high)};
            const __m256i over = _mm256_or_si256(is_over(sums[0]), is_over(sums[1]));
            if (__builtin_expect(!_mm256_testz_si256(over, over), 0)) even_out(word, sums);
        }
    }

    // Adds the products of `count` words to sums of ROWS rows: of bytes, and of the same as numbers of 16 bits (see widen_row). ASKS: for
    // as many lines from `ahead` on.
    template <int ROWS, bool ASKS>
    void multiply(int64_t count, const char* in, int64_t pitch, const char* wide, int64_t wide_pitch, const char* ahead, Words (*sum)[2],
                  int column) const {
        Words sums[ROWS];
        for_each_of<ROWS>([&](auto row) { sums[row] = sum[row][column]; });
        const char* rows[(ROWS + 2) / 3];         // three share a pointer
        for_each_of<(ROWS + 2) / 3>([&](auto group) { rows[group] = in + 3 * group * pitch; });
        const __m256i ones = _mm256_set1_epi16(1);
        for (int64_t word = 0; word < count; ++word) {
            if (ASKS) __builtin_prefetch(ahead + 64 * word, 0, 2);
            Words line = load_words(words + word * LANES);
            asm("" : "+x"(line.low), "+x"(line.high));  // in registers: the compiler would load it for each row
            for_each_of<ROWS>([&](auto row) {
                const __m256i input = same_words(rows[row / 3] + row % 3 * pitch);
                auto& [low, high] = sums[row];
                low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_maddubs_epi16(input, line.low), ones));
                high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_maddubs_epi16(input, line.high), ones));
            });
            for (auto& pointer : rows) pointer += sizeof(uint32_t);
        }
        auto add_excess = [&](int half, auto of_row) {
            for (int64_t number = 0; number < counts[half]; ++number) {
                const __m256i beyond = _mm256_load_si256(reinterpret_cast<const __m256i*>(excess[half][number]));
                const char* second = wide + 8 * places[half][number] + 4;  // inputs 1 and 3 of the word
                for_each_of<ROWS>([&](auto row) {
                    auto& total = of_row(sums[row]);
                    total = _mm256_add_epi32(total, _mm256_madd_epi16(beyond, same_words(second + row * wide_pitch)));
                });
            }
        };
        add_excess(0, [](Words& words) -> __m256i& { return words.low; });
        add_excess(1, [](Words& words) -> __m256i& { return words.high; });
        for_each_of<ROWS>([&](auto row) { sum[row][column] = sums[row]; });
    }

    template <bool ASKS, int... BEFORE>
    static constexpr auto multiply_of(std::integer_sequence<int, BEFORE...>) {
        return std::array{&EvenWords::multiply<BEFORE + 1, ASKS>...};
    }

   private:
    static __m256i sums_of_neighbours(__m256i weights) { return _mm256_maddubs_epi16(_mm256_set1_epi8(1), weights); }
    static __m256i is_over(__m256i sums) { return _mm256_cmpgt_epi16(_mm256_abs_epi16(sums), _mm256_set1_epi16(MOST)); }
    // Takes off what the neighbours of a line are beyond.
    void even_out(int64_t word, const __m256i (&sums)[2]) {
        for (int half = 0; half < 2; ++half) {
            const __m256i most = _mm256_set1_epi16(MOST), least = _mm256_set1_epi16(-MOST);
            const __m256i beyond = _mm256_sub_epi16(sums[half], _mm256_max_epi16(_mm256_min_epi16(sums[half], most), least));
            auto* weights = reinterpret_cast<__m256i*>(words + word * LANES + half * HALF);
            _mm256_store_si256(weights, _mm256_sub_epi16(_mm256_load_si256(weights), _mm256_slli_epi16(beyond, 8)));
            _mm256_store_si256(reinterpret_cast<__m256i*>(excess[half][counts[half]]), beyond);
            places[half][counts[half]] = int32_t(word);
            counts[half] += !_mm256_testz_si256(beyond, beyond);
        }
    }
    static __m256i same_words(const char* from) {
        return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(from)));
    }
};

// Sums of rows with `count` words of two panels, from word `begin` on; those rows are of bytes, and widened.
inline void multiply_byte_rows(const Panels& now, const Panels& then, int64_t begin, int64_t count, const char* in, int64_t pitch,
                               const char* wide, int64_t wide_pitch, int64_t rows, Words (*sum)[2]) {
    constexpr auto COUNTS = std::make_integer_sequence<int, MAX_ROWS>();
    static constexpr std::array OF{EvenWords::multiply_of<false>(COUNTS), EvenWords::multiply_of<true>(COUNTS)};
    EvenWords block;
    for (int64_t row = 0; row < rows; ++row) sum[row][0] = sum[row][1] = filled_words(0);
    for (int column = 0; column < 2; ++column) {
        const uint32_t* words = (column == 0 ? now.a : now.b).words;
        const char* ahead = (column == 0 ? then.a : then.b).bytes(0);
        for (int64_t at = begin, some; at < begin + count; at += some) {
            some = std::min(BLOCK_WORDS, begin + count - at);
            block.take(words + at * LANES, some);
            for (int64_t passes = (rows + MAX_ROWS - 1) / MAX_ROWS, row = 0, each; row < rows; row += each, --passes) {
                each = (rows - row + passes - 1) / passes;
                (block.*OF[row == 0][size_t(each) - 1])(some, in + row * pitch + 4 * at, pitch, wide + row * wide_pitch + 8 * at, wide_pitch,
                                                        ahead + 4 * at * LANES, sum + row, column);
            }
        }
    }
}

#else

constexpr bool CAN_MULTIPLY_BYTES = false;
constexpr int64_t LEAST_BYTE_ROWS = 0;
inline void multiply_byte_rows(const Panels&, const Panels&, int64_t, int64_t, const char*, int64_t, const char*, int64_t, int64_t,
                               Words (*)[2]) {}

#endif

}  // namespace
