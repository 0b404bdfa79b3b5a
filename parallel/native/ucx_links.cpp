// The table of links.hpp filled by UCX: InfiniBand and RoCE, shared memory, or TCP, as the library finds and is told.
//
// A pipe is a sequence of messages with the sender's rank as tag, which UCX keeps in order. Small parts are copied together
// into one message; large ones go from where they are, in pieces. So a take that is as long as what was posted gets
// its bytes in place, and any other way of cutting costs one copy. Who sends faster than its peer takes is held up by synchronous
// sends among the others, which are over when the peer has taken them: at most 2 * SYNC_BYTES wait at the peer.
//
// The library is loaded at run time (lockstep_ucx_open), so this is compiled with headers alone.

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "links.hpp"

namespace {

constexpr int64_t PIECE = 128 << 10;        // bytes of a message at most: what a sum takes at once
constexpr int64_t COPIED = 8 << 10;         // bytes up to which a part is copied
constexpr int64_t BLOCK = 64 << 10;         // bytes that copied parts share
constexpr int64_t SYNC_BYTES = 4 << 20;     // bytes from one synchronous send to the next
constexpr int64_t LEAST_COST = 4 << 10;     // bytes that a message takes at its receiver, however small it is
constexpr int64_t MOST_SYNCS = 2, MOST_SENDS = 256;  // under way to a peer
constexpr double LAST_SECONDS = 0.02;       // for what is under way when links are closed
constexpr double QUIET_SECONDS = 0.05;      // for what is under way when they break
constexpr unsigned MAJOR = 1, MINOR = 10;   // of the interface that is used

#define FUNCTIONS(with)                                                                                                  \
    with(ucp_config_read) with(ucp_config_modify) with(ucp_config_release) with(ucp_init_version) with(ucp_cleanup)      \
    with(ucp_context_print_info) with(ucp_worker_create) with(ucp_worker_destroy) with(ucp_worker_get_address)           \
    with(ucp_worker_release_address) with(ucp_worker_get_efd) with(ucp_worker_arm) with(ucp_worker_progress)             \
    with(ucp_ep_create) with(ucp_ep_flush_nbx) with(ucp_ep_close_nbx) with(ucp_tag_send_nbx) with(ucp_tag_send_sync_nbx) with(ucp_tag_probe_nb) \
    with(ucp_tag_msg_recv_nbx) with(ucp_request_check_status) with(ucp_request_cancel) with(ucp_request_free)            \
    with(ucp_get_version_string) with(ucs_status_string)

struct Ucx {
#define MEMBER(name) decltype(&::name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
} ucx;  // of this process; nothing unloads it

using Clock = std::chrono::steady_clock;

struct Block {
    int64_t used = 0;
    char data[BLOCK];
};

struct Piece {
    const char* data;
    int64_t num_bytes;
    Block* block;  // where data is, if it was copied
};

struct UcxLinks;

// A send that is under way.
struct Send {
    UcxLinks* links;
    int64_t peer;
    Block* block;
    bool is_sync;
};

struct Peer {
    UcxLinks* links = nullptr;
    int64_t rank = -1;
    ucp_ep_h endpoint = nullptr;
    std::deque<Piece> queue;  // not given to UCX yet
    int64_t sends = 0, syncs = 0, since_sync = 0;
    std::vector<char> ahead;  // a message of which less was asked for: bytes [low, high)
    int64_t low = 0, high = 0;
    bool fills_ahead = false;
    bool is_taking = false;   // a take is not over
    int64_t placed = 0;       // its bytes that are there, or come without further help
    int64_t receives = 0;     // under way
    bool has_news = false;    // something has come since take() said "not yet"
    bool is_broken = false;
    int64_t error = 0;        // what UCX says has happened to the endpoint; calls notice when nothing is left to take
    bool has_error = false;
    bool has_lost = false;    // a message that was not received as it should
};

int errno_of(ucs_status_t status) {
    switch (status) {
        case UCS_ERR_CONNECTION_RESET: return 0;  // as when a peer closes its end, which UCX does not tell from it
        case UCS_ERR_NO_MEMORY: return ENOMEM;
        case UCS_ERR_TIMED_OUT:
        case UCS_ERR_ENDPOINT_TIMEOUT: return ETIMEDOUT;
        case UCS_ERR_UNREACHABLE: return EHOSTUNREACH;
        case UCS_ERR_REJECTED: return ECONNREFUSED;
        case UCS_ERR_NOT_CONNECTED: return ENOTCONN;
        case UCS_ERR_CANCELED: return ECANCELED;
        case UCS_ERR_MESSAGE_TRUNCATED: return EPROTO;
        default: return EIO;
    }
}

struct UcxLinks {
    Links table{};
    ucp_context_h context = nullptr;
    ucp_worker_h worker = nullptr;
    std::vector<Peer> peers;
    std::vector<int64_t> sent, received;
    std::vector<double> waited;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Block*> free_blocks;
    std::vector<std::unique_ptr<Send>> all_sends;
    std::vector<Send*> free_sends;
    int64_t unsent = 0;      // pieces queued or under way
    bool has_sent = false;   // a send has ended since the last look
    bool is_quiet = false;
    bool notices_deaths = true;  // whether UCX tells when a peer is gone: its shared memory cannot
    std::atomic<bool> is_aborted{false};
    int wake = -1;    // an eventfd that abort() makes readable
    int events = -1;  // the worker's, readable when there is something to do

