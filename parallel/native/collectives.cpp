// A whole collective of shared_memory.py in one call: write into the own slot, publish the round, wait for the others
// within bounds, copy or add up what they gave. The rounds, the words and the bytes are those of rounds.py, so
// members of one group may run either.

#include <cstring>

#include "sums.hpp"
#include "waiting.hpp"

namespace {

enum Outcome : int64_t { DONE, GIVEN_UP, OTHER_CALL, OTHER_BYTES };
enum Name : int64_t {
    ALL_GATHER_INTS, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, ALL_REDUCE, BROADCAST, ALL_GATHER_VIEW, ALL_TO_ALL_VIEWS, SEND,
    NAMES
};
constexpr int64_t LINE = 64;  // bytes
constexpr int64_t VIEWS = 3;  // buffers

// As in native_shared_memory_rounds.py.
struct Group {
    int64_t rank, size, slot_bytes, region_bytes, view_bytes, view_region_bytes, own_bytes, two_step_bytes;
    int64_t counter_at, notes_at, announced_at, sent_at, envelopes_at, taken_at, slots_at, letters_at, views_at;  // in a segment
    char* const* members;  // [size] segments
    const char** terms;    // [size] scratch
    Check check;
    Patience patience;
    int64_t known;         // round that all others are known to have reached
    int64_t views;         // calls so far that give views
    int64_t letters;       // written so far
    int64_t letter_user[2], letter_number[2];  // by slot: receiver, and how many letters it has read after this one
    int64_t culprit, found, expected;          // of a call that failed

