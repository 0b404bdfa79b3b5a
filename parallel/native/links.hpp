// A member's links to the other members of its group: to each an ordered pipe of bytes in both directions.
//
// Collectives and the step of the kernels are written against this table; tcp_links.cpp and ucx_links.cpp fill it. It is plain C,
// since they are compiled apart from their callers. One thread at a time calls.

#pragma once

#include <cstdint>

extern "C" {

struct LinksPart {
    const void* data;
    int64_t num_bytes;
};

struct Links {
    void* self;
    int64_t rank, size;

    // Queue these parts for a peer, behind all that was queued before, and send what goes without waiting. The memory stays as it is
    // until flush() has returned 1; `parts` itself is copied. 0, or -1: broken.
    int64_t (*post)(void* self, int64_t peer, const LinksPart* parts, int64_t count);

    // Receive exactly num_bytes from a peer. 1: they are there. 0: not yet; the next call for this peer has the same arguments, and
    // meanwhile the memory may be written. -1: broken.
    int64_t (*take)(void* self, int64_t peer, void* data, int64_t num_bytes);

    // Send what is queued for a peer, or for all (-1), as far as it goes without waiting. 1: nothing is queued any more. 0: something
    // is. -1: broken.
    int64_t (*flush)(void* self, int64_t peer);

    // Sleep until something has come from a peer that take() has said "not yet" of, or something queued can go; at most so many
    // seconds. 1: something has; 0: the time is over; -1: broken.
    int64_t (*sleep)(void* self, double seconds);

    // Let all calls return -1 from now on; the only function that another thread may call.
    void (*abort)(void* self);

    // Of what broke: the peer (-1: none, it was aborted), and errno (0: the peer closed its end).
    int64_t broken_peer, broken_error;

    // Counted by peer; nobody sets them back.
    int64_t* bytes_sent;
    int64_t* bytes_received;
    double* seconds_waited;  // by those who wait for a peer, that is by the callers
};
}
