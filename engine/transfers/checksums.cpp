// The CRC-32 of zlib (polynomial 0x04C11DB7, reflected), by carry-less multiplication or ARM64's own instruction, and reading that checks on the way.
//
// A message is a polynomial over GF(2), the first bit of its first byte the highest power. A register of 128 bits stands for what
// was read so far: it is multiplied by a power of x modulo P and added to what comes that many bits later. What is left at the end
// has 16 bytes, and the CRC of the message; a table does the rest. Which instructions are used is chosen by the caller.

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#ifdef __aarch64__
#include <arm_acle.h>
#include <sys/auxv.h>
#else
#include <immintrin.h>
#endif

namespace {

constexpr uint32_t POLYNOMIAL = 0xEDB88320;  // bit 31 is x^0
constexpr int64_t PIECE = 256 << 10;         // bytes that are checked while a core's cache still has them
constexpr int MOST_SPANS = 64;               // of one system call

enum Kind : int64_t { TABLE = 0, NARROW = 1, WIDE = 2 };

struct Span {
    uint8_t* begin;
    int64_t size;
};

constexpr uint32_t times_x(uint32_t value) { return value >> 1 ^ (value & 1 ? POLYNOMIAL : 0); }

constexpr std::array<uint32_t, 256> make_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = times_x(value);
        table[byte] = value;
    }
    return table;
}

constexpr auto table = make_table();

uint32_t by_table(uint32_t state, const uint8_t* data, int64_t size) {
    for (int64_t i = 0; i < size; ++i) state = state >> 8 ^ table[(state ^ data[i]) & 255];
    return state;
}

#ifdef __aarch64__

// The instruction for this polynomial.
__attribute__((target("+crc"))) uint32_t by_narrow(uint32_t state, const uint8_t* data, int64_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        std::memcpy(&word, data, 8);
        state = __crc32d(state, word);
    }
    for (; size > 0; ++data, --size) state = __crc32b(state, *data);
    return state;
}

uint32_t by_wide(uint32_t state, const uint8_t* data, int64_t size) { return by_narrow(state, data, size); }

int64_t best_kind() { return getauxval(AT_HWCAP) & HWCAP_CRC32 ? NARROW : TABLE; }

#else

// x^n modulo P as a factor of 64 bits, whose highest bit is x^0.
constexpr uint64_t power(int n) {
    uint32_t value = 0x80000000;
    for (int i = 0; i < n; ++i) value = times_x(value);
    return uint64_t(value) << 32;
}

// Factors that move 128 bits on by so many. A product of reflected numbers has one bit too few, so each is x^-1 of what it says.
constexpr uint64_t earlier(int bits) { return power(bits + 64 - 1); }
constexpr uint64_t later(int bits) { return power(bits - 1); }

#define WITH_NARROW __attribute__((target("sse4.1,pclmul")))
#define WITH_WIDE __attribute__((target("sse4.1,pclmul,avx512f,vpclmulqdq")))

WITH_NARROW inline __m128i load(const uint8_t* data) { return _mm_loadu_si128((const __m128i*)data); }

// `before` moved on, and added to what is there.
WITH_NARROW inline __m128i folded(__m128i before, __m128i factors, __m128i there) {
    const __m128i sum = _mm_xor_si128(_mm_clmulepi64_si128(before, factors, 0x00), _mm_clmulepi64_si128(before, factors, 0x11));
    return _mm_xor_si128(sum, there);
}

// The state after the 16 bytes of a register and what follows them.
WITH_NARROW uint32_t finished(__m128i sum, const uint8_t* data, int64_t size) {
    const __m128i by_16 = _mm_set_epi64x(later(128), earlier(128));
    for (; size >= 16; data += 16, size -= 16) sum = folded(sum, by_16, load(data));
    alignas(16) uint8_t left[16];
    _mm_store_si128((__m128i*)left, sum);
    return by_table(by_table(0, left, 16), data, size);
}

WITH_NARROW uint32_t by_narrow(uint32_t state, const uint8_t* data, int64_t size) {
    if (size < 64) return by_table(state, data, size);
    const __m128i by_64 = _mm_set_epi64x(later(512), earlier(512)), by_16 = _mm_set_epi64x(later(128), earlier(128));
    __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(int(state)));
    __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
        a = folded(a, by_64, load(data)), b = folded(b, by_64, load(data + 16));
        c = folded(c, by_64, load(data + 32)), d = folded(d, by_64, load(data + 48));
    }
    return finished(folded(folded(folded(a, by_16, b), by_16, c), by_16, d), data, size);
}

