// What the members of a group do for each other in the middle of a step: offer, wait, look, give back.

#pragma once

#include "linked.hpp"
#include "waiting.hpp"  // of parallel/native

namespace {

// extra: the exchange. What others wait for is in this member's arena.
void publish(const Operation& op, int64_t which) {
    auto& exchange = *static_cast<const Exchange*>(op.extra);
    __atomic_store_n(words_of(exchange, exchange.rank) + which, *exchange.rounds, __ATOMIC_RELEASE);
}

// extra: the exchange. This member's rows are in its arena; or its sums, from byte a of it on, k bytes a row.
void offer(const Operation& op, const Step& step, Team& team) {
    if (op.flags & TO_CHOOSE && !step.choose) return;
    auto& exchange = *static_cast<const Exchange*>(op.extra);
    int64_t rows = rows_of(op, step);
    words_of(exchange, exchange.rank)[OFFERED_ROWS] = rows;
    ++*exchange.rounds;
    publish(op, OFFERED);
    if (!is_linked(exchange)) return;
    exchange.linkage->area = op.a, exchange.linkage->area_bytes = rows * op.k, exchange.linkage->now = &exchange;
    post_offer(exchange, rows);
    if (!exchange.linkage->are_sums) team.pending = {go_on_with, &exchange};
}

// extra: the exchange. Wait for the others' rows (MEET), or results (HOME).
void meet(const Operation& op, const Step& step, int64_t which, Team& team) {
    if (op.flags & TO_CHOOSE && !step.choose) return;
    auto& exchange = *static_cast<const Exchange*>(op.extra);
    if (is_linked(exchange)) {
        Linkage& linkage = *exchange.linkage;
        linkage.first_pass = seconds_now() - linkage.began_at;
        if (!await_all(exchange, which, linkage.are_sums || which == RETURNED)) team.failed.store(true, std::memory_order_relaxed);
        linkage.began_at = seconds_now();
        if (which == RETURNED) team.pending = {};
        return;
    }
    for (int64_t rank = 0; rank < exchange.size; ++rank) {
        Patience patience{exchange.crowded};
        if (!await(words_of(exchange, rank) + which, *exchange.rounds, rank, patience, exchange.check)) {
            team.failed.store(true, std::memory_order_relaxed);
            return;
        }
    }
}

// extra: the exchange, over links. Whether to wait for the others' rows before the products of what is there. Members of this host are
// waited for: they may still read the last layer's results, which the products overwrite.
void look(const Operation& op, const Step& step, Team& team) {
    auto& exchange = *static_cast<const Exchange*>(op.extra);
    bool begins = begins_without_others(exchange, rows_of(op, step));
    if (!await_all(exchange, OFFERED, false, begins)) team.failed.store(true, std::memory_order_relaxed);
    exchange.linkage->began_at = seconds_now();
}

// extra: the exchange. Results of the experts here are in its arena; a: 1 if those of some members' rows only, which came first.
void give_back(const Operation& op) {
    auto& exchange = *static_cast<const Exchange*>(op.extra);
    if (is_linked(exchange)) {
        Linkage& linkage = *exchange.linkage;
        if (op.a != 1) learn(linkage.products, linkage.first_pass + seconds_now() - linkage.began_at);
        for (int64_t home = 0; home < exchange.size; ++home) {
            Peer& peer = linkage.peers[home];
            if (!has_role(exchange, home, REMOTE) || peer.pass == 0 || peer.is_returned) continue;
            peer.is_returned = 1;
            post_results(exchange, home);
        }
    }
    if (op.a != 1) publish(op, RETURNED);
}

}  // namespace

extern "C" {

// Whether a member's word has risen to a target; what has come from it over its link is taken first.
int64_t lockstep_has_arrived(const void* exchange, int64_t rank, const void* word, int64_t target) {
    auto& common = *static_cast<const Exchange*>(exchange);
    const void* now = is_linked(common) ? common.linkage->now : nullptr;
    auto& with = now == nullptr ? common : *static_cast<const Exchange*>(now);
    auto* at = static_cast<const int64_t*>(word);
    for (int64_t which : {OFFERED, RETURNED})
        if (is_linked(with) && at == words_of(with, rank, which) + which && target == *with.rounds) look_at(with, rank, which);
    return has_arrived(at, target);
}

int64_t lockstep_exchange_bytes() { return sizeof(Exchange); }

int64_t lockstep_linkage_bytes() { return sizeof(Linkage); }

int64_t lockstep_peer_bytes() { return sizeof(Peer); }
}
