// The KV cache, and what is stored there of a token.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../core/contract.hpp"
#include "kv_codes.hpp"
#include "../core/numbers.hpp"
#include "../attention/turning.hpp"

namespace {

// The number, in the cache of a layer, of the block of 16 keys that holds a slot, for one KV head.
inline int64_t block_number(int64_t slot, int64_t head, int64_t heads, int64_t block_size) {
    int64_t sub = block_size / LANES;
    int64_t block = slot / block_size, within = slot % block_size / LANES;
    return (block * heads + head) * sub + within;
}

// Words of 32 bits of 16 keys or values of so many numbers each.
template <class T>
int64_t block_words(int64_t dim) { return LANES * dim / T::PACK; }

// Bytes of such a block as it is kept. Codes lie in the order of the numbers that they stand for.
template <class T>
int64_t block_bytes(const Operation& op, int64_t dim) {
    return LANES * dim * (op.codes == NO_CODES ? int64_t(sizeof(typename T::Element)) : 1);
}

// Numbers that a key has before its value, where it ends with that (WITHIN). Beside codes they are kept in bfloat16: what all heads
// share may be tens of times as large as the value, and would take its codes away.
inline int64_t apart_of(const Operation& op) { return op.flags & WITHIN ? op.c - op.n : 0; }

template <class T>
int64_t key_block_bytes(const Operation& op) {
    return block_bytes<T>(op, op.c) + (op.codes == NO_CODES ? 0 : LANES * apart_of(op));
}

// Scales in bfloat16 of the block of this number: of its 16 keys, then of its 16 values.
constexpr int64_t BLOCK_SCALES = 2 * LANES;
inline uint16_t* scales_of(const Operation& op, int64_t block) { return static_cast<uint16_t*>(op.scales) + block * BLOCK_SCALES; }

// Numbers of a row of queries, keys and values, or of queries alone. With `width`: other numbers may lie behind the queries.
inline int64_t projected_width(const Operation& op) {
    if (op.width != 0) return op.width;
    return op.flags & QUERIES_ONLY ? op.a * op.c : (op.a + op.b) * op.c + op.b * op.n;
}

// One key or value of a head into lane `lane` of its block.
template <class T>
void store_key(uint32_t* block, const typename T::Element* key, int64_t dim, int64_t lane) {
    for (int64_t word = 0; word < dim / T::PACK; ++word)
        std::memcpy(block + word * LANES + lane, key + word * T::PACK, sizeof(uint32_t));
}

template <class T>
void store_value(uint32_t* block, const typename T::Element* value, int64_t dim, int64_t lane) {
    uint32_t* to = block + lane / T::PACK * dim;
    if constexpr (T::PACK == 1) {
        std::memcpy(to, value, size_t(dim) * sizeof(*value));
    } else {  // one half of each word; dim is a multiple of 16
        for (int64_t i = 0; i < dim; i += LANES) store_halves(to + i, value + i, lane % 2 != 0);
    }
}

// What QKV is given: in [tokens, (heads + kv_heads) * dim + kv_heads * value_dim], a heads, b kv_heads, c dim, n value_dim; with
// QUERIES_ONLY in [tokens, heads * dim], whose keys and values another layer has stored. extra: keys,
// out: values; codes, scales: how they are kept; factors: weights [value_dim] of a norm of each value, or none, which adds cap; the rest:
// Turning. shared: numbers that all keys of a token begin with. They lie once before what each key has of its own; what is rotated is
// among them. width: numbers of a row, whose end are keys and values. WITHIN: a value is the end of its key.
template <class T>
class Projected {
    using E = typename T::Element;
    const Operation& op;
    const Step& step;
    int64_t heads, kv_heads, dim, value_dim, shared, pitch, values_at, keys_at;
    E* rows;
    Turning<T> turning;
    const Norm value_norm;
    const bool has_keys;
    char *all_keys, *all_values;
    int64_t key_bytes, value_bytes;  // of a block

    void keep_numbers(const E* key, const E* value, int64_t block, int64_t lane) const {
        store_key<T>(reinterpret_cast<uint32_t*>(all_keys + block * key_bytes), key, dim, lane);
        store_value<T>(reinterpret_cast<uint32_t*>(all_values + block * value_bytes), value, value_dim, lane);
    }

    static constexpr uint16_t ONE = 0x3f80;  // in bfloat16

    // The numbers of a key before its value.
    void keep_apart(const E* key, int64_t apart, char* block, int64_t lane) const {
        auto* to = reinterpret_cast<uint16_t*>(block) + lane * T::PACK;
        for (int64_t first = 0; first < apart; first += LANES) {
            alignas(32) uint16_t numbers[LANES];
            BFloat16::store(numbers, T::load(key + first, Mask(0xffff)), Mask(0xffff));
            for (int64_t i = 0; i < LANES; i += T::PACK) std::memcpy(to + (first + i) * LANES, numbers + i, 2 * T::PACK);
        }
    }

    void keep_codes(const E* key, const E* value, int64_t block, int64_t lane) const {
        const int64_t apart = apart_of(op);
        char *keys = all_keys + block * key_bytes, *values = all_values + block * value_bytes;
        keep_apart(key, apart, keys, lane);
        keys += 2 * LANES * apart + lane * T::PACK, values += lane / T::PACK * value_dim * T::PACK + lane % T::PACK;
        uint16_t* scales = scales_of(op, block);
        scales[lane] = encode<T>(op.codes, key + apart, dim - apart, [&](int64_t first, const int8_t* codes) {
            for (int64_t i = 0; i < LANES; i += T::PACK) std::memcpy(keys + (first + i) * LANES, codes + i, T::PACK);
        });
        if (apart > 0 && scales[lane] == 0) scales[lane] = ONE;  // what is apart is divided by it
        scales[LANES + lane] = encode<T>(op.codes, value, value_dim, [&](int64_t first, const int8_t* codes) {
            for (int64_t i = 0; i < LANES; ++i) std::memcpy(values + (first + i) * T::PACK, codes + i, 1);
        });
    }