WITH_WIDE inline __m512i load_wide(const uint8_t* data) { return _mm512_loadu_si512(data); }

WITH_WIDE inline __m512i folded_wide(__m512i before, __m512i factors, __m512i there) {
    const __m512i one = _mm512_clmulepi64_epi128(before, factors, 0x00), other = _mm512_clmulepi64_epi128(before, factors, 0x11);
    return _mm512_ternarylogic_epi64(one, other, there, 0x96);
}

WITH_WIDE uint32_t by_wide(uint32_t state, const uint8_t* data, int64_t size) {
    if (size < 256) return by_narrow(state, data, size);
    const __m512i by_256 = _mm512_broadcast_i32x4(_mm_set_epi64x(later(2048), earlier(2048)));
    const __m512i by_64 = _mm512_broadcast_i32x4(_mm_set_epi64x(later(512), earlier(512)));
    __m512i a = _mm512_xor_si512(load_wide(data), _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(state))));
    __m512i b = load_wide(data + 64), c = load_wide(data + 128), d = load_wide(data + 192);
    for (data += 256, size -= 256; size >= 256; data += 256, size -= 256) {
        a = folded_wide(a, by_256, load_wide(data)), b = folded_wide(b, by_256, load_wide(data + 64));
        c = folded_wide(c, by_256, load_wide(data + 128)), d = folded_wide(d, by_256, load_wide(data + 192));
    }
    a = folded_wide(folded_wide(folded_wide(a, by_64, b), by_64, c), by_64, d);
    for (; size >= 64; data += 64, size -= 64) a = folded_wide(a, by_64, load_wide(data));
    const __m128i by_16 = _mm_set_epi64x(later(128), earlier(128));
    __m128i sum = _mm512_castsi512_si128(a);
    sum = folded(sum, by_16, _mm512_extracti32x4_epi32(a, 1));
    sum = folded(sum, by_16, _mm512_extracti32x4_epi32(a, 2));
    sum = folded(sum, by_16, _mm512_extracti32x4_epi32(a, 3));
    return finished(sum, data, size);
}

int64_t best_kind() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return TABLE;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq") ? WIDE : NARROW;
}

#endif

uint32_t checked(int64_t kind, uint32_t state, const uint8_t* data, int64_t size) {
    if (kind == WIDE) return by_wide(state, data, size);
    return kind == NARROW ? by_narrow(state, data, size) : by_table(state, data, size);
}

}  // namespace

// The best kind that this CPU has instructions for.
extern "C" int64_t lockstep_crc32_kind() { return best_kind(); }

// The CRC of spans one after the other, going on from that of what came before.
extern "C" uint32_t lockstep_crc32(int64_t kind, uint32_t crc, const Span* spans, int64_t count) {
    uint32_t state = ~crc;
    for (int64_t i = 0; i < count; ++i) state = checked(kind, state, spans[i].begin, spans[i].size);
    return ~state;
}

// Fills spans from a file, and sets the CRC of what was read. Returns how many bytes that is, or the negative error.
extern "C" int64_t lockstep_read_checked(int64_t kind, int file, int64_t offset, const Span* spans, int64_t count, uint32_t* crc) {
    uint32_t state = ~uint32_t(0);
    int64_t total = 0, at = 0, inside = 0;  // the next byte goes to spans[at].begin + inside
    while (at < count) {
        iovec wanted[MOST_SPANS];
        int num = 0;
        int64_t bytes = 0, skipped = inside;
        for (int64_t i = at; i < count && num < MOST_SPANS && bytes < PIECE; ++i, skipped = 0) {
            const int64_t size = std::min(spans[i].size - skipped, PIECE - bytes);
            wanted[num++] = {spans[i].begin + skipped, size_t(size)};
            bytes += size;
        }
        ssize_t found = bytes == 0 ? 0 : preadv(file, wanted, num, offset + total);
        if (found < 0 && errno == EINTR) continue;
        if (found < 0) return -errno;
        if (found == 0 && bytes > 0) break;  // the file ends here
        total += found;
        for (; at < count && found >= spans[at].size - inside; ++at, inside = 0) {
            state = checked(kind, state, spans[at].begin + inside, spans[at].size - inside);
            found -= spans[at].size - inside;
        }
        if (found > 0) state = checked(kind, state, spans[at].begin + inside, found), inside += found;
    }
    *crc = ~state;
    return total;
}
