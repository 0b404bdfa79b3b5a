// The table of links.hpp filled by TCP sockets: nonblocking, everything in one thread.
//
// With several streams to a peer the pipe is striped over them by position: bytes [k * STRIPE, (k + 1) * STRIPE) of
// a direction go over stream k modulo their number. So both ends need to agree on nothing but that number, and however
// posts and takes cut the pipe, messages below a stripe cost one call into the kernel.

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "links.hpp"

namespace {

constexpr int64_t STRIPE = 256 << 10;  // bytes
constexpr int64_t AHEAD = 16 << 10;  // bytes received beyond what is asked for, so that small messages share a call
constexpr size_t MOST_PARTS = 1024;  // of one sendmsg (IOV_MAX)
constexpr int MOST_PLACES = 8;       // of one recvmsg

struct Stream {
    int socket = -1;
    std::vector<iovec> unsent;  // from number first on
    size_t first = 0;
    int64_t at = 0;  // position in the incoming pipe of the next byte that this stream brings
    std::vector<char> ahead;  // received beyond what was asked for: bytes [low, high)
    int64_t low = 0, high = 0;

    bool is_sent() const { return first == unsent.size(); }
};

struct Peer {
    std::vector<Stream> streams;
    int64_t posted = 0, taken = 0;  // bytes of the outgoing and the incoming pipe
    int64_t waits_for = 0;          // bytes of a take that is not over
    bool is_broken = false;

    // Bytes from a position on that go over the same stream, and which that is.
    int64_t stretch(int64_t position) const { return streams.size() == 1 ? INT64_MAX - position : STRIPE - position % STRIPE; }
    Stream& stream_at(int64_t position) {
        return streams.size() == 1 ? streams[0] : streams[size_t(position / STRIPE) % streams.size()];
    }
    // The position of a stream's byte so many bytes after the one at `at`.
    int64_t advance(int64_t at, int64_t num_bytes) const {
        for (int64_t step; num_bytes > 0; num_bytes -= step) {
            int64_t rest = stretch(at);
            step = std::min(num_bytes, rest);
            at += step;
            if (step == rest) at += int64_t(streams.size() - 1) * STRIPE;
        }
        return at;
    }
};

struct TcpLinks {
    Links table{};
    std::vector<Peer> peers;
    std::vector<int64_t> sent, received;
    std::vector<double> waited;
    std::vector<pollfd> polled;
    int64_t num_unsent = 0;  // streams with something in their queue
    std::atomic<bool> is_aborted{false};
    int wake = -1;  // an eventfd that abort() makes readable

    ~TcpLinks() {
        if (wake >= 0) close(wake);
    }

    int64_t fail(int64_t peer, int64_t error) {
        if (table.broken_peer == -1 && table.broken_error == 0) table.broken_peer = peer, table.broken_error = error;
        if (peer >= 0 && peer < table.size) peers[peer].is_broken = true;
        return -1;
    }

    // Whether calls for this peer can succeed; if not, why is known.
    bool is_open(int64_t peer) {
        if (is_aborted.load(std::memory_order_relaxed)) return fail(-1, ECANCELED), false;
        if (peer < 0 || peer >= table.size || peers[peer].streams.empty()) return fail(peer, EINVAL), false;
        return !peers[peer].is_broken;
    }