    // Weights of keys not written yet are 0, but 0 times what an earlier owner left may not be. The
    // first key of a block comes first, except among the tokens of this step, which other threads store.
    void forget_earlier(int64_t token, int64_t block) const {
        int64_t slot = step.slots[token], written = 1;
        while (written < LANES && token + written < step.tokens && step.slots[token + written] == slot + written) ++written;
        auto* values = reinterpret_cast<E*>(all_values + block * value_bytes);
        for (int64_t later = written; later < LANES; ++later) {
            if (op.codes != NO_CODES) scales_of(op, block)[later] = scales_of(op, block)[LANES + later] = 0;
            else
                for (int64_t i = 0; i < value_dim; ++i) values[(later / T::PACK * value_dim + i) * T::PACK + later % T::PACK] = E(0);
        }
    }

   public:
    Projected(const Operation& op, const Step& step)
        : op(op), step(step), heads(op.a), kv_heads(op.b), dim(op.c), value_dim(op.n), shared(op.shared),
          pitch(pitch_of<T>(projected_width(op))), values_at(projected_width(op) - kv_heads * value_dim),
          keys_at(op.flags & WITHIN ? projected_width(op) - dim : values_at - kv_heads * (dim - shared)),
          rows(static_cast<E*>(const_cast<void*>(op.in))), turning(op, step),
          value_norm{op.factors, nullptr, float(op.cap), false}, has_keys(!(op.flags & QUERIES_ONLY)),
          all_keys(static_cast<char*>(const_cast<void*>(op.extra))), all_values(static_cast<char*>(op.out)),
          key_bytes(key_block_bytes<T>(op)), value_bytes(block_bytes<T>(op, value_dim)) {}

    // Norms and rotates what a token has for a KV head, queries and key, and stores key and value.
    void keep(int64_t token, int64_t head) const {
        int64_t group = heads / kv_heads, at = turning.row_of(token);
        E* row = rows + token * pitch;
        for (int64_t query = head * group; query < (head + 1) * group; ++query) turning.turn(row + query * dim, query, at);
        if (!has_keys) return;
        E* key = key_of(row, head);
        E* value = row + values_at + head * value_dim;
        turning.turn(key, heads + head, at);
        if (value_norm.weights != nullptr) norm_row<T>(value, value, value_norm, value_dim);
        int64_t slot = step.slots[token], lane = slot % LANES;
        int64_t block = block_number(slot, head, kv_heads, step.block_size);
        if (lane == 0) forget_earlier(token, block);
        op.codes == NO_CODES ? keep_numbers(key, value, block, lane) : keep_codes(key, value, block, lane);
    }

    // The key of a head, in one piece. What heads share is copied: others turn it, too, at the same time.
    E* key_of(E* row, int64_t head) const {
        if (shared == 0) return row + keys_at + head * dim;
        static thread_local std::vector<E> key;
        key.resize(size_t(dim));
        std::memcpy(key.data(), row + keys_at - shared, size_t(shared) * sizeof(E));
        std::memcpy(key.data() + shared, row + keys_at + head * (dim - shared), size_t(dim - shared) * sizeof(E));
        return key.data();
    }

    // Asks for the lines that keep() stores to.
    void fetch_places(int64_t token) const {
        if (!has_keys) return;
        int64_t slot = step.slots[token];
        for (int64_t head = 0; head < kv_heads; ++head) {
            int64_t block = block_number(slot, head, kv_heads, step.block_size);
            const char* keys = all_keys + block * key_bytes;
            const char* values = all_values + block * value_bytes + slot % LANES / T::PACK * (value_bytes * T::PACK / LANES);
            for (int64_t at = 0; at < key_bytes; at += 64) __builtin_prefetch(keys + at, 1);
            for (int64_t at = 0; at < value_bytes * T::PACK / LANES; at += 64) __builtin_prefetch(values + at, 1);
            if (op.codes != NO_CODES) __builtin_prefetch(scales_of(op, block), 1);
        }
    }
};

// Whether ATTEND does what QKV would: no row reads what another one of this step stores, and a thread has all queries of a key.
inline bool is_apart(const Operation& qkv, const Step& step) { return step.apart && !(qkv.flags & WITHIN); }

// Queries, keys and values of all tokens. Where no row reads what another one of this step stores, ATTEND does it: what a thread
// has stored it reads from its own cache.
template <class T>
void qkv(const Operation& op, const Step& step, Work& work) {
    if (is_apart(op, step)) return;
    Projected<T> projected(op, step);
    // Where a token goes is known long before it does, and in decode nothing has touched those lines since the last
    // step: asked for one token ahead, they come while this one is turned.
    auto is_near = [&](int64_t token) {  // in the block of the one before it
        return step.slots[token] % LANES != 0 && step.slots[token - 1] == step.slots[token] - 1;
    };
    work.share_out(step.tokens, step.tokens, [&](Share now, Share) {
        projected.fetch_places(now.begin);
        for (int64_t token = now.begin; token < now.end; ++token) {
            if (token + 1 < now.end && !is_near(token + 1)) projected.fetch_places(token + 1);
            for (int64_t head = 0; head < op.b; ++head) projected.keep(token, head);
        }
    });
}

}  // namespace
