// A link between two network namespaces with a fixed delay and a rate, for kernels that have no netem.
//
//     link_emulator NAMESPACE NAMESPACE DEVICE
//
// Makes a TUN device in each namespace and carries packets between them: a packet occupies the link for its bytes divided by the
// rate, and arrives a fixed time later. It is dropped where more than a bound of bytes waits for the link. Segments of up to 64 KB pass
// whole, as they would from a network card that cuts them itself (IFF_VNET_HDR); their headers on the wire are counted.
//
// One thread with a real-time priority sleeps until a packet comes or is due. It wakes up a little early, by what waking up has taken
// before, and looks at the clock for these last microseconds only.
//
// Lines on standard input; each is answered by one line. The end of the input ends it.
//
//     set DELAY_NS BITS_PER_SECOND BOUND_BYTES HEAD_START_NS      a rate of 0 is none; the head start is taken off the delay
//     count                                                       what passed since the last `count`, as JSON

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <string>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include <vector>

namespace {

struct OffloadHeader {  // virtio_net_hdr, which C++ cannot include
    uint8_t flags, gso_type;
    uint16_t header_bytes, gso_size, checksum_start, checksum_offset;
};

constexpr int64_t RING_BYTES = int64_t{64} << 20;  // of packets under way, per direction; pages are taken as they are needed
constexpr int64_t LARGEST = 65536 + sizeof(OffloadHeader);
constexpr int64_t FRAME_BYTES = 38;  // preamble, Ethernet header, checksum, gap: of each packet on the wire
constexpr int64_t FEW = 64;          // packets read from one device before the other is looked at
constexpr double MOST_EARLY = 40e3;  // nanoseconds; a wake that takes longer is an accident

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "link_emulator: %s: %s\n", what.c_str(), std::strerror(errno));
    std::exit(1);
}

struct Link {
    int64_t delay = 0, bound = 4 << 20, head_start = 0;
    double nanoseconds_per_byte = 0.0;
};

struct Packet {
    int64_t due, length, at;  // at: its first byte in the ring
};

// Bytes of a packet on the wire: a large segment becomes several frames, each with the headers.
int64_t wire_bytes(const char* data, int64_t length) {
    OffloadHeader offload;
    std::memcpy(&offload, data, sizeof offload);
    int64_t bytes = length - int64_t(sizeof offload);
    if (offload.gso_type == 0 || offload.gso_size == 0) return bytes + FRAME_BYTES;
    int64_t tcp = offload.checksum_start;  // where the TCP header begins; its length is in the upper half of byte 12, in words
    int64_t headers = tcp + 4 * (static_cast<unsigned char>(data[sizeof offload + tcp + 12]) >> 4);
    int64_t payload = std::max<int64_t>(bytes - headers, 1), frames = (payload + offload.gso_size - 1) / offload.gso_size;
    return payload + frames * (headers + FRAME_BYTES);
}

// One direction: from a device into a ring in order of arrival, and out of it into the other device.
class Direction {
  public:
    int64_t packets = 0, wire = 0, dropped = 0;
    std::vector<int32_t> late;  // nanoseconds of each packet behind its time

    Direction(int from, int to) : from_(from), to_(to), packets_(1 << 16) {
        ring_ = static_cast<char*>(mmap(nullptr, RING_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (ring_ == MAP_FAILED) fail("no memory for packets");
    }

    int64_t next_due() const { return first_ == last_ ? INT64_MAX : packets_[first_ % packets_.size()].due; }

    void take_in(const Link& link) {
        for (int64_t count = 0; count < FEW; ++count) {
            if (head_ + LARGEST > RING_BYTES) head_ = 0;
            ssize_t length = read(from_, ring_ + head_, LARGEST);
            if (length < 0) {
                if (errno == EAGAIN || errno == EINTR || errno == EIO) return;  // EIO: the device is down
                fail("read from a device");
            }
            int64_t came = now(), bytes = wire_bytes(ring_ + head_, length);
            int64_t begins = std::max(came, free_at_);
            bool full = double(begins - came) > double(link.bound) * link.nanoseconds_per_byte && link.nanoseconds_per_byte > 0;
            if (full || last_ - first_ == int64_t(packets_.size()) || !has_room(length)) {
                ++dropped;
                continue;
            }
            free_at_ = begins + int64_t(double(bytes) * link.nanoseconds_per_byte);
            newest_due_ = std::max(newest_due_, free_at_ + std::max<int64_t>(link.delay - link.head_start, 0));
            packets_[last_++ % packets_.size()] = {newest_due_, length, head_};
            head_ += length;
            ++packets, wire += bytes;
        }
    }

    void give_out(int64_t time) {
        while (next_due() <= time) {
            const Packet& packet = packets_[first_ % packets_.size()];
            time = now();
            if (late.size() < (1 << 20)) late.push_back(int32_t(std::min<int64_t>(time - packet.due, INT32_MAX)));
            if (write(to_, ring_ + packet.at, packet.length) < 0 && errno != EIO && errno != EAGAIN && errno != EINVAL)
                fail("write to a device");
            ++first_;
        }
    }

  private:
    // Whether the bytes at the head belong to no packet that still waits.
    bool has_room(int64_t length) const {
        if (first_ == last_) return true;
        int64_t oldest = packets_[first_ % packets_.size()].at;
        return oldest < head_ || head_ + length + LARGEST <= oldest;
    }

    int from_, to_;
    char* ring_;
    std::vector<Packet> packets_;
    int64_t first_ = 0, last_ = 0, head_ = 0, free_at_ = 0, newest_due_ = 0;
};

int make_device(const char* name_space, const char* device) {
    std::string path = std::string("/run/netns/") + name_space;
    int space = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) != 0) fail("enter " + path);
    close(space);
    int made = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (made < 0) fail("open /dev/net/tun");
    ifreq request{};
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    std::snprintf(request.ifr_name, sizeof request.ifr_name, "%s", device);
    if (ioctl(made, TUNSETIFF, &request) != 0) fail(std::string("make ") + device);
    if (ioctl(made, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN) != 0) fail("offload segmentation");
    return made;
}

