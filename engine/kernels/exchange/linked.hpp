// The exchange of a layer, or of a sum over ranks, with members on other hosts: messages over links in place of shared memory.
//
// Of each member on another host there is a mirror of its arena here. An offer is a message with the ids of the choices, then those rows
// that some expert on the receiving host needs: both sides find out which from the ids. It goes into the mirror, whose words then rise as
// those of an arena in shared memory do, so that SORT and SUM read both alike. Results go to each home in the order of its pairs, into
// memory of that member's own, where COMBINE finds them as in an arena. Where several members are on a host, a row crosses once: one of
// them receives it, into a mirror that all of them map.
//
// Nothing is acknowledged. Who has all results has been served by all, and they had taken its offer before, so its rows may be
// overwritten. Results are sent before a member goes on (HOME), when all others receive. Sums alternate between areas: who has the sums
// of all others knows that they have taken its sum before.

#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "../core/contract.hpp"
#include "links.hpp"    // of parallel/native
#include "waiting.hpp"

namespace {

constexpr int64_t OFFERED = 0, RETURNED = 16;  // words of an arena: layers so far; on cache lines of their own
constexpr int64_t OFFERED_ROWS = 1;            // how many are offered, not the same in each layer

enum MessageKind : int64_t { AN_OFFER = 1, RESULTS = 2, A_SUM = 3 };
enum Role : int64_t { TAKES = 1, POSTS = 2, REMOTE = 4 };  // of a peer's offers: taken here; of own ones: posted to it; on another host
enum Look : int64_t { LEARNED, NEVER_WAIT, ALWAYS_WAIT };  // for the others' rows, before products of what is there
enum Problem : int64_t { NONE, BROKEN, UNEXPECTED, GIVEN_UP };

// What goes between this member and another one. A member is a peer of itself, for `pass`.
struct Peer {
    int64_t stage;          // of the message that comes: 0 its header, 1 ids or numbers, 2 rows, 3 the header of results, 4 they
    int64_t header[2];      // note and bytes
    int64_t expected;       // results of own pairs from its experts
    int64_t pass;           // of products with its rows; 0: not yet
    int64_t is_returned;    // whether its results are on their way
    int64_t offer[2], results[2];  // headers of what goes to it
};

struct Linkage {
    Links* links;
    int64_t are_sums;
    Peer* peers;            // [size]
    const int64_t* hosts;   // [size] number of each member's host
    const int64_t* roles;   // [size]
    const int64_t* most;    // [size] rows that each may offer in this step
    int64_t area, area_bytes;  // of the sum under way, from the beginning of the arena
    int64_t look;
    double budget;          // seconds of looking before sleep, learned
    double arrival;         // seconds from an offer until all have come, learned
    double products;        // seconds that those of a layer take, learned
    double offered_at, began_at, first_pass, next_look;
    int64_t num_missing;    // offers of this layer
    const void* now;        // the exchange of the layer that was offered last, or of all sums
    int64_t problem, problem_rank, problem_note, problem_bytes;
};

struct Exchange {
    int64_t rank, size, num_experts, num_local, top_k, hidden;
    int64_t rows_at, ids_at, places_at, results_at;  // bytes from the beginning of each arena
    char* const* arenas;      // [size]
    char* const* returned;    // [size] where results are, as in an arena
    const int64_t* copies;    // [num_experts, most_copies] ranks that hold each expert in this layer, rising
    const int64_t* counts;    // [num_experts] how many hold it
    int64_t most_copies;
    const int64_t* numbers;   // [num_experts] of each expert among those held here
    const int64_t* line;      // [size + 1] rows of the members before each, by the headers of the step
    int64_t* sizes;           // [size] rows of each member in this layer, which SORT looks up: soon they offer others
    int64_t* firsts;          // [size] number of the first pair of each member
    int64_t* rounds;          // layers so far, in all steps
    int64_t* counted;         // [num_experts] pairs computed here so far, or none
    int64_t* begins;          // [num_local + 1] first pair of each expert
    const void** sources;     // [pairs] rows of the sorted pairs
    void* gathered;           // [pairs, hidden]
    Check check;
    int64_t crowded;          // more members than cores
    Linkage* linkage;         // none: all members share memory
    int64_t row_bytes;        // from one row to the next
};

inline int64_t* words_of(const Exchange& exchange, int64_t rank, int64_t which = OFFERED) {
    char* const* arenas = which == RETURNED ? exchange.returned : exchange.arenas;
    return reinterpret_cast<int64_t*>(arenas[rank]);
}
// A row's choice: number of an expert, and above it the tag of the row's adapter, which is the same at all members; 0 for none.
constexpr int64_t EXPERT_BITS = 16;
inline int64_t expert_of(int64_t choice) { return choice & ((int64_t(1) << EXPERT_BITS) - 1); }
inline int64_t adapter_tag_of(int64_t choice) { return choice >> EXPERT_BITS; }
// The rank that serves a member's row for its choice. Rows stand in a line, member by member, and each copy serves a span of it: see
// parallel/replicas.py.
inline int64_t owner_of(const Exchange& exchange, int64_t home, int64_t row, int64_t choice) {
    const int64_t expert = expert_of(choice);
    const int64_t* copies = exchange.copies + expert * exchange.most_copies;
    const int64_t count = exchange.counts[expert];
    if (count == 1) return copies[0];
    const int64_t total = std::max<int64_t>(exchange.line[exchange.size], 1);
    return copies[std::min(count - 1, (exchange.line[home] + row) * count / total)];
}
inline bool is_linked(const Exchange& exchange) { return exchange.linkage != nullptr; }
inline bool has_role(const Exchange& exchange, int64_t rank, Role role) {
    return is_linked(exchange) && (exchange.linkage->roles[rank] & role) != 0;
}
inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline void learn(double& value, double seconds) { value += (seconds - value) / 4; }

// What both ends of a message know of it: its kind, the layer or sum, and how many rows it has. Notes of collectives are smaller.
inline int64_t note_of(MessageKind kind, int64_t round, int64_t rows) { return kind << 56 | (round & 0xffffffff) << 24 | rows; }
constexpr int64_t MOST_ROWS = (1 << 24) - 1;

// Calls body(token) for those of a member's rows that some expert on a host needs, rising.
template <class Body>
void for_needed(const Exchange& exchange, int64_t home, int64_t rows, int64_t host, Body body) {
    auto* ids = reinterpret_cast<const int64_t*>(exchange.arenas[home] + exchange.ids_at);
    const int64_t* hosts = exchange.linkage->hosts;
    for (int64_t token = 0; token < rows; ++token)
        for (int64_t choice = 0; choice < exchange.top_k; ++choice)
            if (hosts[owner_of(exchange, home, token, ids[token * exchange.top_k + choice])] == host) {
                body(token);
                break;
            }
}

// Parts of a message: neighbours in memory are one.
struct Parts {
    std::vector<LinksPart>& list;
    int64_t num_bytes = 0;