    // ---- when something breaks

    int64_t fail(int64_t peer, int64_t error) {
        if (table.broken_peer == -1 && table.broken_error == 0) table.broken_peer = peer, table.broken_error = error;
        if (peer >= 0 && peer < table.size) {
            bool was_open = !peers[peer].is_broken;
            peers[peer].is_broken = true;
            if (was_open && peers[peer].endpoint) quiet(&peers[peer]);
        }
        return -1;
    }

    int64_t fail_aborted() {
        if (!is_quiet) is_quiet = true, quiet(nullptr);
        return fail(-1, ECANCELED);
    }

    // The callers' memory is theirs again when a call fails: what is under way to or from it ends first.
    void quiet(Peer* only) {
        std::vector<Peer*> ended;
        for (Peer& peer : peers) {
            if ((only && &peer != only) || !peer.endpoint) continue;
            ended.push_back(&peer);
            drop_queue(peer);
        }
        close_endpoints(ended, true, QUIET_SECONDS);
        auto ends = Clock::now() + std::chrono::duration<double>(QUIET_SECONDS);
        while (Clock::now() < ends) {
            bool is_over = true;
            for (Peer* peer : ended) is_over &= peer->receives == 0 && peer->sends == 0;
            if (is_over) break;
            ucx.ucp_worker_progress(worker);
        }
    }

    void drop_queue(Peer& peer) {
        for (Piece& piece : peer.queue) release(piece.block);
        unsent -= int64_t(peer.queue.size());
        peer.queue.clear();
    }

    // Waits a bounded time until all of these are over; progress() is what moves them.
    void finish(std::vector<ucs_status_ptr_t> requests, double seconds) {
        auto ends = Clock::now() + std::chrono::duration<double>(seconds);
        while (!requests.empty() && Clock::now() < ends) {
            ucx.ucp_worker_progress(worker);
            while (!requests.empty() && ucx.ucp_request_check_status(requests.back()) != UCS_INPROGRESS)
                ucx.ucp_request_free(requests.back()), requests.pop_back();
        }
        for (ucs_status_ptr_t request : requests) ucx.ucp_request_free(request);  // the worker's end ends it
    }

    void close_endpoints(const std::vector<Peer*>& which, bool at_once, double seconds) {
        std::vector<ucs_status_ptr_t> flushing, closing;
        ucp_request_param_t param{};
        if (!at_once) {  // what was sent is still on its way
            for (Peer* peer : which) {
                if (!peer->endpoint || peer->has_error) continue;
                ucs_status_ptr_t request = ucx.ucp_ep_flush_nbx(peer->endpoint, &param);
                if (UCS_PTR_IS_PTR(request)) flushing.push_back(request);
            }
            finish(flushing, seconds);
        }
        if (notices_deaths) param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, param.flags = UCP_EP_CLOSE_FLAG_FORCE;
        for (Peer* peer : which) {
            if (!peer->endpoint) continue;
            ucs_status_ptr_t request = ucx.ucp_ep_close_nbx(peer->endpoint, &param);
            peer->endpoint = nullptr;
            if (UCS_PTR_IS_PTR(request)) closing.push_back(request);
        }
        finish(closing, seconds);
    }

