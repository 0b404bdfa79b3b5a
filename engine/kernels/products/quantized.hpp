// Weights as codes of 4 or 8 bits and scales, widened to what they stand for just before they are multiplied.
//
// A weight is (code - zero) * scale, computed in float and rounded once to the type of the model: what it would be if it
// were widened while the model is read. So products have the same bits either way, for any number of rows and with any kernels. A
// step of few rows takes as long as its weights take to come from memory, and these are a half or a quarter. Codes are whole numbers, or
// floats of 8 or 4 bits.
//
// Where inputs are rounded to 8 bits, too, codes are multiplied as they are: EightBitPanels.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "compressed.hpp"
#include "../core/numbers.hpp"

namespace {

// What Operation::weights points to, if they are quantised. A panel is chunks of 16 numbers, in the order of its memory. A
// line of codes is 16 words, in which number i of each word is of chunk i.
struct Quantized {
    const uint32_t* codes;   // [panels, lines of codes, 16]; of 4 bits each is 8 too large, so that none is negative
    const float* scales;     // [panels, groups, 16]: an output each
    const float* zeros;      // the same; null: all are 0
    int64_t bits;            // 4 or 8; 16: the codes are halves in the order of the panels' numbers, without scales
    int64_t groups;          // that follow one another along the inputs, each with as many; or as `order` says
    int64_t is_float;        // codes are floats, zeros null: FloatsOfEightBits, whose scales are FLOAT8 times as large, or FloatsOfFourBits
    const int32_t* order;    // [matrices, inputs]: the group of each input; null: groups are of neighbours
    int64_t panels_each;     // of a matrix
    int64_t arithmetic;      // by which codes may become weights: see coded_rows.hpp
};
enum Arithmetic : int64_t { ANY, BY_FLOATS, EXACT };  // with bfloat16's bits looked at; with sums of floats; weights need no rounding

// What Operation::weights points to, if inputs are rounded. A word is four weights that are neighbours along the inputs.
struct EightBitPanels {
    const uint32_t* words;   // [panels, words along the inputs, 16]
    const float* scales;     // [panels, 16]
    const int32_t* sums;     // [panels, parts, 16]: of the codes of each part of the inputs
    int64_t parts;
};

// body(0), body(1) ... of so many, each a constant: what they index stays in registers, which of long loops it may not.
template <class Body, int... NUMBERS>
inline void for_each_of(std::integer_sequence<int, NUMBERS...>, Body body) { (body(std::integral_constant<int, NUMBERS>()), ...); }
template <int COUNT, class Body>
inline void for_each_of(Body body) { for_each_of(std::make_integer_sequence<int, COUNT>(), body); }

constexpr int64_t code_lines(int64_t words, int64_t pack, int64_t bits) { return words * pack * bits / 32; }

#if LOCKSTEP_AVX512

// Codes of 4 bits as floats: a table of sixteen, of which a lane's lowest bits say which.
struct FourBits {
    static constexpr int BITS = 4;
    const Floats table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    template <int NUMBER>
    Floats of(Words codes) const { return _mm512_permutexvar_ps(shift_right<4 * NUMBER>(codes), table); }
};

#else

struct FourBits {
    static constexpr int BITS = 4;
    template <int NUMBER>
    Floats of(Words codes) const {
        return converted(subtract_words(and_words(shift_right<4 * NUMBER>(codes), filled_words(15)), filled_words(8)));
    }
};

#endif

// Floats of 4 bits, of each twice: a sign, 2 bits of exponent, 1 of mantissa. Scales are half as large.
struct FloatsOfFourBits {
    static constexpr int BITS = 4;
    static constexpr float TWICE[LANES] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const Floats table = load(TWICE);
    template <int NUMBER>
    Floats of(Words codes) const { return looked_up(table, shift_right<4 * NUMBER>(codes)); }
};

struct EightBits {
    static constexpr int BITS = 8;
    template <int NUMBER>
    Floats of(Words codes) const { return converted(shift_right_signed<24>(shift_left<24 - 8 * NUMBER>(codes))); }
};

// Bits of a float of 8 bits in their place among those of a float: its 2^-120th. That is exact for the smallest ones, too.
constexpr float FLOAT8 = 0x1p120f;
struct FloatsOfEightBits {
    static constexpr int BITS = 8;
    template <int NUMBER>
    Floats of(Words codes) const {
        return as_floats(and_words(shift_right_signed<4>(shift_left<24 - 8 * NUMBER>(codes)), filled_words(int(0x87f00000))));
    }
};

// Numbers of 16 outputs, as those of a chunk: each once for a word of one number, else those of half the outputs twice.
template <class T>
Floats of_chunk(const float* outputs, int part) {
    return T::PACK == 1 ? load(outputs) : twice(load(outputs), part);
}

// Codes of one line, from NUMBER on.
template <class T, class Codes, bool HAS_ZEROS, int NUMBER = 0>
inline void widen_line(const Codes& codes, Words line, const Floats* scales, const Floats* zeros, typename T::Element* out) {
    constexpr int EACH = 32 / Codes::BITS;
    if constexpr (NUMBER < EACH) {
        constexpr int ONE = NUMBER % T::PACK, TWO = (NUMBER + 1) % T::PACK;
        Floats one = codes.template of<NUMBER>(line), two = codes.template of<NUMBER + 1>(line);
        if (HAS_ZEROS) one = one - zeros[ONE], two = two - zeros[TWO];
        T::store(out + NUMBER * LANES, one * scales[ONE], two * scales[TWO]);
        widen_line<T, Codes, HAS_ZEROS, NUMBER + 2>(codes, line, scales, zeros, out);
    }
}

template <class T, class Codes, bool HAS_ZEROS>
void widen_panel(const Quantized& from, int64_t panel, int64_t words, typename T::Element* out, const char* ahead) {
    constexpr int64_t EACH = 32 / Codes::BITS;
    const Codes codes;
    const int64_t lines = code_lines(words, T::PACK, from.bits), each = lines / from.groups;
    const uint32_t* line = from.codes + panel * lines * LANES;
    for (int64_t group = panel * from.groups; group < (panel + 1) * from.groups; ++group) {
        Floats scales[T::PACK], zeros[T::PACK];
        for (int part = 0; part < T::PACK; ++part) {
            scales[part] = of_chunk<T>(from.scales + group * LANES, part);
            zeros[part] = HAS_ZEROS ? of_chunk<T>(from.zeros + group * LANES, part) : filled(0.f);
        }
        for (int64_t left = each; left > 0; --left, line += LANES, ahead += 64, out += EACH * LANES) {
            __builtin_prefetch(ahead);
            widen_line<T, Codes, HAS_ZEROS>(codes, load_words(line), scales, zeros, out);
        }
    }
}

// What two inputs have, whose numbers of 16 outputs these are, in the order of a chunk of words of two numbers. Of words of one, the first.
template <class T>
Floats of_inputs(const float* outputs, const int32_t* groups, int part) {
    const Floats first = load(outputs + groups[T::PACK == 1 ? part : 0] * LANES);
    return T::PACK == 1 ? first : in_turn(first, load(outputs + groups[1] * LANES), part);
}

// A line of codes, from NUMBER on; `groups`: of its inputs.
template <class T, class Codes, bool HAS_ZEROS, int NUMBER = 0>
inline void widen_ordered_line(const Codes& codes, Words line, const float* scales, const float* zeros, const int32_t* groups,
                               typename T::Element* out) {
    if constexpr (NUMBER < 32 / Codes::BITS) {
        Floats one = codes.template of<NUMBER>(line), two = codes.template of<NUMBER + 1>(line);
        if (HAS_ZEROS) one = one - of_inputs<T>(zeros, groups, 0), two = two - of_inputs<T>(zeros, groups, 1);
        T::store(out + NUMBER * LANES, one * of_inputs<T>(scales, groups, 0), two * of_inputs<T>(scales, groups, 1));
        widen_ordered_line<T, Codes, HAS_ZEROS, NUMBER + 2>(codes, line, scales, zeros, groups + 2, out);
    }
}

// The same as widen_panel() where groups are of any inputs (`actorder`, `desc_act`). Inputs stay in their places, so that sums are added
// up in the same order as those of widened weights: scales are looked up.
template <class T, class Codes, bool HAS_ZEROS>
void widen_ordered(const Quantized& from, int64_t panel, int64_t words, typename T::Element* out, const char* ahead) {
    constexpr int64_t EACH = 32 / Codes::BITS;
    const Codes codes;
    const int64_t lines = code_lines(words, T::PACK, from.bits), first = panel * from.groups * LANES;
    const uint32_t* line = from.codes + panel * lines * LANES;
    const int32_t* groups = from.order + panel / from.panels_each * words * T::PACK;
    const float* zeros = HAS_ZEROS ? from.zeros + first : nullptr;
    for (const uint32_t* end = line + lines * LANES; line < end; line += LANES, ahead += 64, groups += EACH, out += EACH * LANES) {
        __builtin_prefetch(ahead);
        widen_ordered_line<T, Codes, HAS_ZEROS>(codes, load_words(line), from.scales + first, zeros, groups, out);
    }
}

template <class T, class Codes, bool HAS_ZEROS>
void widen_any(const Quantized& from, int64_t panel, int64_t words, typename T::Element* out, const char* ahead) {
    if (from.order != nullptr) widen_ordered<T, Codes, HAS_ZEROS>(from, panel, words, out, ahead);
    else widen_panel<T, Codes, HAS_ZEROS>(from, panel, words, out, ahead);
}

#if LOCKSTEP_AVX512
template <class T>
using InPanels = T;
#else
// Numbers of bfloat16 as floats, which AVX2 multiplies: so codes of their panels lie as those of float.
struct WideBFloat16 : Float {
    static void store(float* to, Floats one, Floats two) { Float::store(to, rounded_to_bfloat16(one), rounded_to_bfloat16(two)); }
};
template <class T>
using InPanels = std::conditional_t<T::PACK == 2, WideBFloat16, T>;  // numbers of panels that are widened
#endif

// Halves as floats.
inline void widen_halves(const Quantized& from, int64_t panel, int64_t words, float* out, const char* ahead) {
    const char* halves = reinterpret_cast<const char*>(from.codes) + panel * words * LANES * 2;
    for (int64_t word = 0; word < words; word += 2, halves += 64, ahead += 64, out += 2 * LANES) {
        __builtin_prefetch(ahead);
        store(out, load_halves(halves)), store(out + LANES, load_halves(halves + 32));
    }
}

// The words of a panel, so many along the inputs. Asks for the codes of a panel that is wanted next, `ahead`.
template <class T>
void widen(const Quantized& from, int64_t panel, int64_t words, uint32_t* to, const char* ahead) {
    auto* out = reinterpret_cast<typename T::Element*>(to);
    if constexpr (T::PACK == 1)
        if (from.bits == 16) return widen_halves(from, panel, words, out, ahead);
    if (from.is_float && from.bits == 4) widen_panel<T, FloatsOfFourBits, false>(from, panel, words, out, ahead);
    else if (from.is_float) widen_panel<T, FloatsOfEightBits, false>(from, panel, words, out, ahead);
    else if (from.bits == 4 && from.zeros != nullptr) widen_any<T, FourBits, true>(from, panel, words, out, ahead);
    else if (from.bits == 4) widen_any<T, FourBits, false>(from, panel, words, out, ahead);
    else if (from.zeros != nullptr) widen_any<T, EightBits, true>(from, panel, words, out, ahead);
    else widen_any<T, EightBits, false>(from, panel, words, out, ahead);
}

// A panel of weights: its words, or where it is among compressed or quantised ones.
struct Panel {
    const uint32_t* words;
    const Compressed* compressed = nullptr;
    int64_t tile = 0;
    const Quantized* quantized = nullptr;
    int64_t number = 0;       // among the quantised ones
    int64_t num_bytes = 0;    // of its codes
    const float* scales = nullptr;  // where inputs are rounded: see EightBitPanels
    const int32_t* sums = nullptr;

