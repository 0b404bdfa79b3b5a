// The least that an exchange between processes costs: plain TCP sockets, no messages, no checks. The limit beside which collectives stand.

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <time.h>
#include <vector>

namespace {

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + double(time.tv_nsec) / 1e9;
}

enum Waiting : int64_t { SLEEPING, LOOKING, OFFERING };  // in poll; again and again; the same, but offering the core in between

// Send and receive so many bytes to and from each peer.
bool exchange(const int32_t* sockets, int64_t peers, const char* give, char* take, int64_t num_bytes, int64_t waiting) {
    std::vector<int64_t> sent(size_t(peers), 0), received(size_t(peers), 0);
    for (bool whole = false; !whole;) {
        whole = true;
        bool moved = false;
        std::vector<pollfd> waited;
        for (size_t peer = 0; peer < size_t(peers); ++peer) {
            short events = 0;
            if (sent[peer] < num_bytes) {
                ssize_t count = send(sockets[peer], give + sent[peer], size_t(num_bytes - sent[peer]), MSG_DONTWAIT | MSG_NOSIGNAL);
                if (count < 0 && errno != EAGAIN) return false;
                if (count > 0) sent[peer] += count, moved = true;
                if (sent[peer] < num_bytes) events |= POLLOUT;
            }
            if (received[peer] < num_bytes) {
                ssize_t count = recv(sockets[peer], take + received[peer], size_t(num_bytes - received[peer]), MSG_DONTWAIT);
                if (count == 0 || (count < 0 && errno != EAGAIN)) return false;
                if (count > 0) received[peer] += count, moved = true;
                if (received[peer] < num_bytes) events |= POLLIN;
            }
            if (events == 0) continue;
            whole = false;
            waited.push_back({sockets[peer], events, 0});
        }
        if (whole || moved) continue;
        if (waiting == SLEEPING) poll(waited.data(), waited.size(), 60000);
        if (waiting == OFFERING) sched_yield();
    }
    return true;
}

}  // namespace

extern "C" {

// So many exchanges, and the seconds that each took. 0, or -1: a peer is gone.
int64_t exchange_many(const int32_t* sockets, int64_t peers, const char* give, char* take, int64_t num_bytes, int64_t waiting,
                      int64_t repeats, double* seconds) {
    for (int64_t index = 0; index < repeats; ++index) {
        double began = now();
        if (!exchange(sockets, peers, give, take, num_bytes, waiting)) return -1;
        seconds[index] = now() - began;
    }
    return 0;
}

// A message there and one back, again and again: seconds of each round trip. The other end echoes.
int64_t ping_many(int32_t socket, char* buffer, int64_t num_bytes, int64_t waiting, int64_t echoes, int64_t repeats, double* seconds) {
    for (int64_t index = 0; index < repeats; ++index) {
        double began = now();
        for (int64_t half = 0; half < 2; ++half) {
            bool gives = half == echoes;
            for (int64_t done = 0; done < num_bytes;) {
                ssize_t count = gives ? send(socket, buffer + done, size_t(num_bytes - done), MSG_NOSIGNAL)
                                      : recv(socket, buffer + done, size_t(num_bytes - done), waiting == SLEEPING ? 0 : MSG_DONTWAIT);
                if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return -1;
                if (count > 0) done += count;
            }
        }
        seconds[index] = now() - began;
    }
    return 0;
}
}