    // Whether calls for this peer make sense; if not, why is known.
    bool is_open(int64_t peer) {
        if (is_aborted.load(std::memory_order_relaxed)) return fail_aborted(), false;
        if (peer < 0 || peer >= table.size || peer == table.rank) return fail(peer, EINVAL), false;
        return !peers[peer].is_broken;
    }

    // ---- sending

    void release(Block* block) {
        if (block) block->used = 0, free_blocks.push_back(block);
    }

    Block* new_block() {
        if (free_blocks.empty()) blocks.emplace_back(new Block), free_blocks.push_back(blocks.back().get());
        Block* block = free_blocks.back();
        free_blocks.pop_back();
        return block;
    }

    Send* new_send() {
        if (free_sends.empty()) all_sends.emplace_back(new Send), free_sends.push_back(all_sends.back().get());
        Send* send = free_sends.back();
        free_sends.pop_back();
        return send;
    }

    static void when_sent(void* request, ucs_status_t status, void* data) {
        Send* send = static_cast<Send*>(data);
        send->links->has_sent = true;
        send->links->end_send(send, status);
        ucx.ucp_request_free(request);
    }

    void end_send(Send* send, ucs_status_t status) {
        Peer& to = peers[send->peer];
        --to.sends, --unsent, to.syncs -= send->is_sync;
        release(send->block);
        free_sends.push_back(send);
        if (status != UCS_OK) note_error(to, status);
    }

    void note_error(Peer& peer, ucs_status_t status) {
        if (!peer.has_error) peer.error = errno_of(status);
        peer.has_error = peer.has_news = true;
    }

    static void when_broken(void* data, ucp_ep_h, ucs_status_t status) {
        Peer* peer = static_cast<Peer*>(data);
        peer->links->note_error(*peer, status);
    }

    void enqueue(Peer& to, const char* data, int64_t num_bytes, Block* block) {
        to.queue.push_back({data, num_bytes, block});
        ++unsent;
    }

    int64_t post(int64_t peer, const LinksPart* parts, int64_t count) {
        if (!is_open(peer)) return -1;
        Peer& to = peers[peer];
        Block* block = nullptr;
        auto close_block = [&] {
            if (block) enqueue(to, block->data, block->used, block), block = nullptr;
        };
        for (int64_t number = 0; number < count; ++number) {
            const char* data = static_cast<const char*>(parts[number].data);
            int64_t left = parts[number].num_bytes;
            if (left <= 0) continue;
            if (left <= COPIED) {
                if (block && block->used + left > BLOCK) close_block();
                if (!block) block = new_block();
                std::memcpy(block->data + block->used, data, left);
                block->used += left;
                continue;
            }
            close_block();
            for (int64_t step; left > 0; left -= step, data += step) {
                step = std::min(left, PIECE);
                enqueue(to, data, step, nullptr);
            }
        }
        close_block();
        return send_queued(to) < 0 ? -1 : 0;
    }

    // Gives UCX what it may have. 1: nothing is queued or under way; 0: something is; -1: broken.
    int64_t send_queued(Peer& to) {
        while (!to.queue.empty() && to.syncs < MOST_SYNCS && to.sends < MOST_SENDS && !to.has_error) {
            Piece piece = to.queue.front();
            to.queue.pop_front();
            bool is_sync = to.since_sync >= SYNC_BYTES;
            to.since_sync = is_sync ? 0 : to.since_sync + std::max(piece.num_bytes, LEAST_COST);
            Send* send = new_send();
            *send = {this, to.rank, piece.block, is_sync};
            ucp_request_param_t param{};
            param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
            param.cb.send = when_sent, param.user_data = send;
            auto give = is_sync ? ucx.ucp_tag_send_sync_nbx : ucx.ucp_tag_send_nbx;
            ++to.sends, to.syncs += is_sync;
            sent[to.rank] += piece.num_bytes;
            ucs_status_ptr_t request = give(to.endpoint, piece.data, piece.num_bytes, ucp_tag_t(table.rank), &param);
            if (!UCS_PTR_IS_PTR(request)) end_send(send, UCS_PTR_STATUS(request));  // over already
        }
        if (to.has_error && (to.sends || !to.queue.empty())) return fail(to.rank, to.error);
        return to.queue.empty() && to.sends == 0;
    }