    char* own() const { return members[rank]; }
    int64_t* word(int64_t member, int64_t at, int64_t number = 0) const {
        return reinterpret_cast<int64_t*>(members[member] + at) + number;
    }
    int64_t round() const { return *word(rank, counter_at); }
    char* slot(int64_t member, int64_t round, int64_t region = 0) const {
        return members[member] + slots_at + round % 2 * slot_bytes + region * region_bytes;
    }
    char* view(int64_t member, int64_t buffer, int64_t region = 0) const {
        return members[member] + views_at + buffer * view_bytes + region * view_region_bytes;
    }
    // By which slot: rounds that follow, bytes for each member.
    int64_t* announced(int64_t member, int64_t round) const {
        int64_t stride = (1 + size + 7) / 8 * LINE;
        return word(member, announced_at + round % 2 * stride);
    }
    bool arrived(int64_t member, int64_t at, int64_t target) {
        return await(word(member, at), target, member, patience, check);
    }
};

// What does not change between calls of one kind with tensors of one form.
struct Call {
    Group* group;
    int64_t row_bytes, kind;
    int64_t sizes[1];  // [size] rows, or elements; of all-to-all then [size] rows from each
};

// What of a tensor is for one member, or comes from it.
struct Part {
    char* address;
    int64_t length;
    int64_t within(int64_t low, int64_t most) const { return std::max<int64_t>(0, std::min(most, length - low)); }
    void copy_to(char* place, int64_t low, int64_t most) const { std::memcpy(place, address + low, within(low, most)); }
    void copy_from(const char* place, int64_t low, int64_t most) const { std::memcpy(address + low, place, within(low, most)); }
};

// The next round: its slot can be written when all others have read what was in it.
bool take_slot(Group& group, int64_t& round) {
    round = group.round() + 1;
    if (group.known < round - 1) {
        for (int64_t peer = 0; peer < group.size; ++peer)
            if (peer != group.rank && !group.arrived(peer, group.counter_at, round - 1)) return false;
        group.known = round - 1;
    }
    return true;
}

void publish(Group& group, int64_t round, int64_t note) {
    *group.word(group.rank, group.notes_at, round % 2) = note;
    __atomic_store_n(group.word(group.rank, group.counter_at), round, __ATOMIC_RELEASE);
}

Outcome await_round(Group& group, int64_t peer, int64_t round, int64_t note) {
    if (!group.arrived(peer, group.counter_at, round)) return GIVEN_UP;
    group.found = *group.word(peer, group.notes_at, round % 2);
    group.culprit = peer;
    return group.found == note ? DONE : OTHER_CALL;
}

int64_t note_of(Name name, int64_t num_bytes) { return name + num_bytes * NAMES; }

// Calls body(peer) for the others, each when it has published this round; begins with the next rank, so that
// not all read the same slot at once.
template <class Body>
Outcome for_peers(Group& group, int64_t round, int64_t note, Body body) {
    for (int64_t number = 1; number < group.size; ++number) {
        int64_t peer = (group.rank + number) % group.size;
        if (Outcome outcome = await_round(group, peer, round, note)) return outcome;
        if (Outcome outcome = body(peer)) return outcome;
    }
    group.known = round;
    return DONE;
}

// sizes: rows of each member. part: this member's, or none if it stands in whole already.
Outcome all_gather(Group& group, const char* part, char* whole, const int64_t* sizes, int64_t row_bytes) {
    int64_t most = 0, total = 0, step = group.slot_bytes, round;
    for (int64_t rank = 0; rank < group.size; ++rank) most = std::max(most, sizes[rank]), total += sizes[rank];
    int64_t note = note_of(ALL_GATHER, total * row_bytes);
    auto part_of = [&](int64_t member) {
        int64_t before = 0;
        for (int64_t rank = 0; rank < member; ++rank) before += sizes[rank];
        return Part{whole + before * row_bytes, sizes[member] * row_bytes};
    };
    Part place = part_of(group.rank), mine{part != nullptr ? const_cast<char*>(part) : place.address, place.length};
    for (int64_t low = 0; low < most * row_bytes; low += step) {
        if (!take_slot(group, round)) return GIVEN_UP;
        mine.copy_to(group.slot(group.rank, round), low, step);
        publish(group, round, note);
        if (part != nullptr) place.copy_from(part + low, low, step);  // while others write
        Outcome outcome = for_peers(group, round, note, [&](int64_t peer) {
            part_of(peer).copy_from(group.slot(peer, round), low, step);
            return DONE;
        });
        if (outcome) return outcome;
    }
    return DONE;
}

// Adds up this round's bytes of the members' terms; at: where they stand in the others' slots.
bool add_up(Group& group, int64_t kind, int64_t round, int64_t at, const char* mine, char* total, int64_t num_bytes) {
    for (int64_t rank = 0; rank < group.size; ++rank)
        group.terms[rank] = rank == group.rank ? mine : group.slot(rank, round) + at;
    return sum_kind(kind, group.terms, group.size, total, num_bytes);
}

Outcome nothing(int64_t) { return DONE; }

// sizes: elements of whole for each member; total gets this member's.
Outcome reduce_scatter(Group& group, const char* whole, char* total, const int64_t* sizes, int64_t row_bytes, int64_t kind) {
    int64_t most = 0, all = 0, before = 0, step = group.region_bytes, round;
    for (int64_t rank = 0; rank < group.size; ++rank) {
        if (rank == group.rank) before = all;
        most = std::max(most, sizes[rank]), all += sizes[rank];
    }
    int64_t note = note_of(REDUCE_SCATTER, all * row_bytes);
    Part mine{const_cast<char*>(whole) + before * row_bytes, sizes[group.rank] * row_bytes};
    for (int64_t low = 0; low < most * row_bytes; low += step) {
        if (!take_slot(group, round)) return GIVEN_UP;
        const char* from = whole;
        for (int64_t peer = 0; peer < group.size; from += sizes[peer++] * row_bytes)
            if (peer != group.rank)
                Part{const_cast<char*>(from), sizes[peer] * row_bytes}.copy_to(group.slot(group.rank, round, peer), low, step);
        publish(group, round, note);
        if (Outcome outcome = for_peers(group, round, note, nothing)) return outcome;
        add_up(group, kind, round, group.rank * step, mine.address + low, total + low, mine.within(low, step));
    }
    return DONE;
}

// sizes: elements of each member's part of a large tensor.
Outcome all_reduce(Group& group, const char* given, char* total, const int64_t* sizes, int64_t element_bytes, int64_t kind) {
    int64_t elements = 0, before = 0;
    for (int64_t rank = 0; rank < group.size; ++rank) {
        if (rank == group.rank) before = elements;
        elements += sizes[rank];
    }
    int64_t num_bytes = elements * element_bytes;
    if (group.size > 2 && num_bytes > group.two_step_bytes) {
        Outcome outcome = reduce_scatter(group, given, total + before * element_bytes, sizes, element_bytes, kind);
        return outcome ? outcome : all_gather(group, nullptr, total, sizes, element_bytes);
    }
    int64_t note = note_of(ALL_REDUCE, num_bytes), step = group.slot_bytes, round;
    Part mine{const_cast<char*>(given), num_bytes};
    for (int64_t low = 0; low < num_bytes; low += step) {
        if (!take_slot(group, round)) return GIVEN_UP;
        mine.copy_to(group.slot(group.rank, round), low, step);
        publish(group, round, note);
        if (Outcome outcome = for_peers(group, round, note, nothing)) return outcome;
        add_up(group, kind, round, 0, given + low, total + low, mine.within(low, step));
    }
    return DONE;
}

// sizes: rows to each member, then rows from each.
Outcome all_to_all(Group& group, const char* outgoing, char* incoming, const int64_t* sizes, int64_t row_bytes) {
    const int64_t *send = sizes, *receive = sizes + group.size, note = note_of(ALL_TO_ALL, 0);
    int64_t step = group.region_bytes, rounds = 1, round;
    auto part = [&](const char* address, const int64_t* rows, int64_t member) {
        for (int64_t rank = 0; rank < member; ++rank) address += rows[rank] * row_bytes;
        return Part{const_cast<char*>(address), rows[member] * row_bytes};
    };
    // Nobody knows how much the others send each other: each says how many rounds it needs itself.
    for (int64_t peer = 0; peer < group.size; ++peer)
        if (peer != group.rank) rounds = std::max(rounds, (send[peer] * row_bytes + step - 1) / step);
    for (int64_t low = 0; low < rounds * step; low += step) {
        if (!take_slot(group, round)) return GIVEN_UP;
        if (low == 0) {
            int64_t* announced = group.announced(group.rank, round);
            announced[0] = rounds;
            for (int64_t peer = 0; peer < group.size; ++peer) announced[1 + peer] = send[peer] * row_bytes;
        }
        for (int64_t peer = 0; peer < group.size; ++peer)
            if (peer != group.rank) part(outgoing, send, peer).copy_to(group.slot(group.rank, round, peer), low, step);
        publish(group, round, note);
        if (low == 0) part(incoming, receive, group.rank).copy_from(part(outgoing, send, group.rank).address, 0, INT64_MAX);
        Outcome outcome = for_peers(group, round, note, [&](int64_t peer) {
            Part received = part(incoming, receive, peer);
            if (low == 0) {
                const int64_t* announced = group.announced(peer, round);
                rounds = std::max(rounds, announced[0]);
                group.found = announced[1 + group.rank], group.expected = received.length;
                if (group.found != group.expected) return OTHER_BYTES;
            }
            received.copy_from(group.slot(peer, round, group.rank), low, step);
            return DONE;
        });
        if (outcome) return outcome;
    }
    return DONE;
}

// The next buffer for views, once take_slot() has returned: whoever began the call for views before this one does
// not read what was in it any more.
int64_t take_view(Group& group) { return group.views++ % VIEWS; }

// Parts go side by side into the segment of rank 0. Returns the buffer, or minus the outcome.
int64_t all_gather_view(Group& group, const char* part, const int64_t* sizes, int64_t row_bytes) {
    int64_t before = 0, total = 0, round;
    for (int64_t rank = 0; rank < group.size; ++rank) {
        if (rank == group.rank) before = total;
        total += sizes[rank] * row_bytes;
    }
    int64_t note = note_of(ALL_GATHER_VIEW, total);
    if (!take_slot(group, round)) return -GIVEN_UP;
    int64_t buffer = take_view(group);
    std::memcpy(group.view(0, buffer) + before, part, sizes[group.rank] * row_bytes);
    publish(group, round, note);
    Outcome outcome = for_peers(group, round, note, nothing);
    return outcome ? -outcome : buffer;
}

// What goes to others stays in the own segment, and the own part if that is small. Returns the buffer, VIEWS if what
// somebody gives does not fit, or minus the outcome.
int64_t all_to_all_views(Group& group, const char* outgoing, const int64_t* sizes, int64_t row_bytes) {
    const int64_t *send = sizes, *receive = sizes + group.size, note = note_of(ALL_TO_ALL_VIEWS, 0);
    int64_t fits = 1, round;
    for (int64_t peer = 0; peer < group.size; ++peer)
        if (peer != group.rank && send[peer] * row_bytes > group.view_region_bytes) fits = 0;
    if (!take_slot(group, round)) return -GIVEN_UP;
    int64_t buffer = take_view(group), *announced = group.announced(group.rank, round);
    announced[0] = fits;
    for (int64_t peer = 0; peer < group.size; ++peer) {
        int64_t num_bytes = send[peer] * row_bytes;
        announced[1 + peer] = num_bytes;
        bool stays = peer == group.rank ? num_bytes <= group.own_bytes : fits;
        if (stays) std::memcpy(group.view(group.rank, buffer, peer), outgoing, num_bytes);
        outgoing += num_bytes;
    }
    publish(group, round, note);
    Outcome outcome = for_peers(group, round, note, [&](int64_t peer) {
        const int64_t* announced = group.announced(peer, round);
        group.found = announced[1 + group.rank], group.expected = receive[peer] * row_bytes;
        fits &= announced[0];
        return group.found == group.expected ? DONE : OTHER_BYTES;
    });
    return outcome ? -outcome : fits ? buffer : VIEWS;
}

// The source's tensor stands in data already.
Outcome broadcast(Group& group, char* data, int64_t num_bytes, int64_t source) {
    int64_t note = note_of(BROADCAST, num_bytes), step = group.slot_bytes, round;
    Part all{data, num_bytes};
    for (int64_t low = 0; low < num_bytes; low += step) {
        if (!take_slot(group, round)) return GIVEN_UP;
        if (source == group.rank) all.copy_to(group.slot(source, round), low, step);
        publish(group, round, note);
        if (source == group.rank) continue;
        if (Outcome outcome = await_round(group, source, round, note)) return outcome;
        all.copy_from(group.slot(source, round), low, step);
    }
    return DONE;
}

Outcome send(Group& group, const char* data, int64_t num_bytes, int64_t to) {
    Part all{const_cast<char*>(data), num_bytes};
    int64_t step = group.slot_bytes;
    for (int64_t low = 0; low < num_bytes; low += step) {
        int64_t letter = group.letters % 2, user = group.letter_user[letter];
        if (user >= 0 && !group.arrived(user, group.taken_at + group.rank * LINE, group.letter_number[letter]))
            return GIVEN_UP;  // what was in it before has not been read
        all.copy_to(group.own() + group.letters_at + letter * step, low, step);
        int64_t* sent = group.word(group.rank, group.sent_at + to * LINE);
        int64_t number = *sent;
        *group.word(group.rank, group.envelopes_at + to * LINE, number % 2) = letter + 2 * all.within(low, step);
        __atomic_store_n(sent, number + 1, __ATOMIC_RELEASE);
        group.letter_user[letter] = to, group.letter_number[letter] = number + 1;
        ++group.letters;
    }
    return DONE;
}

Outcome receive(Group& group, char* data, int64_t num_bytes, int64_t source) {
    Part all{data, num_bytes};
    int64_t step = group.slot_bytes;
    for (int64_t low = 0; low < num_bytes; low += step) {
        int64_t* taken = group.word(group.rank, group.taken_at + source * LINE);
        int64_t number = *taken;
        if (!group.arrived(source, group.sent_at + group.rank * LINE, number + 1)) return GIVEN_UP;
        int64_t envelope = *group.word(source, group.envelopes_at + group.rank * LINE, number % 2);
        group.culprit = source, group.found = envelope / 2, group.expected = all.within(low, step);
        if (group.found != group.expected) return OTHER_BYTES;
        all.copy_from(group.members[source] + group.letters_at + envelope % 2 * step, low, step);
        __atomic_store_n(taken, number + 1, __ATOMIC_RELEASE);
    }
    return DONE;
}

// Rows of integers: the slot, then out [size, num_bytes].
Outcome all_gather_ints(Group& group, char* out, int64_t num_bytes) {
    int64_t note = note_of(ALL_GATHER_INTS, num_bytes), round;
    if (!take_slot(group, round)) return GIVEN_UP;
    std::memcpy(group.slot(group.rank, round), out + group.rank * num_bytes, num_bytes);
    publish(group, round, note);
    return for_peers(group, round, note, [&](int64_t peer) {
        std::memcpy(out + peer * num_bytes, group.slot(peer, round), num_bytes);
        return DONE;
    });
}

}  // namespace