    int64_t tile_bytes() const { return compressed != nullptr ? TILE_BYTES : 4 * TILE_WORDS; }
    const char* bytes(int64_t of_tile) const {
        if (quantized != nullptr) return reinterpret_cast<const char*>(quantized->codes) + number * num_bytes;
        auto* all = compressed != nullptr ? reinterpret_cast<const char*>(compressed->tiles) : reinterpret_cast<const char*>(words);
        return all + (tile + of_tile) * tile_bytes();
    }
};

struct Panels { Panel a, b; };

// The weights of an operation, `steps` words of `pack` numbers along the inputs.
class Weights {
    const Operation& op;
    int64_t steps, pack;

    const Quantized& codes() const { return *reinterpret_cast<const Quantized*>(op.weights); }
    const EightBitPanels& bytes() const { return *reinterpret_cast<const EightBitPanels*>(op.weights); }

   public:
    Weights(const Operation& of, int64_t along, int64_t each) : op(of), steps(along), pack(each) {}
    bool compressed() const { return op.flags & COMPRESSED; }
    bool quantized() const { return op.flags & QUANTIZED; }
    Panel panel(int64_t number) const {
        if (op.flags & ROUNDED)
            return {bytes().words + number * steps * TILE, nullptr, 0, nullptr, 0, 0, bytes().scales + number * LANES,
                    bytes().sums + number * bytes().parts * LANES};
        if (quantized()) return {nullptr, nullptr, 0, &codes(), number, panel_bytes()};
        if (!compressed()) return {op.weights + number * steps * TILE};
        return {nullptr, reinterpret_cast<const Compressed*>(op.weights), number * (steps / TILE)};
    }
    int64_t panel_bytes() const {
        if (quantized()) return code_lines(steps, pack, codes().bits) * 4 * LANES;
        return compressed() ? steps / TILE * TILE_BYTES : 4 * steps * TILE;
    }
};

}  // namespace