    // What goes without waiting. 1: all; 0: not all; -1: broken.
    int64_t send_queued(int64_t peer, Stream& stream) {
        while (!stream.is_sent()) {
            msghdr message{};
            message.msg_iov = &stream.unsent[stream.first];
            message.msg_iovlen = std::min(stream.unsent.size() - stream.first, MOST_PARTS);
            size_t last = stream.first + message.msg_iovlen;
            ssize_t count = sendmsg(stream.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (count < 0) {
                if (errno == EINTR) continue;
                return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : fail(peer, errno);
            }
            sent[peer] += count;
            while (stream.first < last && size_t(count) >= stream.unsent[stream.first].iov_len)
                count -= stream.unsent[stream.first++].iov_len;
            if (stream.first < last) {  // the socket is full
                iovec& part = stream.unsent[stream.first];
                part.iov_base = static_cast<char*>(part.iov_base) + count, part.iov_len -= count;
                return 0;
            }
        }
        stream.unsent.clear(), stream.first = 0;
        --num_unsent;
        return 1;
    }

    int64_t post(int64_t peer, const LinksPart* parts, int64_t count) {
        if (!is_open(peer)) return -1;
        Peer& to = peers[peer];
        for (int64_t number = 0; number < count; ++number) {
            char* data = static_cast<char*>(const_cast<void*>(parts[number].data));
            for (int64_t left = parts[number].num_bytes, step; left > 0; left -= step, data += step, to.posted += step) {
                step = std::min(left, to.stretch(to.posted));
                enqueue(to.stream_at(to.posted), data, step);
            }
        }
        return flush_peer(peer) < 0 ? -1 : 0;
    }

    void enqueue(Stream& stream, char* data, int64_t num_bytes) {
        auto& unsent = stream.unsent;
        if (stream.is_sent()) ++num_unsent;
        else if (static_cast<char*>(unsent.back().iov_base) + unsent.back().iov_len == data) {
            unsent.back().iov_len += num_bytes;
            return;
        }
        if (stream.first > MOST_PARTS && stream.first > unsent.size() / 2)  // forget what is sent
            unsent.erase(unsent.begin(), unsent.begin() + stream.first), stream.first = 0;
        unsent.push_back({data, size_t(num_bytes)});
    }

    int64_t flush_peer(int64_t peer) {
        int64_t all = 1;
        for (Stream& stream : peers[peer].streams) {
            if (stream.is_sent()) continue;
            int64_t outcome = send_queued(peer, stream);
            if (outcome < 0) return -1;
            all &= outcome;
        }
        return all;
    }

    int64_t flush(int64_t peer) {
        if (peer >= 0) return is_open(peer) ? flush_peer(peer) : -1;
        if (is_aborted.load(std::memory_order_relaxed)) return fail(-1, ECANCELED);
        if (num_unsent == 0) return 1;
        int64_t all = 1;
        for (peer = 0; peer < table.size; ++peer) {
            bool is_sent = true;
            for (Stream& stream : peers[peer].streams) is_sent &= stream.is_sent();
            if (is_sent) continue;
            int64_t outcome = peers[peer].is_broken ? -1 : flush_peer(peer);
            if (outcome < 0) return -1;
            all &= outcome;
        }
        return all;
    }

    int64_t take(int64_t peer, char* data, int64_t num_bytes) {
        if (!is_open(peer)) return -1;
        Peer& from = peers[peer];
        int64_t all = 1;
        for (Stream& stream : from.streams) {
            int64_t outcome = receive(peer, stream, data, from.taken + num_bytes);
            if (outcome < 0) return -1;
            all &= outcome;
        }
        from.waits_for = all ? 0 : num_bytes;
        if (all) from.taken += num_bytes;
        return all;
    }

    // What one stream brings of a take that ends at `end`.
    int64_t receive(int64_t peer, Stream& stream, char* data, int64_t end) {
        Peer& from = peers[peer];
        while (stream.at < end) {
            if (stream.low < stream.high) {
                int64_t count = std::min({stream.high - stream.low, end - stream.at, from.stretch(stream.at)});
                std::memcpy(data + (stream.at - from.taken), stream.ahead.data() + stream.low, count);
                stream.low += count;
                stream.at = from.advance(stream.at, count);
                continue;
            }
            iovec places[MOST_PLACES + 1];
            int count_places = 0;
            int64_t room = 0;
            for (int64_t at = stream.at; at < end && count_places < MOST_PLACES;) {
                int64_t length = std::min(end - at, from.stretch(at));
                places[count_places++] = {data + (at - from.taken), size_t(length)};
                room += length;
                at = from.advance(at, length);
            }
            places[count_places] = {stream.ahead.data(), size_t(AHEAD)};
            msghdr message{};
            message.msg_iov = places;
            message.msg_iovlen = count_places + 1;
            ssize_t count = recvmsg(stream.socket, &message, MSG_DONTWAIT);
            if (count < 0 && errno == EINTR) continue;
            if (count < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : fail(peer, errno);
            if (count == 0) return fail(peer, 0);
            received[peer] += count;
            stream.low = 0, stream.high = std::max<int64_t>(0, count - room);
            stream.at = from.advance(stream.at, std::min<int64_t>(count, room));
            if (count < room) return 0;  // that was all there is
        }
        return 1;
    }

    int64_t sleep(double seconds) {
        polled.clear();
        polled.push_back({wake, POLLIN, 0});
        for (Peer& peer : peers) {
            int64_t end = peer.taken + peer.waits_for;
            for (Stream& stream : peer.streams) {
                short events = short((stream.at < end && peer.waits_for ? POLLIN : 0) | (stream.is_sent() ? 0 : POLLOUT));
                if (events && peer.is_broken) return -1;
                if (events) polled.push_back({stream.socket, events, 0});
            }
        }
        seconds = std::min(std::max(seconds, 0.0), 3600.0);
        timespec length{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
        int ready = ppoll(polled.data(), polled.size(), &length, nullptr);
        if (is_aborted.load(std::memory_order_relaxed)) return fail(-1, ECANCELED);
        if (ready < 0) return errno == EINTR ? 0 : fail(-1, errno);
        return ready > 0;
    }

    void abort() {
        is_aborted.store(true);
        uint64_t one = 1;
        while (write(wake, &one, sizeof one) < 0 && errno == EINTR) {}
    }
};

TcpLinks& links_of(void* self) { return *static_cast<TcpLinks*>(self); }

}  // namespace

extern "C" {

int64_t lockstep_links_bytes() { return sizeof(Links); }

// fds: [size][streams] sockets, of which those of this rank do not count. They stay the caller's, who closes them after
// lockstep_tcp_links_free. Null, with errno: there are no descriptors left.
Links* lockstep_tcp_links(int64_t rank, int64_t size, const int64_t* fds, int64_t streams) {
    auto* links = new TcpLinks;
    links->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (links->wake < 0) {
        int error = errno;
        delete links;
        errno = error;
        return nullptr;
    }
    links->peers.resize(size);
    links->sent.resize(size), links->received.resize(size), links->waited.resize(size);
    links->polled.reserve(1 + size * streams);
    for (int64_t peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        links->peers[peer].streams.resize(streams);
        for (int64_t number = 0; number < streams; ++number) {
            Stream& stream = links->peers[peer].streams[number];
            stream.socket = int(fds[peer * streams + number]);
            stream.at = number * STRIPE;
            stream.ahead.resize(AHEAD);
        }
    }
    Links& table = links->table;
    table.self = links, table.rank = rank, table.size = size, table.broken_peer = -1;
    table.post = [](void* self, int64_t peer, const LinksPart* parts, int64_t count) { return links_of(self).post(peer, parts, count); };
    table.take = [](void* self, int64_t peer, void* data, int64_t num_bytes) {
        return links_of(self).take(peer, static_cast<char*>(data), num_bytes);
    };
    table.flush = [](void* self, int64_t peer) { return links_of(self).flush(peer); };
    table.sleep = [](void* self, double seconds) { return links_of(self).sleep(seconds); };
    table.abort = [](void* self) { links_of(self).abort(); };
    table.bytes_sent = links->sent.data(), table.bytes_received = links->received.data();
    table.seconds_waited = links->waited.data();
    return &table;
}

// After the last call of anything in the table.
void lockstep_tcp_links_free(Links* table) { delete static_cast<TcpLinks*>(table->self); }
}
