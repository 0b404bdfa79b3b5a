// A whole collective over links in one call: messages to all that need this member's data, and from all whose data it
// needs. The messages are those of network_rounds.py, so members of one group may run either.

#include <cstring>

#include "messages.hpp"
#include "sums.hpp"

namespace {

constexpr int64_t CHUNK = 128 << 10;  // bytes of each term that are added up at once, while they are in the cache

// As in native_network_rounds.py.
struct Group {
    Messages messages;
    Header* headers;     // [2][size] of what is sent: a call sends at most two messages to a peer
    const char** terms;  // [size] scratch
    char* chunks;        // [size][CHUNK] scratch

    int64_t rank() const { return messages.links->rank; }
    int64_t size() const { return messages.links->size; }

    bool post(int64_t peer, int64_t note, const char* data, int64_t num_bytes, int64_t number = 0) {
        Header& header = headers[number * size() + peer];
        header = {note, num_bytes};
        return messages.post(peer, header, data);
    }
    void expect(int64_t peer, int64_t note, char* data, int64_t num_bytes) {
        messages.incoming[peer].expect(note, num_bytes, data, num_bytes);
    }
    // Calls body(peer) for the others, this member's successor first, so that not all begin with the same one.
    template <class Body>
    bool for_peers(Body body) {
        for (int64_t number = 1; number < size(); ++number)
            if (!body((rank() + number) % size())) return false;
        return true;
    }
    Outcome broken() { return messages.fail(BROKEN, messages.links->broken_peer); }
};

// What does not change between calls of one kind with tensors of one form.
struct Call {
    Group* group;
    int64_t note;
    int64_t second_note;  // of a call in two steps
    int64_t row_bytes, kind;
    int64_t sizes[1];  // [size] rows, or elements; of all-to-all then [size] rows from each
};

int64_t rows_before(const int64_t* sizes, int64_t member) {
    int64_t rows = 0;
    for (int64_t rank = 0; rank < member; ++rank) rows += sizes[rank];
    return rows;
}

void copy(char* to, const char* from, int64_t num_bytes) {
    if (to != from && num_bytes) std::memcpy(to, from, num_bytes);
}

// sizes: rows of each member. part: this member's; it may stand in its place in whole already.
Outcome all_gather(Group& group, int64_t note, const char* part, char* whole, const int64_t* sizes, int64_t row_bytes,
                   int64_t number = 0) {
    int64_t length = sizes[group.rank()] * row_bytes;
    bool posted = group.for_peers([&](int64_t peer) {
        group.expect(peer, note, whole + rows_before(sizes, peer) * row_bytes, sizes[peer] * row_bytes);
        return group.post(peer, note, part, length, number);
    });
    if (!posted) return group.broken();
    copy(whole + rows_before(sizes, group.rank()) * row_bytes, part, length);  // while the others' parts come
    return group.messages.finish(true);
}

// sizes: rows to each member, then rows from each.
Outcome all_to_all(Group& group, int64_t note, const char* outgoing, char* incoming, const int64_t* sizes, int64_t row_bytes) {
    const int64_t *send = sizes, *receive = sizes + group.size(), rank = group.rank();
    bool posted = group.for_peers([&](int64_t peer) {
        group.expect(peer, note, incoming + rows_before(receive, peer) * row_bytes, receive[peer] * row_bytes);
        return group.post(peer, note, outgoing + rows_before(send, peer) * row_bytes, send[peer] * row_bytes);
    });
    if (!posted) return group.broken();
    copy(incoming + rows_before(receive, rank) * row_bytes, outgoing + rows_before(send, rank) * row_bytes,
         receive[rank] * row_bytes);
    return group.messages.finish(true);
}

// Adds up what all others send and this member's own term, chunk by chunk. With `sends`, returns when all is sent, too.
Outcome add_up(Group& group, int64_t note, int64_t kind, const char* mine, char* total, int64_t num_bytes, bool sends) {
    auto chunk_of = [&](int64_t peer) { return group.chunks + peer * CHUNK; };
    group.for_peers([&](int64_t peer) {
        group.messages.incoming[peer].expect(note, num_bytes, chunk_of(peer), std::min(CHUNK, num_bytes));
        return true;
    });
    for (int64_t low = 0;;) {
        int64_t length = std::min(CHUNK, num_bytes - low);
        if (Outcome outcome = group.messages.finish(false)) return outcome;
        for (int64_t rank = 0; rank < group.size(); ++rank)
            group.terms[rank] = rank == group.rank() ? mine + low : chunk_of(rank);
        sum_kind(kind, group.terms, group.size(), total + low, length);
        low += length;
        if (low >= num_bytes) break;
        group.for_peers([&](int64_t peer) {
            group.messages.incoming[peer].go_on(chunk_of(peer), std::min(CHUNK, num_bytes - low));
            return true;
        });
    }
    return sends ? group.messages.finish(true) : DONE;
}

// sizes: elements of whole for each member; total gets this member's.
Outcome reduce_scatter(Group& group, int64_t note, const char* whole, char* total, const int64_t* sizes, int64_t row_bytes,
                       int64_t kind, bool sends) {
    bool posted = group.for_peers([&](int64_t peer) {
        return group.post(peer, note, whole + rows_before(sizes, peer) * row_bytes, sizes[peer] * row_bytes);
    });
    if (!posted) return group.broken();
    const char* mine = whole + rows_before(sizes, group.rank()) * row_bytes;
    return add_up(group, note, kind, mine, total, sizes[group.rank()] * row_bytes, sends);
}

// Everybody sends all to all.
Outcome all_reduce(Group& group, int64_t note, const char* given, char* total, int64_t num_bytes, int64_t kind) {
    bool posted = group.for_peers([&](int64_t peer) { return group.post(peer, note, given, num_bytes); });
    return posted ? add_up(group, note, kind, given, total, num_bytes, true) : group.broken();
}

// The source's tensor stands in data already.
Outcome broadcast(Group& group, int64_t note, char* data, int64_t num_bytes, int64_t source) {
    if (source != group.rank()) {
        group.expect(source, note, data, num_bytes);
    } else if (!group.for_peers([&](int64_t peer) { return group.post(peer, note, data, num_bytes); })) {
        return group.broken();
    }
    return group.messages.finish(true);
}

// Each member gets a part of the source's tensor (sizes: elements), and passes it on to all others. So the source sends
// all of it twice, however many members there are.
Outcome broadcast_in_parts(Group& group, int64_t note, char* data, const int64_t* sizes, int64_t element_bytes, int64_t source) {
    auto part_of = [&](int64_t member) { return data + rows_before(sizes, member) * element_bytes; };
    auto bytes_of = [&](int64_t member) { return sizes[member] * element_bytes; };
    int64_t rank = group.rank();
    if (source != rank) {
        group.expect(source, note, part_of(rank), bytes_of(rank));
        if (Outcome outcome = group.messages.finish(false)) return outcome;
    }
    bool posted = group.for_peers([&](int64_t peer) {
        if (source == rank && !group.post(peer, note, part_of(peer), bytes_of(peer))) return false;
        if (source != rank) group.expect(peer, note, part_of(peer), bytes_of(peer));
        return peer == source || group.post(peer, note, part_of(rank), bytes_of(rank), 1);
    });
    return posted ? group.messages.finish(true) : group.broken();
}

}  // namespace