    int64_t flush(int64_t peer) {
        if (peer >= 0 && !is_open(peer)) return -1;
        if (is_aborted.load(std::memory_order_relaxed)) return fail_aborted();
        has_sent = false;
        if (unsent == 0) return 1;
        ucx.ucp_worker_progress(worker);
        int64_t all = 1;
        for (int64_t each = peer < 0 ? 0 : peer; each < (peer < 0 ? table.size : peer + 1); ++each) {
            Peer& to = peers[each];
            if (to.queue.empty() && to.sends == 0) continue;
            int64_t outcome = to.is_broken ? -1 : send_queued(to);
            if (outcome < 0) return -1;
            all &= outcome;
        }
        return all;
    }

    // ---- receiving

    template <bool IS_AHEAD>
    static void when_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t*, void* data) {
        Peer* peer = static_cast<Peer*>(data);
        peer->links->end_receive(*peer, status, IS_AHEAD);
        ucx.ucp_request_free(request);
    }

    void end_receive(Peer& from, ucs_status_t status, bool is_ahead) {
        --from.receives;
        if (is_ahead) from.fills_ahead = false;
        from.has_news = true;
        if (status != UCS_OK) from.has_lost = true, note_error(from, status);
    }

    // The next message of a peer, in its place, or ahead of what was asked for. 1: it is there or comes; 0: there is none; -1: broken.
    int64_t receive(Peer& from, char* data, int64_t num_bytes) {
        ucp_tag_recv_info_t found;
        ucp_tag_message_h message = ucx.ucp_tag_probe_nb(worker, ucp_tag_t(from.rank), ucp_tag_t(-1), 1, &found);
        if (!message) return 0;
        int64_t length = int64_t(found.length);
        bool is_ahead = length > num_bytes - from.placed;
        char* place = is_ahead ? from.ahead.data() : data + from.placed;
        if (length > PIECE) return fail(from.rank, EPROTO);  // no member sends that
        if (is_ahead) {
            from.low = 0, from.high = length, from.fills_ahead = true;
        } else {
            from.placed += length;
        }
        ucp_request_param_t param{};
        param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
        param.cb.recv = is_ahead ? when_received<true> : when_received<false>, param.user_data = &from;
        ++from.receives;
        received[from.rank] += length;
        ucs_status_ptr_t request = ucx.ucp_tag_msg_recv_nbx(worker, place, found.length, message, &param);
        if (!UCS_PTR_IS_PTR(request)) end_receive(from, UCS_PTR_STATUS(request), is_ahead);
        return 1;
    }

    int64_t take(int64_t peer, char* data, int64_t num_bytes) {
        if (!is_open(peer)) return -1;
        Peer& from = peers[peer];
        if (!from.is_taking) from.is_taking = true, from.placed = 0;
        for (bool has_looked = false;;) {
            if (from.fills_ahead) {
                // nothing can be said before it is there
            } else if (from.low < from.high && from.placed < num_bytes) {
                int64_t length = std::min(from.high - from.low, num_bytes - from.placed);
                std::memcpy(data + from.placed, from.ahead.data() + from.low, length);
                from.low += length, from.placed += length;
                continue;
            } else if (from.placed < num_bytes) {
                int64_t outcome = receive(from, data, num_bytes);
                if (outcome < 0) return -1;
                if (outcome) continue;
            }
            if (from.placed == num_bytes && from.receives == 0 && !from.has_lost) {
                from.is_taking = false;
                return 1;
            }
            if (has_looked) break;
            has_looked = true, from.has_news = false;
            while (ucx.ucp_worker_progress(worker) && !from.has_news) {}
        }
        return from.has_error ? fail(peer, from.error) : 0;
    }

    // ---- waiting

    // Whether a call would get on now that did not before.
    bool is_ready() {
        if (has_sent) {
            bool is_queued = unsent == 0;
            for (Peer& to : peers) is_queued |= !to.queue.empty();
            has_sent = false;
            if (is_queued) return true;
        }
        for (Peer& peer : peers) {
            bool is_used = peer.is_taking || peer.sends || !peer.queue.empty();
            if (is_used && peer.has_error) return true;
            if (!peer.is_taking) continue;
            ucp_tag_recv_info_t found;
            if (peer.has_news) return true;
            if (!peer.fills_ahead && ucx.ucp_tag_probe_nb(worker, ucp_tag_t(peer.rank), ucp_tag_t(-1), 0, &found)) return true;
        }
        return false;
    }

