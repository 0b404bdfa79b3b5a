// Waiting for other members without burning a core that others need: parallel/rounds/waiting.py says why it is
// done like this.

#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace {

constexpr double CHECK_SECONDS = 0.01;  // how often a waiting member asks whether the wait still makes sense
constexpr double ALONE_SECONDS = 20e-6;  // looking again at once, before the core is offered to others
constexpr double TAKEN_SECONDS = 5e-6;  // an offer that lasts so long was accepted: others need this core
constexpr double SHORTEST_BUDGET = 50e-6, LONGEST_BUDGET = 2e-3;  // offering it, before sleep
constexpr double SHORTEST_SLEEP = 50e-6, LONGEST_SLEEP = 1e-3;
constexpr int LOOKS = 32;  // at a word, between two looks at the clock

struct Patience {
    int64_t crowded;                 // more members than cores: a peer may need this very core to go on
    double budget = LONGEST_BUDGET;  // seconds of looking before sleep
    int64_t shared = 0;              // 1: others needed this core during the last wait, so it is offered at once
};

inline void breathe() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until has_come(); false if give_up() says before that the wait makes no sense any more. sleep(waited, most) sleeps for
// at most so many seconds. The budget learns from how long the wait took.
template <class HasCome, class GiveUp, class Sleep>
bool wait_for(Patience& patience, int looks, HasCome has_come, GiveUp give_up, Sleep sleep) {
    using Clock = std::chrono::steady_clock;
    auto began = Clock::now();
    double waited = 0, next_check = CHECK_SECONDS;
    for (;;) {
        bool came = false;
        for (int look = 0; look < looks && !(came = has_come()); ++look) breathe();
        if (came) break;
        waited = std::chrono::duration<double>(Clock::now() - began).count();
        if (waited >= next_check) {
            if (give_up()) return false;
            next_check = waited + CHECK_SECONDS;
        }
        if (waited >= patience.budget) {
            sleep(waited, next_check - waited);
        } else if (patience.crowded || patience.shared || waited >= ALONE_SECONDS) {
            auto offered = Clock::now();
            sched_yield();
            patience.shared = std::chrono::duration<double>(Clock::now() - offered).count() >= TAKEN_SECONDS;
        }
    }
    patience.budget = waited <= LONGEST_BUDGET
        ? std::min(LONGEST_BUDGET, std::max(patience.budget, 2 * waited))
        : std::max(SHORTEST_BUDGET, patience.budget / 2);
    return true;
}

// Called while waiting until the word of a member is at least target; not 0: give up.
using Check = int64_t (*)(int64_t rank, const int64_t* word, int64_t target);

inline bool has_arrived(const int64_t* word, int64_t target) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) >= target;
}

// Until the word of this member is at least target; false if that will not be.
inline bool await(const int64_t* word, int64_t target, int64_t rank, Patience& patience, Check check) {
    if (has_arrived(word, target)) return true;
    return wait_for(
        patience, LOOKS, [=] { return has_arrived(word, target); }, [=] { return check(rank, word, target) != 0; },
        [](double waited, double) {
            double pause = std::min(std::max(waited / 8, SHORTEST_SLEEP), LONGEST_SLEEP);
            timespec length{0, long(pause * 1e9)};
            nanosleep(&length, nullptr);
        });
}

}  // namespace