double processor_seconds() {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return double(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + double(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

void print_counts(Direction* directions, double seconds, double used) {
    std::printf("{\"seconds\": %.6f, \"processor_seconds\": %.6f, \"directions\": [", seconds, used);
    for (int index = 0; index < 2; ++index) {
        Direction& each = directions[index];
        std::sort(each.late.begin(), each.late.end());
        auto at = [&](double share) { return each.late.empty() ? 0 : each.late[size_t(share * double(each.late.size() - 1))]; };
        std::printf("%s{\"packets\": %lld, \"wire_bytes\": %lld, \"dropped\": %lld, \"late_ns\": {\"p50\": %d, \"p90\": %d, \"p99\": %d}}",
                    index ? ", " : "", (long long)each.packets, (long long)each.wire, (long long)each.dropped, at(0.5), at(0.9), at(0.99));
        each.packets = each.wire = each.dropped = 0;
        each.late.clear();
    }
    std::printf("]}\n");
}

}  // namespace

int main(int count, char** words) {
    if (count != 4) {
        std::fprintf(stderr, "usage: link_emulator NAMESPACE NAMESPACE DEVICE\n");
        return 2;
    }
    int one = make_device(words[1], words[3]), other = make_device(words[2], words[3]);
    Direction directions[2] = {{one, other}, {other, one}};
    Link link;
    prctl(PR_SET_TIMERSLACK, 1);
    prctl(PR_SET_PDEATHSIG, 9);
    sched_param priority{};
    priority.sched_priority = 1;
    if (sched_setscheduler(0, SCHED_FIFO, &priority) != 0) std::fprintf(stderr, "link_emulator: no real-time priority\n");
    fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    std::printf("ready\n");

    pollfd watched[3] = {{one, POLLIN, 0}, {other, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
    std::string input;
    double early = 15e3;  // nanoseconds that a wake takes, at the lower quartile: learned
    int64_t counted_at = now();
    double used_at = processor_seconds();
    while (true) {
        int64_t due = std::min(directions[0].next_due(), directions[1].next_due());
        timespec wait{}, *bound = nullptr;
        int64_t wake = 0;
        if (due != INT64_MAX) {
            int64_t time = now();
            wake = due - int64_t(early);
            int64_t left = std::max<int64_t>(wake - time, 0);
            wait = {left / 1000000000, left % 1000000000};
            if (left == 0) wake = 0;
            bound = &wait;
        }
        int found = ppoll(watched, 3, bound, nullptr);
        if (found < 0 && errno != EINTR) fail("poll");
        if (found == 0 && wake != 0) {
            double took = double(now() - wake);
            if (took < 2 * MOST_EARLY) early += took > early ? 50.0 : -150.0;
            early = std::clamp(early, 0.0, MOST_EARLY);
        }
        if (found > 0) {
            if (watched[0].revents & POLLIN) directions[0].take_in(link);
            if (watched[1].revents & POLLIN) directions[1].take_in(link);
        }
        int64_t time = now();
        while (found == 0 && time < due && due - time < int64_t(MOST_EARLY)) {  // what comes meanwhile keeps its own time
            directions[0].take_in(link);
            directions[1].take_in(link);
            time = now();
        }
        directions[0].give_out(time);
        directions[1].give_out(time);
        if (found <= 0 || watched[2].revents == 0) continue;
        char read_now[4096];
        ssize_t length = read(STDIN_FILENO, read_now, sizeof read_now);
        if (length == 0) return 0;
        if (length > 0) input.append(read_now, size_t(length));
        for (size_t end; (end = input.find('\n')) != std::string::npos; input.erase(0, end + 1)) {
            std::string line = input.substr(0, end);
            long long delay, rate, most, head_start;
            if (std::sscanf(line.c_str(), "set %lld %lld %lld %lld", &delay, &rate, &most, &head_start) == 4) {
                link = {delay, most, head_start, rate > 0 ? 8e9 / double(rate) : 0.0};
                std::printf("set\n");
            } else if (line == "count") {
                double used = processor_seconds();
                print_counts(directions, double(now() - counted_at) / 1e9, used - used_at);
                counted_at = now(), used_at = processor_seconds();
            } else {
                std::printf("unknown: %s\n", line.c_str());
            }
        }
    }
}