    int64_t sleep(double seconds) {
        seconds = std::min(std::max(seconds, 0.0), 3600.0);
        auto ends = Clock::now() + std::chrono::duration<double>(seconds);
        for (;;) {
            if (is_aborted.load(std::memory_order_relaxed)) return fail_aborted();
            for (Peer& peer : peers)
                if (peer.is_broken && (peer.is_taking || !peer.queue.empty())) return -1;
            while (ucx.ucp_worker_progress(worker)) {}
            if (is_ready()) return 1;
            double left = std::chrono::duration<double>(ends - Clock::now()).count();
            if (left <= 0) return 0;
            ucs_status_t status = ucx.ucp_worker_arm(worker);
            if (status == UCS_ERR_BUSY) continue;
            if (status != UCS_OK) return fail(-1, errno_of(status));
            pollfd polled[2] = {{wake, POLLIN, 0}, {events, POLLIN, 0}};
            timespec length{time_t(left), long((left - double(time_t(left))) * 1e9)};
            int ready = ppoll(polled, 2, &length, nullptr);
            if (ready < 0 && errno != EINTR) return fail(-1, errno);
            if (ready < 0) return 0;
        }
    }

    void abort() {
        is_aborted.store(true);
        uint64_t one = 1;
        while (write(wake, &one, sizeof one) < 0 && errno == EINTR) {}
    }

    // ---- beginning and end

    // A text that says what did not work; empty: all did.
    std::string open(const char* devices, const char* transports) {
        wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wake < 0) return std::string("eventfd: ") + strerror(errno);
        if (std::string why = open_context(context, devices, transports, UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP); !why.empty()) return why;
        ucp_worker_params_t params{};
        params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
        params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // one thread at a time, but not always the same
        ucs_status_t status = ucx.ucp_worker_create(context, &params, &worker);
        if (status != UCS_OK) return worker = nullptr, std::string("ucp_worker_create: ") + ucx.ucs_status_string(status);
        status = ucx.ucp_worker_get_efd(worker, &events);
        if (status != UCS_OK) return std::string("ucp_worker_get_efd: ") + ucx.ucs_status_string(status);
        return "";
    }

    static std::string open_context(ucp_context_h& context, const char* devices, const char* transports, uint64_t features) {
        ucp_config_t* config;
        ucs_status_t status = ucx.ucp_config_read(nullptr, nullptr, &config);
        if (status != UCS_OK) return std::string("ucp_config_read: ") + ucx.ucs_status_string(status);
        std::string why;
        for (auto [name, value] : {std::pair{"NET_DEVICES", devices}, {"TLS", transports}}) {
            if (!value || !*value) continue;
            status = ucx.ucp_config_modify(config, name, value);
            if (status != UCS_OK) why = std::string("UCX_") + name + "=" + value + ": " + ucx.ucs_status_string(status);
        }
        if (why.empty()) {
            ucp_params_t params{};
            params.field_mask = UCP_PARAM_FIELD_FEATURES;
            params.features = features;
            status = ucx.ucp_init_version(MAJOR, MINOR, &params, config, &context);
            if (status != UCS_OK) context = nullptr, why = std::string("ucp_init: ") + ucx.ucs_status_string(status);
        }
        ucx.ucp_config_release(config);
        return why;
    }

    std::string connect(int64_t peer, const void* address) {
        ucp_ep_params_t params{};
        params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                            UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_USER_DATA;
        params.address = static_cast<const ucp_address_t*>(address);
        params.err_mode = notices_deaths ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
        params.err_handler = {when_broken, &peers[peer]};
        params.user_data = &peers[peer];
        ucs_status_t status = ucx.ucp_ep_create(worker, &params, &peers[peer].endpoint);
        if (status == UCS_OK) return "";
        peers[peer].endpoint = nullptr;
        return ucx.ucs_status_string(status);
    }

    ~UcxLinks() {
        if (worker) {
            std::vector<Peer*> open;
            for (Peer& peer : peers) {
                drop_queue(peer);
                open.push_back(&peer);
            }
            close_endpoints(open, is_aborted.load(), LAST_SECONDS);
            ucx.ucp_worker_destroy(worker);
        }
        if (context) ucx.ucp_cleanup(context);
        if (wake >= 0) close(wake);
    }

};

UcxLinks& links_of(void* self) { return *static_cast<UcxLinks*>(self); }

