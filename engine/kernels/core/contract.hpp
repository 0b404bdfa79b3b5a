// What the caller passes, and the team of threads that goes through it.

#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <vector>

#include "waiting.hpp"  // of parallel/native

namespace {

constexpr int SHORT_SPINS = 16;  // before a waiting thread offers its core to others, who run if they are ready to
constexpr int SPINS = 1000;      // before it sleeps: about what a wake costs
constexpr long TEAM_SLEEP = 10'000'000;  // nanoseconds, should a wake be lost
constexpr int SHARES = 8;        // that a thread takes of an operation, one after the other

struct Share {
    int64_t begin, end;
    int64_t size() const { return std::max<int64_t>(0, end - begin); }
};

// What is behind one of `now`, then of `next`; itself if there is nothing.
inline int64_t behind_in(int64_t at, Share now, Share next) {
    return at + 1 < now.end ? at + 1 : next.size() > 0 ? next.begin : at;
}

// What the caller's thread does between two parts of an operation, so that links go on while products are computed.
struct Pending {
    void (*go_on)(const void*) = nullptr;
    const void* with = nullptr;
};

// The operation under way, for one of the threads that go through it.
struct Work {
    std::atomic<int64_t>& taken;  // parts handed out so far
    const int size;               // threads that may take some
    const Pending pending;

    int64_t take(int64_t count) {
        if (pending.go_on != nullptr) pending.go_on(pending.with);
        return taken.fetch_add(count, std::memory_order_relaxed);
    }

    // body(part, next) for parts of 0 ... total, of at most `most`: every thread takes some and comes back for more, so
    // that one which has to share its core with another process holds up no more than those. It takes the next part, which
    // may have nothing in it, before it begins with one: what that needs can be asked for.
    template <class Body>
    void share_out(int64_t total, int64_t most, Body body) {
        int64_t count = std::clamp<int64_t>(total / (size == 1 ? 1 : SHARES * size), 1, std::max<int64_t>(1, most));
        auto part = [&] {
            int64_t first = take(count);
            return Share{first, std::min(first + count, total)};
        };
        for (Share now = part(), next; now.size() > 0; now = next) {
            next = part();
            body(now, next);
        }
    }
    // body(row) for each of so many.
    template <class Body>
    void for_each(int64_t rows, Body body) {
        share_out(rows, rows, [&](Share now, Share) {
            for (int64_t row = now.begin; row < now.end; ++row) body(row);
        });
    }
};

// The threads that go through the operations of a step, one after the other. Whoever has a core takes part: an operation is over
// when all of it is taken and nobody is inside any more, so that a thread is waited for while it computes some of it, and only
// then. Where a router or a client needs its core, it gets that between two operations, and the others go on.
class Team {
    static constexpr int INSIDE = 16;         // bits
    std::atomic<uint64_t> state{0};           // the operation under way, then how many are inside
    std::atomic<int> passed{0};               // operations; what those wait for who sleep
    std::atomic<int> asleep{0};
    std::vector<std::atomic<int64_t>> taken;  // of each operation
    std::vector<std::atomic<int64_t>> ends;   // nanoseconds

    static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
    int64_t under_way() const { return int64_t(state.load(std::memory_order_acquire) >> INSIDE); }
    void futex(int what, int value, const timespec* at_most) {
        static_assert(sizeof(passed) == sizeof(int));
        syscall(SYS_futex, &passed, what, value, at_most, nullptr, 0);
    }

   public:
    const int size;
    const int64_t began = now();
    std::atomic<bool> failed{false};          // the step cannot come to its end
    Pending pending;                          // of the caller's thread alone

    Team(int64_t operations, int threads) : taken(size_t(operations)), ends(size_t(operations)), size(threads) {}