// Addresses come as numbers. given, result: of tensors whose form the call says. Returns the outcome.
extern "C" {

int64_t lockstep_group_bytes() { return sizeof(Group); }

// Between data and the word that publishes it, where Python reads and writes them: see memory_order.py.
void lockstep_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Whether elements of this kind are added up here.
int64_t lockstep_sums(int64_t kind) { return sum_kind(kind, nullptr, 0, nullptr, 0); }

int64_t lockstep_all_gather(Call* call, const char* given, char* result) {
    return all_gather(*call->group, given, result, call->sizes, call->row_bytes);
}

int64_t lockstep_reduce_scatter(Call* call, const char* given, char* result) {
    return reduce_scatter(*call->group, given, result, call->sizes, call->row_bytes, call->kind);
}

int64_t lockstep_all_to_all(Call* call, const char* given, char* result) {
    return all_to_all(*call->group, given, result, call->sizes, call->row_bytes);
}

int64_t lockstep_all_reduce(Call* call, const char* given, char* result) {
    return all_reduce(*call->group, given, result, call->sizes, call->row_bytes, call->kind);
}

// These two return a buffer, or minus the outcome.
int64_t lockstep_all_gather_view(Call* call, const char* given) {
    return all_gather_view(*call->group, given, call->sizes, call->row_bytes);
}

int64_t lockstep_all_to_all_views(Call* call, const char* given) {
    return all_to_all_views(*call->group, given, call->sizes, call->row_bytes);
}

int64_t lockstep_all_gather_ints(Group* group, char* rows, int64_t num_bytes) {
    return all_gather_ints(*group, rows, num_bytes);
}

int64_t lockstep_broadcast(Group* group, char* data, int64_t num_bytes, int64_t source) {
    return broadcast(*group, data, num_bytes, source);
}

int64_t lockstep_send(Group* group, const char* data, int64_t num_bytes, int64_t to) {
    return send(*group, data, num_bytes, to);
}

int64_t lockstep_receive(Group* group, char* data, int64_t num_bytes, int64_t source) {
    return receive(*group, data, num_bytes, source);
}
}