// Addresses come as numbers. given, result: of tensors whose form the call says. Returns the outcome.
extern "C" {

int64_t lockstep_network_group_bytes() { return sizeof(Group); }

int64_t lockstep_network_incoming_bytes() { return sizeof(Incoming); }

int64_t lockstep_network_chunk_bytes() { return CHUNK; }

// Whether elements of this kind are added up here.
int64_t lockstep_network_sums(int64_t kind) { return sum_kind(kind, nullptr, 0, nullptr, 0); }

int64_t lockstep_network_all_gather(Call* call, const char* given, char* result) {
    return all_gather(*call->group, call->note, given, result, call->sizes, call->row_bytes);
}

int64_t lockstep_network_all_to_all(Call* call, const char* given, char* result) {
    return all_to_all(*call->group, call->note, given, result, call->sizes, call->row_bytes);
}

int64_t lockstep_network_reduce_scatter(Call* call, const char* given, char* result) {
    return reduce_scatter(*call->group, call->note, given, result, call->sizes, call->row_bytes, call->kind, true);
}

int64_t lockstep_network_all_reduce(Call* call, const char* given, char* result) {
    int64_t elements = rows_before(call->sizes, call->group->size());
    return all_reduce(*call->group, call->note, given, result, elements * call->row_bytes, call->kind);
}

// sizes: elements of each member's part.
int64_t lockstep_network_all_reduce_in_parts(Call* call, const char* given, char* result) {
    Group& group = *call->group;
    char* mine = result + rows_before(call->sizes, group.rank()) * call->row_bytes;
    Outcome outcome = reduce_scatter(group, call->note, given, mine, call->sizes, call->row_bytes, call->kind, false);
    return outcome ? outcome : all_gather(group, call->second_note, mine, result, call->sizes, call->row_bytes, 1);
}

int64_t lockstep_network_broadcast_in_parts(Call* call, char* data, int64_t source) {
    return broadcast_in_parts(*call->group, call->note, data, call->sizes, call->row_bytes, source);
}

// rows: [size, num_bytes], this member's in its place.
int64_t lockstep_network_all_gather_ints(Group* group, int64_t note, char* rows, int64_t num_bytes) {
    Group& all = *group;
    const char* mine = rows + all.rank() * num_bytes;
    bool posted = all.for_peers([&](int64_t peer) {
        all.expect(peer, note, rows + peer * num_bytes, num_bytes);
        return all.post(peer, note, mine, num_bytes);
    });
    return posted ? all.messages.finish(true) : all.broken();
}

int64_t lockstep_network_broadcast(Group* group, int64_t note, char* data, int64_t num_bytes, int64_t source) {
    return broadcast(*group, note, data, num_bytes, source);
}

int64_t lockstep_network_send(Group* group, int64_t note, const char* data, int64_t num_bytes, int64_t to) {
    return group->post(to, note, data, num_bytes) ? group->messages.finish(true) : group->broken();
}

int64_t lockstep_network_receive(Group* group, int64_t note, char* data, int64_t num_bytes, int64_t source) {
    group->expect(source, note, data, num_bytes);
    return group->messages.finish(true);
}

// Messages to some peers and from some: (peer, address, bytes) of each that is sent, then of each that comes, at most one of
// either kind for a peer.
int64_t lockstep_network_exchange(Group* group, int64_t note, const int64_t* messages, int64_t sent, int64_t received) {
    const int64_t* end = messages + 3 * (sent + received);
    for (const int64_t* each = messages + 3 * sent; each < end; each += 3)
        group->expect(each[0], note, reinterpret_cast<char*>(each[1]), each[2]);
    for (const int64_t* each = messages; each < messages + 3 * sent; each += 3)
        if (!group->post(each[0], note, reinterpret_cast<const char*>(each[1]), each[2])) return group->broken();
    return group->messages.finish(true);
}
}