    // Go inside of an operation; false if it is over.
    bool enter(int64_t number) {
        uint64_t seen = state.load(std::memory_order_acquire);
        while (int64_t(seen >> INSIDE) == number)
            if (state.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return true;
        return false;
    }
    Work work(int64_t number, bool is_caller) { return {taken[size_t(number)], size, is_caller ? pending : Pending{}}; }

    // All of it is taken. Whoever leaves last begins the next one, unless somebody has come meanwhile, who will.
    void leave(int64_t number) {
        uint64_t empty = uint64_t(number) << INSIDE;
        if (state.fetch_sub(1, std::memory_order_acq_rel) - 1 != empty) return;
        int64_t none = 0;  // of those who leave last, the first one says when that was
        ends[size_t(number)].compare_exchange_strong(none, now(), std::memory_order_relaxed);
        uint64_t following = failed.load(std::memory_order_relaxed) ? taken.size() : uint64_t(number) + 1;
        if (!state.compare_exchange_strong(empty, following << INSIDE, std::memory_order_seq_cst)) return;
        passed.fetch_add(1, std::memory_order_seq_cst);
        if (asleep.load(std::memory_order_seq_cst) != 0) futex(FUTEX_WAKE_PRIVATE, size, nullptr);
    }

    // Waits until an operation is over; returns the one under way. Whoever waits offers its core, and sleeps in the end: a thread
    // that spins would use up the time that the one it waits for needs.
    int64_t behind(int64_t number) {
        for (int spins = 0; spins < SPINS; ++spins) {
            if (int64_t found = under_way(); found > number) return found;
            spins == SHORT_SPINS ? void(sched_yield()) : breathe();
        }
        asleep.fetch_add(1, std::memory_order_seq_cst);
        const timespec at_most{0, TEAM_SLEEP};
        for (;;) {
            int seen = passed.load(std::memory_order_seq_cst);
            if (under_way() > number) break;
            futex(FUTEX_WAIT_PRIVATE, seen, &at_most);
        }
        asleep.fetch_sub(1, std::memory_order_relaxed);
        return under_way();
    }

    // Of an operation, when all are over.
    double seconds(int64_t number) const {
        int64_t from = number == 0 ? began : ends[size_t(number) - 1].load(std::memory_order_relaxed);
        return 1e-9 * double(ends[size_t(number)].load(std::memory_order_relaxed) - from);
    }
};

enum Kind : int64_t {
#define OPERATION(kind, call) kind,
#define CALLERS OPERATION
#include "../operations.def"
};
// Of the thread that the caller called in: it may call back.
constexpr bool is_callers(int64_t kind) {
    switch (kind) {
#define OPERATION(kind, call)
#define CALLERS(kind, call) case kind: return true;
#include "../operations.def"
    }
    return false;
}

struct Operation {
    int64_t kind;
    const void* in;
    void* out;
    const uint32_t* weights;
    const void* more;      // bias, norm weights, second weights ...
    const void* extra;
    int64_t n, k;
    int64_t flags;
    double number;
    int64_t a, b, c, d;
    double cap;            // of scores, 0 for none; or what a norm of values adds
    const float* factors;  // of queries, by position, or none; of rows, by row; weights of a norm of values
    void* scales;          // of keys and values, where these are kept as codes
    int64_t codes;         // which: see kv_cache.hpp
    int64_t width;         // numbers of a row, where those of the operation are part of a wider one; 0: they are all
    int64_t shared;        // numbers at the beginning of a key that are the same for all heads
    int64_t groups;        // of outputs, each with inputs of its own or the same ones; of the queries of a KV head; 0: one
    int64_t step_in, step_out;  // numbers from one group to the next
    const void* added;     // an AdapterSite, of what is added to a product's sums behind the bias, or none
};
constexpr int64_t ADD = 1, AS_FLOAT = 2, SELECTED = 4, COMPRESSED = 8, TO_CHOOSE = 16, CENTRED = 32, NORM_LAST = 64,
                  QUANTIZED = 128, WIDE = 256, ROUNDED = 512, QUERIES_ONLY = 1024, WITHIN = 2048, ACTIVATED = 4096, SEES_ALL = 8192;

constexpr int64_t BOTH = 2;  // norms over all heads: of queries, and of keys

// Of a kind of rotary embedding, [positions, half]: the first 2 * half numbers of a head are turned.
struct Angles {
    const float *cosines, *sines;
    int64_t half;
};

// What a row of a step reads of its request's recurrent state, and where it keeps it (states/state.hpp).
struct StateRow {
    int64_t reads;        // slot of the state at the row's boundary; -1: the context begins there
    uint8_t *from, *to;   // rings of the cell that the row begins in, and of those behind it; where it ends in the first, the same
    int64_t open;         // open rows between the boundary and the row's first token
    int64_t first_fill, num_fills;  // of the step's fills
};
struct StateFill {
    int64_t position, slot;  // multiples of the grid, rising in a row
};

// Some of a step's tokens that have the same adapter.
struct AdapterRun {
    int64_t adapter, first, count;  // the first one's place among all tokens that have adapters
};

struct Step {
    int64_t tokens, selected, num_tasks, table_width, block_size;
    const int64_t* ids;          // of the vocabulary; -1 - n: row n of those given
    const int64_t* slots;        // [tokens] where each token's key and value go
    const int64_t* chosen;       // [selected] tokens whose logits are wanted
    const int64_t* positions;    // [tokens]
    const Angles* angles;        // [kinds]
    const int64_t* starts;       // [rows] position of a row's first token
    const int64_t* counts;       // [rows]
    const int64_t* offsets;      // [rows] index of a row's first token in the step
    const int32_t* tables;       // [rows, table_width]
    const int32_t* tasks;        // [num_tasks, 4] row, first query, queries, where the result of the first one goes
    double* seconds;             // [kinds] time spent is added here, if given
    int64_t choose;              // whether CHOOSE is wanted, and what has the flag TO_CHOOSE
    int64_t apart;               // rows have one token each, and none reads what another one of this step stores
    int64_t num_chosen_tasks;
    const int32_t* chosen_tasks; // the same of the chosen tokens, of which result i is that of token i
    const void* draws;           // [selected] of Draw, how each token is chosen; null: all the most likely ones
    int64_t rows;                // of a model with recurrent states; else 0
    const StateRow* states;      // [rows]
    const StateFill* fills;
    int64_t num_runs, num_chosen_runs;
    const AdapterRun* runs;         // of all tokens; none: no token has an adapter
    const AdapterRun* chosen_runs;  // of the chosen tokens
    const int64_t* adapters;        // [tokens] number of each one's adapter, 0 for none
    const int64_t* chosen_adapters;
    const int64_t* order;           // those tokens that have adapters, sorted by these
    const int64_t* chosen_order;
    const void* given;              // [planes, num_given, hidden]: what the stream begins with in place of an embedding, as of images;
                                    // the planes behind the first are added behind layers
    int64_t num_given;
    const int64_t* turned;          // [tokens] position by which heads are turned; -1 - n: row n of own_angles; none: those in positions
    const Angles* own_angles;       // [kinds], of tokens that have a position on each of several axes
    const int64_t* sees;            // [tokens] position of the last key that a token sees, rising in a row; none: its own
    int64_t windows_see;            // whether that is so in layers with a window only
};

// How many rows an operation goes through: a step's tokens, or those whose logits are wanted.
inline int64_t rows_of(const Operation& op, const Step& step) { return op.flags & SELECTED ? step.selected : step.tokens; }

}  // namespace
