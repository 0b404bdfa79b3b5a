// Ranks that add up in the middle of a step, each with a team of threads, all threads of one process: under ThreadSanitizer, which knows
// the order that C++ promises, not the one that this CPU has. Prints how many sums were right.

#include "exchange/members.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

constexpr int64_t RANKS = 2, THREADS = 2, ROWS = 24, WIDTH = 8, LAYERS = 6, STEPS = 60;
constexpr int64_t WORDS = 4096, AREA = ROWS * WIDTH * 4, ARENA = WORDS + 2 * AREA;
enum Part : int64_t { WRITE, OFFERS, MEETS, SUMS, PARTS };  // of a layer

char* arenas[RANKS];

int64_t no_reason(int64_t, const int64_t*, int64_t) { return 0; }
float number(int64_t rank, int64_t round, int64_t at) { return float((rank * 31 + round * 7 + at * 3) % 1000); }
float* area(int64_t rank, int64_t round) { return reinterpret_cast<float*>(arenas[rank] + WORDS + round % 2 * AREA); }

struct Rank {
    int64_t rank, rounds = 0;
    Exchange exchange{};
    float results[ROWS * WIDTH] = {};

    explicit Rank(int64_t rank) : rank(rank) {
        exchange.rank = rank, exchange.size = RANKS, exchange.arenas = exchange.returned = arenas;
        exchange.rounds = &rounds, exchange.check = no_reason, exchange.crowded = 1;
    }

    void row(int64_t part, int64_t round, int64_t at) {
        float* own = area(rank, round) + at * WIDTH;
        for (int64_t i = 0; i < WIDTH; ++i) {
            if (part == WRITE) own[i] = number(rank, round, at * WIDTH + i);
            else results[at * WIDTH + i] = area(0, round)[at * WIDTH + i] + area(1, round)[at * WIDTH + i];
        }
    }
    // As step.cpp goes through a list, whose threads are OpenMP's.
    void take_part(Team& team, int64_t first, bool is_caller) {
        Operation op{};
        Step step{};
        op.extra = &exchange, step.tokens = ROWS;
        for (int64_t at = 0; at < LAYERS * PARTS; at = team.behind(at)) {
            int64_t part = at % PARTS, round = first + at / PARTS;
            bool is_callers_part = part == OFFERS || part == MEETS;
            if ((is_callers_part && !is_caller) || !team.enter(at)) continue;
            if (part == OFFERS) offer(op, step, team);
            else if (part == MEETS) meet(op, step, OFFERED, team);
            else team.work(at, is_caller).for_each(ROWS, [&](int64_t at_row) { row(part, round, at_row); });
            team.leave(at);
        }
    }
    void run() {
        for (int64_t step = 0; step < STEPS; ++step) {
            Team team(LAYERS * PARTS, THREADS);
            std::thread other([&] { take_part(team, step * LAYERS, false); });
            take_part(team, step * LAYERS, true);
            other.join();
            int64_t last = (step + 1) * LAYERS - 1;
            for (int64_t at = 0; at < ROWS * WIDTH; ++at)
                if (results[at] != number(0, last, at) + number(1, last, at)) std::printf("step %ld: a sum is wrong\n", long(step)), std::exit(1);
        }
    }
};

}  // namespace

int main() {
    for (auto& arena : arenas) arena = static_cast<char*>(std::aligned_alloc(64, ARENA)), std::memset(arena, 0, ARENA);
    Rank one(0), two(1);
    std::thread other([&] { two.run(); });
    one.run();
    other.join();
    std::printf("%ld sums\n", long(2 * STEPS));
}
