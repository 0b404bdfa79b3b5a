// Members of a group as threads of one process: the collectives of shared memory under ThreadSanitizer, which knows the order that C++
// promises, not the one that this CPU has. Prints how many calls gave what they should.

#include "collectives.cpp"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr int64_t SIZE = 3, SLOT = 256, VIEW = 1024, REGION = SLOT / SIZE / LINE * LINE, VIEW_REGION = VIEW / SIZE / LINE * LINE;
constexpr int64_t ANNOUNCED = 2 * LINE, SENT = ANNOUNCED + 2 * LINE, ENVELOPES = SENT + SIZE * LINE, TAKEN = ENVELOPES + SIZE * LINE;
constexpr int64_t SLOTS = TAKEN + SIZE * LINE, LETTERS = SLOTS + 2 * SLOT, VIEWS_AT = LETTERS + 2 * SLOT, SEGMENT = VIEWS_AT + VIEWS * VIEW;
constexpr int ROUNDS = 200;

char* segments[SIZE];
std::atomic<int64_t> good{0};

int64_t no_reason(int64_t, const int64_t*, int64_t) { return 0; }

// A number that depends on the member, the call and the place.
float number(int64_t rank, int64_t call, int64_t at) { return float((rank * 31 + call * 7 + at * 3) % 1000); }

struct Member {
    int64_t rank;
    const char* terms[SIZE];
    Group group{};
    int64_t call = 0;

    explicit Member(int64_t rank) : rank(rank) {
        group.rank = rank, group.size = SIZE, group.slot_bytes = SLOT, group.region_bytes = REGION;
        group.view_bytes = VIEW, group.view_region_bytes = VIEW_REGION, group.own_bytes = VIEW_REGION, group.two_step_bytes = 300;
        group.counter_at = 0, group.notes_at = 8, group.announced_at = ANNOUNCED, group.sent_at = SENT, group.envelopes_at = ENVELOPES;
        group.taken_at = TAKEN, group.slots_at = SLOTS, group.letters_at = LETTERS, group.views_at = VIEWS_AT;
        group.members = segments, group.terms = terms, group.check = no_reason, group.patience.crowded = 1;
        group.letter_user[0] = group.letter_user[1] = -1;
    }

    std::vector<float> made(int64_t of, int64_t count) const {
        std::vector<float> numbers(static_cast<size_t>(count));
        for (int64_t at = 0; at < count; ++at) numbers[size_t(at)] = number(of, call, at);
        return numbers;
    }
    void check(bool is_right, const char* what) {
        if (!is_right) std::printf("rank %ld, call %ld: %s is wrong\n", long(rank), long(call), what), std::exit(1);
        ++good;
    }

    void gather(int64_t rows) {
        int64_t sizes[SIZE];
        std::vector<float> expected;
        for (int64_t of = 0; of < SIZE; ++of) {
            sizes[of] = rows + of;
            auto part = made(of, sizes[of]);
            expected.insert(expected.end(), part.begin(), part.end());
        }
        std::vector<float> whole(expected.size()), mine = made(rank, sizes[rank]);
        auto* given = reinterpret_cast<const char*>(mine.data());
        check(all_gather(group, given, reinterpret_cast<char*>(whole.data()), sizes, 4) == DONE && whole == expected, "all_gather");
        for (int64_t buffer = -1, times = 0; times < 4; ++times) {  // a view can be read until the second call after it
            int64_t before = buffer;
            buffer = all_gather_view(group, given, sizes, 4);
            for (int64_t each : {buffer, before < 0 ? buffer : before})
                check(std::memcmp(group.view(0, each), expected.data(), 4 * expected.size()) == 0, "all_gather_view");
        }
    }
    void reduce(int64_t count) {
        std::vector<float> total(static_cast<size_t>(count)), expected = made(0, count), given = made(rank, count);
        for (int64_t of = 1; of < SIZE; ++of)
            for (int64_t at = 0; at < count; ++at) expected[size_t(at)] += number(of, call, at);
        int64_t sizes[SIZE];
        for (int64_t of = 0; of < SIZE; ++of) sizes[of] = count / SIZE + (of < count % SIZE);
        bool done = all_reduce(group, reinterpret_cast<const char*>(given.data()), reinterpret_cast<char*>(total.data()), sizes, 4, FLOAT32) == DONE;
        check(done && total == expected, "all_reduce");
    }
    void exchange(int64_t rows) {
        int64_t sizes[2 * SIZE];
        std::vector<float> outgoing, expected;
        for (int64_t peer = 0; peer < SIZE; ++peer) {
            sizes[peer] = rows + peer, sizes[SIZE + peer] = rows + rank;
            for (int64_t at = 0; at < rows + peer; ++at) outgoing.push_back(number(rank * SIZE + peer, call, at));
            for (int64_t at = 0; at < rows + rank; ++at) expected.push_back(number(peer * SIZE + rank, call, at));
        }
        std::vector<float> incoming(expected.size());
        auto* given = reinterpret_cast<const char*>(outgoing.data());
        check(all_to_all(group, given, reinterpret_cast<char*>(incoming.data()), sizes, 4) == DONE && incoming == expected, "all_to_all");
        int64_t buffer = all_to_all_views(group, given, sizes, 4), bytes = 4 * (rows + rank);
        if (buffer == VIEWS) return;  // too much of it
        bool is_right = buffer >= 0;
        for (int64_t peer = 0; peer < SIZE && is_right; ++peer)
            is_right = std::memcmp(group.view(peer, buffer, rank), expected.data() + peer * (rows + rank), size_t(bytes)) == 0;
        check(is_right, "all_to_all_views");
    }
    void spread(int64_t count, int64_t source) {
        std::vector<float> expected = made(source, count), data = rank == source ? expected : std::vector<float>(expected.size());
        check(broadcast(group, reinterpret_cast<char*>(data.data()), 4 * count, source) == DONE && data == expected, "broadcast");
    }
    void pass_on(int64_t count) {  // from rank to rank; more than two letters have room for
        for (int64_t from = 0; from < SIZE; ++from) {
            std::vector<float> mine = made(from, count), came(mine.size());
            if (rank == from) check(send(group, reinterpret_cast<const char*>(mine.data()), 4 * count, (from + 1) % SIZE) == DONE, "send");
            if (rank != (from + 1) % SIZE) continue;
            check(receive(group, reinterpret_cast<char*>(came.data()), 4 * count, from) == DONE && came == mine, "receive");
        }
    }
    void run() {
        for (call = 0; call < ROUNDS; ++call) {
            int64_t rows = call % 40;
            gather(rows), reduce(1 + 5 * rows), exchange(rows), spread(1 + 4 * rows, call % SIZE), pass_on(1 + 8 * rows);
            int64_t ints[SIZE] = {};
            ints[rank] = call + rank;
            check(all_gather_ints(group, reinterpret_cast<char*>(ints), 8) == DONE && ints[0] == call && ints[SIZE - 1] == call + SIZE - 1,
                  "all_gather_ints");
        }
    }
};

}  // namespace

int main() {
    for (auto& segment : segments) segment = static_cast<char*>(std::aligned_alloc(LINE, SEGMENT)), std::memset(segment, 0, SEGMENT);
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < SIZE; ++rank) threads.emplace_back([rank] { std::make_unique<Member>(rank)->run(); });
    for (auto& each : threads) each.join();
    std::printf("%ld calls\n", long(good.load()));
}
