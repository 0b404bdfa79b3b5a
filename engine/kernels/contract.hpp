// What the caller passes, and the team of threads that goes through it.

#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>

namespace {

constexpr int SPINS = 1000;    // before a waiting thread offers its core to others: about what a wake costs
constexpr long TEAM_SLEEP = 10'000'000;  // nanoseconds, should a wake be lost
constexpr int SHARES = 8;      // that a thread takes of an operation, one after the other

struct Share {
    int64_t begin, end;
    int64_t size() const { return std::max<int64_t>(0, end - begin); }
};
Share share(int64_t total, int member, int size) { return {total * member / size, total * (member + 1) / size}; }

// The threads that go through a step. One begins; the others join between two operations, once the system gives them a core:
// where a router or a client has work just then, nobody waits for theirs.
struct Team {
    int size = 1;                  // members of the operation under way
    std::atomic<int> arrived{0};
    std::atomic<int> phase{0};
    std::atomic<int> asleep{0};
    std::atomic<int64_t> next{0};  // tasks handed out in this phase
    std::atomic<bool> failed{false};  // the step cannot come to its end
    std::atomic<int> asked{0};     // threads that want to join so far
    std::atomic<int> joined{0};    // those that may
    int64_t operation = 0;         // with which those that joined last begin
    std::atomic<bool> over{false};

    // All members have passed all that is before it; the task counter starts again. Whoever waits for long sleeps:
    // on cores that others use, too, a thread that spins would use up the time that the one it waits for needs.
    // `following`: the operation that is behind it, for those who join, or -1 within one.
    void wait(int64_t following = -1) {
        if (size == 1) {
            next.store(0, std::memory_order_relaxed);
            if (following >= 0) let_in(following);
            return;
        }
        int mine = phase.load(std::memory_order_relaxed), members = size;
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == members - 1) {
            arrived.store(0, std::memory_order_relaxed);
            next.store(0, std::memory_order_relaxed);
            if (following >= 0) make_room(following);
            phase.store(mine + 1, std::memory_order_seq_cst);
            if (asleep.load(std::memory_order_seq_cst) != 0) futex(FUTEX_WAKE_PRIVATE, members, nullptr);
            joined.store(size - 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; spins < SPINS; ++spins) {
            if (phase.load(std::memory_order_acquire) != mine) return;
            _mm_pause();
        }
        asleep.fetch_add(1, std::memory_order_seq_cst);
        const timespec at_most{0, TEAM_SLEEP};
        while (phase.load(std::memory_order_seq_cst) == mine) futex(FUTEX_WAIT_PRIVATE, mine, &at_most);
        asleep.fetch_sub(1, std::memory_order_relaxed);
    }

    // Of a thread that does not begin the step: its number, and with which operation it begins; 0 if the step is over.
    int join(int64_t& first) {
        sched_yield();  // to whoever waits for this core
        int mine = asked.fetch_add(1, std::memory_order_relaxed) + 1;
        for (int spins = 0; joined.load(std::memory_order_acquire) < mine; ++spins) {
            if (over.load(std::memory_order_acquire)) return 0;
            if (spins < SPINS) _mm_pause();
            else sched_yield();
        }
        first = operation;
        return mine;
    }
    int64_t take(int64_t count) { return next.fetch_add(count, std::memory_order_relaxed); }

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

   private:
    void make_room(int64_t following) {
        int wanted = 1 + asked.load(std::memory_order_relaxed);
        if (wanted > size) size = wanted, operation = following;
    }
    void let_in(int64_t following) {
        make_room(following);
        if (size > 1) joined.store(size - 1, std::memory_order_release);
    }
    void futex(int what, int value, const timespec* at_most) {
        static_assert(sizeof(phase) == sizeof(int));
        syscall(SYS_futex, &phase, what, value, at_most, nullptr, 0);
    }
};

enum Kind : int64_t {
    EMBED, NORM, LINEAR, QKV, ATTEND, GATED, ROUTE, SORT, EXPERTS_UP, EXPERTS_DOWN, COMBINE, SELECT,
    OFFER, MEET, RETURN, HOME, BEST
};

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
};
constexpr int64_t ADD = 1, AS_FLOAT = 2, SELECTED = 4, COMPRESSED = 8;

struct Step {
    int64_t tokens, selected, num_tasks, table_width, block_size;
    const int64_t* ids;
    const int64_t* slots;        // [tokens] where each token's key and value go
    const int64_t* chosen;       // [selected] tokens whose logits are wanted
    const int64_t* positions;    // [tokens]
    const float* cosines;        // [positions, half]
    const float* sines;
    const int64_t* starts;       // [rows] position of a row's first token
    const int64_t* counts;       // [rows]
    const int64_t* offsets;      // [rows] index of a row's first token in the step
    const int32_t* tables;       // [rows, table_width]
    const int32_t* tasks;        // [num_tasks, 3] row, first query, queries
    double* seconds;             // [kinds] time spent is added here, if given
    int64_t choose;              // whether BEST is wanted
    int64_t apart;               // rows have one token each, and none reads what another one of this step stores
};

}  // namespace