void copy_text(const std::string& text, char* room, int64_t num_bytes) {
    if (num_bytes > 0) snprintf(room, size_t(num_bytes), "%s", text.c_str());
}

}  // namespace

extern "C" {

int64_t lockstep_ucx_links_bytes() { return sizeof(Links); }

// Loads libucp for this process. 1: done, and text gets its version; 0: text gets the reason.
int64_t lockstep_ucx_open(const char* path, char* text, int64_t num_bytes) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return copy_text(dlerror(), text, num_bytes), 0;
#define LOAD(name)                                                                                   \
    ucx.name = reinterpret_cast<decltype(ucx.name)>(dlsym(library, #name));                          \
    if (!ucx.name) return copy_text(std::string(path) + " has no " #name, text, num_bytes), 0;
    FUNCTIONS(LOAD)
#undef LOAD
    copy_text(ucx.ucp_get_version_string(), text, num_bytes);
    return 1;
}

// What UCX finds with these devices and transports (empty: with its own choice), as it prints it. 1: done; 0: text gets the reason.
int64_t lockstep_ucx_describe(const char* devices, const char* transports, char* text, int64_t num_bytes) {
    ucp_context_h context = nullptr;
    std::string why = UcxLinks::open_context(context, devices, transports, UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP);
    if (!why.empty()) return copy_text(why, text, num_bytes), 0;
    char* printed = nullptr;
    size_t length = 0;
    if (FILE* stream = open_memstream(&printed, &length)) {
        ucx.ucp_context_print_info(context, stream);
        fclose(stream);
        copy_text(printed, text, num_bytes);
        free(printed);
    }
    ucx.ucp_cleanup(context);
    return 1;
}

// Links without endpoints yet. Null: text gets the reason.
Links* lockstep_ucx_links(int64_t rank, int64_t size, const char* devices, const char* transports, int64_t notices_deaths,
                          char* text, int64_t num_bytes) {
    auto links = std::make_unique<UcxLinks>();
    links->notices_deaths = notices_deaths;
    std::string why = links->open(devices, transports);
    if (!why.empty()) return copy_text(why, text, num_bytes), nullptr;
    links->peers.resize(size);
    links->sent.resize(size), links->received.resize(size), links->waited.resize(size);
    for (int64_t peer = 0; peer < size; ++peer) {
        links->peers[peer].links = links.get(), links->peers[peer].rank = peer;
        if (peer != rank) links->peers[peer].ahead.resize(PIECE);
    }
    Links& table = links->table;
    table.self = links.get(), table.rank = rank, table.size = size, table.broken_peer = -1;
    table.post = [](void* self, int64_t peer, const LinksPart* parts, int64_t count) { return links_of(self).post(peer, parts, count); };
    table.take = [](void* self, int64_t peer, void* data, int64_t num_bytes) {
        return links_of(self).take(peer, static_cast<char*>(data), num_bytes);
    };
    table.flush = [](void* self, int64_t peer) { return links_of(self).flush(peer); };
    table.sleep = [](void* self, double seconds) { return links_of(self).sleep(seconds); };
    table.abort = [](void* self) { links_of(self).abort(); };
    table.bytes_sent = links->sent.data(), table.bytes_received = links->received.data();
    table.seconds_waited = links->waited.data();
    return &links.release()->table;
}

// This member's address, by which others reach its worker: its bytes, of which at most so many are written.
int64_t lockstep_ucx_address(Links* table, char* room, int64_t num_bytes) {
    UcxLinks& links = links_of(table->self);
    ucp_address_t* address;
    size_t length;
    if (ucx.ucp_worker_get_address(links.worker, &address, &length) != UCS_OK) return -1;
    std::memcpy(room, address, std::min<size_t>(length, size_t(num_bytes)));
    ucx.ucp_worker_release_address(links.worker, address);
    return int64_t(length);
}

// The link to a peer with this address. 1: done; 0: text gets the reason.
int64_t lockstep_ucx_connect(Links* table, int64_t peer, const char* address, char* text, int64_t num_bytes) {
    std::string why = links_of(table->self).connect(peer, address);
    return why.empty() ? 1 : (copy_text(why, text, num_bytes), 0);
}

// After the last call of anything in the table.
void lockstep_ucx_links_free(Links* table) { delete static_cast<UcxLinks*>(table->self); }
}