    void add(const char* data, int64_t bytes) {
        num_bytes += bytes;
        if (list.size() > 1 && static_cast<const char*>(list.back().data) + list.back().num_bytes == data) list.back().num_bytes += bytes;
        else if (bytes > 0) list.push_back({data, bytes});
    }
};

// Post a message; fill(parts) adds what it is made of.
template <class Fill>
void post_message(const Exchange& exchange, int64_t peer, int64_t* header, int64_t note, Fill fill) {
    thread_local std::vector<LinksPart> list;
    list.assign(1, {header, 2 * sizeof(int64_t)});
    Parts parts{list};
    fill(parts);
    header[0] = note, header[1] = parts.num_bytes;
    Links& links = *exchange.linkage->links;
    links.post(links.self, peer, list.data(), int64_t(list.size()));  // if it is broken, the next wait finds out
}

// This member's rows and choices are in its arena, or its sums.
void post_offer(const Exchange& exchange, int64_t rows) {
    Linkage& linkage = *exchange.linkage;
    const char* arena = exchange.arenas[exchange.rank];
    linkage.num_missing = 0;
    for (int64_t rank = 0; rank < exchange.size; ++rank) {
        Peer& peer = linkage.peers[rank];
        peer.pass = peer.is_returned = peer.expected = 0;
        if (has_role(exchange, rank, TAKES)) ++linkage.num_missing;
        if (!has_role(exchange, rank, POSTS)) continue;
        if (linkage.are_sums) {
            post_message(exchange, rank, peer.offer, note_of(A_SUM, *exchange.rounds, 0),
                         [&](Parts& parts) { parts.add(arena + linkage.area, linkage.area_bytes); });
            continue;
        }
        post_message(exchange, rank, peer.offer, note_of(AN_OFFER, *exchange.rounds, rows), [&](Parts& parts) {
            parts.add(arena + exchange.ids_at, rows * exchange.top_k * int64_t(sizeof(int64_t)));
            for_needed(exchange, exchange.rank, rows, linkage.hosts[rank],
                       [&](int64_t token) { parts.add(arena + exchange.rows_at + token * exchange.row_bytes, exchange.row_bytes); });
        });
    }
    linkage.offered_at = seconds_now();
    if (linkage.are_sums) return;
    // Results come by owner in the order of the pairs: where each will be is known now.
    auto* ids = reinterpret_cast<const int64_t*>(arena + exchange.ids_at);
    for (int64_t pair = 0; pair < rows * exchange.top_k; ++pair) {
        int64_t owner = owner_of(exchange, exchange.rank, pair / exchange.top_k, ids[pair]);
        if (!has_role(exchange, owner, REMOTE)) continue;
        auto* places = reinterpret_cast<int64_t*>(exchange.returned[owner] + exchange.places_at);
        places[exchange.firsts[exchange.rank] + pair] = linkage.peers[owner].expected++;
    }
}

// The results of one home's pairs, which its experts here have computed.
void post_results(const Exchange& exchange, int64_t home) {
    Linkage& linkage = *exchange.linkage;
    const char* arena = exchange.arenas[exchange.rank];
    auto* places = reinterpret_cast<const int64_t*>(arena + exchange.places_at) + exchange.firsts[home];
    auto* ids = reinterpret_cast<const int64_t*>(exchange.arenas[home] + exchange.ids_at);
    post_message(exchange, home, linkage.peers[home].results, note_of(RESULTS, *exchange.rounds, 0), [&](Parts& parts) {
        for (int64_t pair = 0; pair < exchange.sizes[home] * exchange.top_k; ++pair)
            if (owner_of(exchange, home, pair / exchange.top_k, ids[pair]) == exchange.rank)
                parts.add(arena + exchange.results_at + places[pair] * exchange.row_bytes, exchange.row_bytes);
    });
}

// Goes on with what comes from a peer over its link, at most to its offer of this layer, or its results. 1: that is there; 0: not yet;
// -1: it never will, and linkage.problem says why.
int64_t receive(const Exchange& exchange, int64_t rank, int64_t which) {
    Linkage& linkage = *exchange.linkage;
    Peer& peer = linkage.peers[rank];
    Links& links = *linkage.links;
    const int64_t round = *exchange.rounds;
    char* mirror = exchange.arenas[rank];
    auto unexpected = [&] {
        linkage.problem = UNEXPECTED, linkage.problem_rank = rank;
        linkage.problem_note = peer.header[0], linkage.problem_bytes = peer.header[1];
        return -1;
    };
    auto arrived = [&](int64_t word) { __atomic_store_n(words_of(exchange, rank, word) + word, round, __ATOMIC_RELEASE); };
    auto all_came = [&] {
        if (--linkage.num_missing == 0) learn(linkage.arrival, seconds_now() - linkage.offered_at);
    };
    while (!has_arrived(words_of(exchange, rank, which) + which, round)) {
        if (linkage.problem != NONE) return -1;
        if (peer.stage == 0 && !has_role(exchange, rank, TAKES)) peer.stage = 3;  // a neighbour takes its offers
        const int64_t rows = peer.header[0] & MOST_ROWS, ids_bytes = rows * exchange.top_k * int64_t(sizeof(int64_t));
        auto* ids = reinterpret_cast<const int64_t*>(mirror + exchange.ids_at);
        auto take = [&](void* data, int64_t num_bytes) { return num_bytes == 0 ? 1 : links.take(links.self, rank, data, num_bytes); };
        int64_t outcome = 0;
        switch (peer.stage) {
            case 0: case 3: outcome = take(peer.header, sizeof peer.header); break;
            case 1: outcome = linkage.are_sums ? take(mirror + linkage.area, linkage.area_bytes) : take(mirror + exchange.ids_at, ids_bytes); break;
            case 2: outcome = take(mirror + exchange.rows_at, peer.header[1] - ids_bytes); break;
            case 4: outcome = take(exchange.returned[rank] + exchange.results_at, peer.header[1]); break;
        }
        if (outcome < 0) {
            linkage.problem = BROKEN, linkage.problem_rank = rank;
            return -1;
        }
        if (outcome == 0) return 0;
        switch (peer.stage) {
            case 0:
                if (linkage.are_sums) {
                    if (peer.header[0] != note_of(A_SUM, round, 0) || peer.header[1] != linkage.area_bytes) return unexpected();
                } else if (int64_t offered = peer.header[0] & MOST_ROWS;
                           peer.header[0] != note_of(AN_OFFER, round, offered) || offered > linkage.most[rank]) {
                    return unexpected();
                }
                peer.stage = 1;
                break;
            case 1:
                if (linkage.are_sums) {
                    peer.stage = 0;
                    arrived(OFFERED);
                    break;
                } else {
                    int64_t num_bytes = ids_bytes;
                    for (int64_t pair = 0; pair < rows * exchange.top_k; ++pair)
                        if (ids[pair] < 0 || expert_of(ids[pair]) >= exchange.num_experts) return unexpected();
                    for_needed(exchange, rank, rows, linkage.hosts[exchange.rank], [&](int64_t) { num_bytes += exchange.row_bytes; });
                    if (peer.header[1] != num_bytes) return unexpected();
                    peer.stage = 2;
                }
                break;
            case 2:
                words_of(exchange, rank)[OFFERED_ROWS] = rows;
                peer.stage = 3;
                arrived(OFFERED);
                all_came();
                break;
            case 3:
                if (peer.header[0] != note_of(RESULTS, round, 0) || peer.header[1] != peer.expected * exchange.row_bytes)
                    return unexpected();
                peer.stage = 4;
                break;
            case 4:
                peer.stage = 0;
                arrived(RETURNED);
                break;
        }
    }
    return 1;
}

constexpr double LOOK_SECONDS = 50e-6;  // between two looks at links while products are computed: each costs a microsecond or two

// Without waiting: takes what has come for this layer, sends what can go. Called while products are computed, by the caller's thread.
void go_on_with(const void* pending) {
    auto& exchange = *static_cast<const Exchange*>(pending);
    Linkage& linkage = *exchange.linkage;
    double now = seconds_now();
    if (now < linkage.next_look) return;
    linkage.next_look = now + LOOK_SECONDS;
    linkage.links->flush(linkage.links->self, -1);
    for (int64_t rank = 0; rank < exchange.size; ++rank)
        if (has_role(exchange, rank, REMOTE)) receive(exchange, rank, RETURNED);
}

// Whether a member's rows, or results, are here; takes them from its link.
inline int64_t look_at(const Exchange& exchange, int64_t rank, int64_t which) {
    bool over_link = has_role(exchange, rank, which == RETURNED ? REMOTE : TAKES);
    return over_link ? receive(exchange, rank, which) : has_arrived(words_of(exchange, rank, which) + which, *exchange.rounds);
}

// Until the rows, or results, of all others are here, or of those on this host. With `sent` until all that was posted is on its way,
// too. False if that will not be.
bool await_all(const Exchange& exchange, int64_t which, bool sent, bool beside_only = false) {
    Linkage& linkage = *exchange.linkage;
    Links& links = *linkage.links;
    double began = 0, waited = 0, next_check = CHECK_SECONDS;
    int64_t awaited = 0;  // the first one who is not here
    auto is_remote = [&](int64_t rank) { return rank < exchange.size && has_role(exchange, rank, REMOTE); };
    auto give_up = [&](Problem problem) {
        if (linkage.problem == NONE) linkage.problem = problem, linkage.problem_rank = awaited % exchange.size;
        return false;
    };
    auto read_clock = [&] {
        double now = seconds_now() - began;
        if (is_remote(awaited)) links.seconds_waited[awaited] += now - waited;
        waited = now;
    };
    auto may_go_on = [&] {  // asks the communicator
        int64_t rank = awaited, target = *exchange.rounds;
        if (awaited == exchange.size) {  // all are here: who does not take what was posted?
            for (rank = 0; rank + 1 < exchange.size; ++rank)
                if (has_role(exchange, rank, REMOTE) && links.flush(links.self, rank) == 0) break;
            ++target;
        }
        return exchange.check(rank, words_of(exchange, rank, which) + which, target) == 0;
    };
    for (int64_t look = 1;; ++look) {
        int64_t flushed = links.flush(links.self, -1);
        for (; awaited < exchange.size; ++awaited) {
            if (awaited == exchange.rank || (beside_only && is_remote(awaited))) continue;
            int64_t outcome = look_at(exchange, awaited, which);
            if (outcome < 0) return false;
            if (outcome == 0) break;
            if (began > 0) read_clock();
        }
        if (awaited == exchange.size && (flushed == 1 || !sent)) break;
        if (flushed < 0) return give_up(BROKEN);
        for (int64_t rank = awaited + 1; rank < exchange.size; ++rank)  // what comes from them is received meanwhile
            if (rank != exchange.rank && look_at(exchange, rank, which) < 0) return false;
        if (began == 0) began = seconds_now();
        if (look % 4 != 0) {
            breathe();
            continue;
        }
        read_clock();
        if (waited >= next_check) {
            if (!may_go_on()) return give_up(GIVEN_UP);
            next_check = waited + CHECK_SECONDS;
        }
        if (waited >= linkage.budget) {
            bool by_link = awaited == exchange.size || has_role(exchange, awaited, which == RETURNED ? REMOTE : TAKES);
            double pause = by_link ? next_check - waited : std::min(std::max(waited / 8, SHORTEST_SLEEP), LONGEST_SLEEP);
            if (links.sleep(links.self, std::max(pause, 0.)) < 0) return give_up(BROKEN);
        } else if (exchange.crowded || waited >= ALONE_SECONDS) {
            sched_yield();
        }
    }
    if (began > 0)
        linkage.budget = waited <= LONGEST_BUDGET ? std::min(LONGEST_BUDGET, std::max(linkage.budget, 2 * waited))
                                                  : std::max(SHORTEST_BUDGET, linkage.budget / 2);
    return true;
}

// Whether to compute what is there before the others' rows have come. Experts that have rows of both go through memory twice then,
// which few rows pay for only if the others would be waited for as long as the products take. With many rows they cost nothing.
inline bool begins_without_others(const Exchange& exchange, int64_t rows) {
    const Linkage& linkage = *exchange.linkage;
    if (linkage.look != LEARNED) return linkage.look == NEVER_WAIT;
    constexpr int64_t MANY = 16;  // rows of an expert: the products' time is not that of reading its weights
    return rows * exchange.top_k >= MANY * exchange.num_experts || linkage.arrival >= linkage.products;
}

}  // namespace
