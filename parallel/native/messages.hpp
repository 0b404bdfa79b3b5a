// Messages over links: a header of 16 bytes, then the payload, to and from all peers at once.
//
// What is sent goes out while something is received, so that two large messages in opposite directions cannot block
// each other. How a caller waits: waiting.hpp, with sleep on the links themselves.

#pragma once

#include "links.hpp"
#include "waiting.hpp"

namespace {

enum Outcome : int64_t { DONE, GIVEN_UP, OTHER_CALL, OTHER_BYTES, BROKEN };

struct Header {
    int64_t note;  // which call: as that of shared memory's rounds
    int64_t num_bytes;
};

// Called now and then while waiting for something from a peer, or for room to send to it; not 0: give up.
using CheckPeer = int64_t (*)(int64_t peer);

constexpr int LINK_LOOKS = 4;  // at all links, each of which asks the system, between two looks at the clock

// What is received from a peer: a message, whose payload may be taken in pieces.
struct Incoming {
    enum Stage : int64_t { NOTHING, HEADER, PAYLOAD } stage = NOTHING;
    Header header, expected;
    char* place;
    int64_t num_bytes;  // of this piece

    void expect(int64_t note, int64_t total, char* to, int64_t piece) {
        stage = HEADER, expected = {note, total}, place = to, num_bytes = piece;
    }
    void go_on(char* to, int64_t piece) { stage = PAYLOAD, place = to, num_bytes = piece; }
};

// All exchange of one member with its peers.
struct Messages {
    Links* links;
    Incoming* incoming;  // [size]
    CheckPeer check;
    Patience patience;
    int64_t culprit = -1, found = 0, expected = 0;  // of a call that failed

    // Sends a message as soon as that goes; header and payload stay as they are until all is sent.
    bool post(int64_t peer, Header& header, const char* payload) {
        LinksPart parts[2] = {{&header, sizeof header}, {payload, header.num_bytes}};
        return links->post(links->self, peer, parts, 2) == 0;
    }

    Outcome fail(Outcome outcome, int64_t peer, int64_t was = 0, int64_t should_be = 0) {
        culprit = peer, found = was, expected = should_be;
        return outcome;
    }

    // One look at what has come from a peer. NOTHING is expected of it any more if `from.stage` says so afterwards.
    Outcome take(int64_t peer, Incoming& from) {
        if (from.stage == Incoming::HEADER) {
            int64_t came = links->take(links->self, peer, &from.header, sizeof from.header);
            if (came <= 0) return came ? fail(BROKEN, peer) : DONE;
            if (from.header.note != from.expected.note) return fail(OTHER_CALL, peer, from.header.note, from.expected.note);
            if (from.header.num_bytes != from.expected.num_bytes)
                return fail(OTHER_BYTES, peer, from.header.num_bytes, from.expected.num_bytes);
            from.stage = Incoming::PAYLOAD;
        }
        int64_t came = from.num_bytes ? links->take(links->self, peer, from.place, from.num_bytes) : 1;
        if (came < 0) return fail(BROKEN, peer);
        if (came) from.stage = Incoming::NOTHING;
        return DONE;
    }

    // Until all that is expected has come and, if so asked, all that was posted is sent.
    Outcome finish(bool sends) {
        Outcome outcome = DONE;
        int64_t slowest = -1;  // the first peer that something is expected of
        bool waits = false;
        std::chrono::steady_clock::time_point began;
        auto has_come = [&] {
            slowest = -1;
            for (int64_t number = 1; number < links->size; ++number) {
                int64_t peer = (links->rank + number) % links->size;
                Incoming& from = incoming[peer];
                if (from.stage == Incoming::NOTHING) continue;
                if ((outcome = take(peer, from)) != DONE) return true;
                if (from.stage != Incoming::NOTHING) {
                    if (slowest < 0) slowest = peer;
                } else if (waits) {
                    std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
                    links->seconds_waited[peer] += waited.count();
                }
            }
            int64_t sent = links->flush(links->self, -1);
            if (sent < 0) outcome = fail(BROKEN, links->broken_peer);
            return sent < 0 || (slowest < 0 && (sent > 0 || !sends));
        };
        if (has_come()) return outcome;
        waits = true, began = std::chrono::steady_clock::now();
        auto give_up = [&] {
            for (int64_t peer = 0; slowest < 0 && peer < links->size; ++peer)
                if (peer != links->rank && links->flush(links->self, peer) == 0) slowest = peer;  // which does not take
            return slowest >= 0 && check(slowest) != 0;
        };
        bool came = wait_for(
            patience, LINK_LOOKS, has_come, give_up,
            [&](double, double most) { links->sleep(links->self, most); });
        return came ? outcome : fail(GIVEN_UP, slowest);
    }
};

}  // namespace
