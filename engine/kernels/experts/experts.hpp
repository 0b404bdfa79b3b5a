// A mixture of experts: routing, the products of the experts held here, and the exchange with other instances.
//
// Every member of a group has an arena that the others can read: the rows and choices of its own tokens, and the
// results of what its experts computed for anybody. In a layer each member offers its rows, waits for those of the
// others (MEET), sorts all pairs of its experts, computes them, returns the results, waits for all others'
// (HOME) and sums a token's results in the order of its choices. Who has come HOME has been served by all, so its
// rows may be overwritten; who MEETs again has taken its results, so those may be: one arena each is enough.
// A group of one does the same without waiting. With members on other hosts linked.hpp carries rows and results.

#pragma once

#include <algorithm>
#include <vector>

#include "../core/contract.hpp"
#include "../exchange/members.hpp"
#include "../exchange/sums.hpp"
#include "../products/products.hpp"

namespace {

// How the logits of a router become experts and their weights.
struct Routing {
    int64_t is_sigmoid;        // scores are sigmoids of the logits; softmax over all otherwise
    int64_t is_normalised;     // weights are divided by their sum
    int64_t is_exact;          // neither logits nor weights are rounded to the type of the step
    int64_t groups, kept;      // experts lie in so many groups, and are chosen from so many of these; groups is 1 if they do not
    int64_t best_of_group;     // a group's score is the sum of so many of its experts' greatest ones
    double factor;             // of the weights
    double least;              // the least sum that weights are divided by
    double near;               // above 0: a weight is the share among the experts left that are this near, relative to their size
    const float* correction;   // [n], added to the scores to choose by; null: none
    const float* scales;       // [n], factors on the weights of each expert, which are exact then; null: none
    uint16_t* copies;          // [rows, k], the ids once more, for requests that want them; null: none does
};

// The experts that one token's router may still choose from.
class Choices {
    std::vector<float> keys;   // what they are chosen by, filled up to whole vectors
    std::vector<Mask> left;    // 16 by 16
    int64_t parts = 0;

   public:
    void begin(int64_t n) {
        parts = (n + LANES - 1) / LANES;
        keys.resize(size_t(parts * LANES)), left.resize(size_t(parts));
        for (int64_t part = 0; part < parts; ++part) left[size_t(part)] = lanes_of(int(n - part * LANES));
    }
    float key(int64_t expert) const { return keys[size_t(expert)]; }
    Floats values(int64_t part) const { return load(keys.data() + part * LANES); }

    // Puts body(values, first, lanes) in the place of all values.
    template <class Body>
    void change(Body body) {
        for (int64_t part = 0; part < parts; ++part) {
            Mask lanes = lanes_in(part);
            store(keys.data() + part * LANES, body(values(part), part * LANES, lanes));
        }
    }
    float greatest() const {
        Floats most = filled(-INFINITY);
        for (int64_t part = 0; part < parts; ++part) most = maximum(most, values(part), left[size_t(part)]);
        return greatest_of(most);
    }
    // Sum of body(values, lanes) over those that are left.
    template <class Body>
    float sum(Body body) const {
        Floats total = filled(0.f);
        for (int64_t part = 0; part < parts; ++part) total = add(total, body(values(part)), left[size_t(part)]);
        return sum_of(total);
    }
    // The first one of the greatest, which is not left then.
    int64_t choose(float value) {
        for (bool any : {false, true})  // any: where nothing is equal, for it is no number
            for (int64_t part = 0; part < parts; ++part) {
                auto found = any ? lanes_in(part) : Mask(lanes_in(part) & is_equal(values(part), filled(value)));
                if (found == 0) continue;
                int64_t expert = part * LANES + __builtin_ctz(found);
                leave_out(expert, expert + 1);
                return expert;
            }
        return 0;
    }
    void leave_out(int64_t begin, int64_t end) {
        for (int64_t expert = begin; expert < end; ++expert) left[size_t(expert / LANES)] &= Mask(~(1u << expert % LANES));
    }

   private:
    Mask lanes_in(int64_t part) const { return left[size_t(part)]; }
};

// Leaves those groups out whose experts are not among the best. Of equal groups the first one is better.
inline void keep_groups(Choices& choices, const Routing& how, int64_t n) {
    int64_t size = n / how.groups;
    thread_local std::vector<float> scores;
    scores.resize(size_t(how.groups));
    for (int64_t group = 0; group < how.groups; ++group) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t expert = group * size; expert < (group + 1) * size; ++expert) {
            float key = choices.key(expert);
            if (key > first) second = first, first = key;
            else if (key > second) second = key;
        }
        scores[size_t(group)] = how.best_of_group == 2 ? first + second : first;
    }
    for (int64_t group = 0; group < how.groups; ++group) {
        int64_t better = 0;
        for (int64_t other = 0; other < how.groups; ++other)
            better += scores[size_t(other)] > scores[size_t(group)] || (scores[size_t(other)] == scores[size_t(group)] && other < group);
        if (better >= how.kept) choices.leave_out(group * size, (group + 1) * size);
    }
}

// Calls change(weights, lanes) for a token's k weights, 16 at a time, and stores what it gives.
template <class Change>
void for_weights(float* weights, int64_t k, Change change) {
    for (int64_t place = 0; place < k; place += LANES) {
        Mask lanes = lanes_of(int(k - place));
        store(weights + place, change(load(weights + place, lanes), lanes), lanes);
    }
}

// Each chosen one's share among those left that are near it, itself included.
inline void choose_near(Choices& choices, const Routing& how, int64_t* ids, float* weights, int64_t k) {
    for (int64_t place = 0; place < k; ++place) {
        float peak = choices.greatest();
        Floats at = filled(peak), near = filled(float(how.near));
        float total = choices.sum([&](Floats value) {
            Floats size = maximum(maximum(value, filled(0.f) - value), at);
            Mask far = is_greater((at - value) / size, near);
            return only(Mask(~far), exp_ps(value - at));
        });
        ids[place] = choices.choose(peak);
        weights[place] = 1.f / total;
    }
}

// in: logits as float [rows, n]; out: weights [rows, k] as float; extra: ids [rows, k] int64; more: a Routing. added: by number of an adapter its
// tag, in its place in a choice; null: choices have none.
// The k with the greatest scores in descending order, the first one of equals.
template <class T>
void route(const Operation& op, const Step& step, Work& work) {
    auto& how = *static_cast<const Routing*>(op.more);
    thread_local Choices choices;
    thread_local std::vector<float> scores;  // where experts are chosen by something else
    const bool has_scores = how.correction != nullptr && how.is_sigmoid == 0;
    auto* tags = static_cast<const int64_t*>(op.added);
    auto rounded = [&](Floats value) { return how.is_exact ? value : T::rounded(value); };
    auto choose = [&](int64_t token, int64_t* ids) {
        float* weights = static_cast<float*>(op.out) + token * op.k;
        const float* logits = static_cast<const float*>(op.in) + token * op.n;
        choices.begin(op.n);
        choices.change([&](Floats, int64_t first, Mask lanes) { return rounded(load(logits + first, lanes)); });
        if (how.near > 0) return choose_near(choices, how, ids, weights, op.k);
        Floats peak = filled(0.f);
        float total = 1.f;
        if (how.is_sigmoid) {
            choices.change([](Floats value, int64_t, Mask) { return sigmoid_ps(value); });
        } else {
            peak = filled(choices.greatest());
            total = choices.sum([&](Floats value) { return exp_ps(value - peak); });
        }
        if (has_scores) choices.change([&](Floats value, int64_t, Mask) { return exp_ps(value - peak) / filled(total); });
        if (how.correction != nullptr) {
            scores.resize(size_t((op.n + LANES - 1) / LANES * LANES));
            choices.change([&](Floats value, int64_t first, Mask lanes) {
                store(scores.data() + first, value);
                return value + load(how.correction + first, lanes);
            });
        }
        if (how.groups > 1) keep_groups(choices, how, op.n);
        for (int64_t place = 0; place < op.k; ++place) {
            int64_t expert = ids[place] = choices.choose(choices.greatest());
            weights[place] = how.correction != nullptr ? scores[size_t(expert)] : choices.key(expert);
        }
        float chosen = 0.f;
        for_weights(weights, op.k, [&](Floats weight, Mask lanes) {
            if (!how.is_sigmoid && !has_scores) weight = exp_ps(weight - peak) / filled(total);
            chosen += sum_of(weight, lanes);
            return weight;
        });
        Floats by = filled(how.is_normalised ? std::max(chosen, float(how.least)) : 1.f), factor = filled(float(how.factor));
        for_weights(weights, op.k, [&](Floats weight, Mask) { return rounded(weight / by * factor); });
        if (how.scales != nullptr)
            for (int64_t place = 0; place < op.k; ++place) weights[place] *= how.scales[ids[place]];
    };
    work.for_each(rows_of(op, step), [&](int64_t token) {
        auto* ids = static_cast<int64_t*>(const_cast<void*>(op.extra)) + token * op.k;
        choose(token, ids);
        if (how.copies != nullptr) std::copy(ids, ids + op.k, how.copies + token * op.k);
        if (tags == nullptr) return;
        const int64_t tag = tags[(op.flags & SELECTED ? step.chosen_adapters : step.adapters)[token]];
        for (int64_t place = 0; place < op.k; ++place) ids[place] |= tag;
    });
}

// extra: the exchange. Sorts the pairs of all members whose experts are here by expert, and says in the arena where the
// result of each will be. a: 1 for the members whose rows have come, 2 for the others, behind them; 0: all at once. out: number of the adapter of
// each pair's token, or none; added: TaggedAdapters that have it, null: the step has, and there are no other members.
template <class T>
void sort_pairs(const Operation& op, const Step& step, Work& work) {
    if (work.take(1) > 0) return;  // by one thread
    using E = typename T::Element;
    auto& exchange = *static_cast<const Exchange*>(op.extra);
    Linkage* linkage = exchange.linkage;
    int64_t *begins = exchange.begins, k = exchange.top_k, pitch = pitch_of<T>(exchange.hidden), before = 0;
    thread_local std::vector<int64_t> homes;
    homes.clear();
    for (int64_t home = 0; home < exchange.size; ++home) {
        bool is_own = home == exchange.rank;
        if (linkage != nullptr) {
            Peer& peer = linkage->peers[home];
            if (peer.pass != 0 || (op.a == 1 && !is_own && !has_arrived(words_of(exchange, home) + OFFERED, *exchange.rounds))) continue;
            peer.pass = std::max<int64_t>(op.a, 1);
        } else {
            exchange.firsts[home] = before;
        }
        homes.push_back(home);
        exchange.sizes[home] = is_own ? rows_of(op, step) : words_of(exchange, home)[OFFERED_ROWS];
        before += exchange.sizes[home] * k;
    }
    // Of a member on another host only the rows that are needed here have come, one behind the other.
    auto for_pairs = [&](auto body) {
        for (int64_t home : homes) {
            auto* ids = reinterpret_cast<const int64_t*>(exchange.arenas[home] + exchange.ids_at);
            bool is_remote = has_role(exchange, home, REMOTE);
            int64_t num_here = 0;
            for (int64_t token = 0; token < exchange.sizes[home]; ++token) {
                bool is_here = false;
                for (int64_t pair = token * k; pair < (token + 1) * k; ++pair) {
                    int64_t owner = owner_of(exchange, home, token, ids[pair]);
                    if (owner == exchange.rank) body(home, pair, is_remote ? num_here : token, ids[pair]);
                    is_here |= is_remote && linkage->hosts[owner] == linkage->hosts[exchange.rank];
                }
                num_here += is_here;
            }
        }
    };
    int64_t base = op.a == 2 ? begins[exchange.num_local] : 0;  // results of the first ones stay where they are
    std::fill(begins, begins + exchange.num_local + 1, 0);
    begins[0] = base;
    for_pairs([&](int64_t, int64_t, int64_t, int64_t choice) {
        const int64_t expert = expert_of(choice);
        ++begins[exchange.numbers[expert] + 1];
        if (exchange.counted != nullptr) ++exchange.counted[expert];
    });
    for (int64_t expert = 0; expert < exchange.num_local; ++expert) begins[expert + 1] += begins[expert];
    thread_local std::vector<int64_t> next;
    next.assign(begins, begins + exchange.num_local);
    auto* places = reinterpret_cast<int64_t*>(exchange.arenas[exchange.rank] + exchange.places_at);
    auto* tagged = static_cast<const TaggedAdapters*>(op.added);
    for_pairs([&](int64_t home, int64_t pair, int64_t row, int64_t choice) {
        int64_t place = next[exchange.numbers[expert_of(choice)]]++;
        places[exchange.firsts[home] + pair] = place;
        exchange.sources[place] = exchange.arenas[home] + exchange.rows_at + row * pitch * sizeof(E);
        if (op.out == nullptr) return;
        static_cast<int64_t*>(op.out)[place] = tagged != nullptr ? tagged->number_of(adapter_tag_of(choice))
                                                                 : (op.flags & SELECTED ? step.chosen_adapters : step.adapters)[row];
    });
}

// extra: the exchange. Copies the rows of the sorted pairs together.
template <class T>
void gather(const Operation& op, Work& work) {
    using E = typename T::Element;
    auto& exchange = *static_cast<const Exchange*>(op.extra);
    int64_t pitch = pitch_of<T>(exchange.hidden), first = exchange.begins[0];
    work.for_each(exchange.begins[exchange.num_local] - first, [&](int64_t number) {
        int64_t pair = first + number;
        std::memcpy(static_cast<E*>(exchange.gathered) + pair * pitch, exchange.sources[pair], exchange.hidden * sizeof(E));
    });
}

// Some panels of an expert, and the rows that go through them.
struct ExpertTask { int64_t expert, part, first, rows; };

// Calls body(task, next) for all parts of experts that have rows, shared out among the threads. There is no next if it has no rows.
template <class Body>
void for_experts(const int64_t* begins, int64_t num_experts, int64_t parts, Work& work, Body body) {
    if (begins[0] == begins[num_experts]) return;
    auto take = [&] {
        for (;;) {
            int64_t number = work.take(1), expert = number / parts;
            if (expert >= num_experts) return ExpertTask{};
            int64_t first = begins[expert], rows = begins[expert + 1] - first;
            if (rows > 0) return ExpertTask{expert, number % parts, first, rows};
        }
    };
    for (ExpertTask now = take(), next; now.rows > 0; now = next) {
        next = take();
        body(now, next);
    }
}

// out [rows, n] = silu(gate) * up of in [rows, k], rows sorted by expert; weights by expert: gate's panels, then up's; with WITHIN up's
// are the gate's. extra: first row of each expert; a: experts, b: the activation, SILU if 0, factors: its numbers; more: bias
// [experts, 2, n] or none
template <class T, class In = T>
void experts_up(const Operation& op, Work& work) {
    using E = typename T::Element;
    constexpr int64_t TOGETHER = 2;  // panels: 32 outputs are a line of the cache, which two threads must not write to at once
    int64_t panels = (op.n + LANES - 1) / LANES;
    auto products = gated_products<T, In>(op.n, op.b, op.factors);
    const Adapters<T> adapters(op);
    auto* biases = static_cast<const float*>(op.more);
    auto bias_of = [&](int64_t row, int64_t column) { return biases == nullptr ? nullptr : biases + row * op.n + column; };
    Weights weights(op, op.k / In::PACK, In::PACK);
    const int64_t up = op.flags & WITHIN ? 0 : panels;  // behind the gate
    auto gate_of = [&](const ExpertTask& task) { return task.expert * (panels + up) + TOGETHER * task.part; };
    auto panels_at = [&](int64_t gate) { return Panels{weights.panel(gate), weights.panel(gate + up)}; };
    for_experts(static_cast<const int64_t*>(op.extra), op.a, (panels + TOGETHER - 1) / TOGETHER, work,
                [&](const ExpertTask& now, const ExpertTask& next) {
        auto count_of = [&](const ExpertTask& task) { return std::min(TOGETHER, panels - TOGETHER * task.part); };
        int64_t gate = gate_of(now), then = next.rows > 0 ? gate_of(next) : gate, count = count_of(now);
        products.want(weights, {then, then + up}, next.rows > 0 ? count_of(next) : 0, warm_tiles<In>(op.k, now.rows) * count);
        for (int64_t panel = 0; panel < count; ++panel) {
            int64_t column = (TOGETHER * now.part + panel) * LANES;
            products.multiply(static_cast<const typename In::Element*>(op.in) + now.first * pitch_of<In>(op.k), op.k, now.rows, panels_at(gate + panel),
                              panels_at(panel + 1 < count ? gate + panel + 1 : then), true,
                              {static_cast<E*>(op.out) + now.first * pitch_of<T>(op.n) + column, lanes_of(int(op.n - column)),
                               bias_of(2 * now.expert, column), bias_of(2 * now.expert + 1, column), adapters ? &adapters : nullptr, now.first,
                               column / LANES, column / LANES + up, now.expert},
                              room_for<In>(weights, op.k, now.rows, 1));
        }
    });
    products.finish();
}

// out float [rows, n] = 0 of all rows but those of experts [a, b); extra: first row of each of c experts
void clear(const Operation& op, Work& work) {
    auto* begins = static_cast<const int64_t*>(op.extra);
    work.for_each(begins[op.c], [&](int64_t row) {
        if (row >= begins[op.a] && row < begins[op.b]) return;
        std::memset(static_cast<float*>(op.out) + row * op.n, 0, size_t(op.n) * sizeof(float));
    });
}

// out [rows, n] = in [rows, k] x weights of its expert (+ more: bias [experts, n]); b: parts of the inputs. With AS_FLOAT out is
// float [rows, n], for others to add what they have of it. There is no bias where they have parts of the same expert.
template <class T, class In = T>
void experts_down(const Operation& op, Work& work) {
    using E = typename T::Element;
    int64_t pairs = (op.n + 2 * LANES - 1) / (2 * LANES);
    struct Columns {
        int64_t first, column;  // of rows and columns
        Mask low, high;
        const float* bias;      // of these columns, or none
        int64_t expert;
    };
    const Adapters<T> adapters(op);
    auto* biases = static_cast<const float*>(op.more);
    auto with = [](const float* bias, Floats value, Mask lanes) { return bias == nullptr ? value : value + load(bias, lanes); };
    const bool as_float = op.flags & AS_FLOAT;
    const int64_t size = as_float ? sizeof(float) : sizeof(E), pitch = as_float ? op.n : pitch_of<T>(op.n);
    auto place = [&](const Columns& to, int64_t row) { return static_cast<char*>(op.out) + ((to.first + row) * pitch + to.column) * size; };
    auto put = [&](char* out, Floats value, Mask lanes) {
        if (as_float) store(reinterpret_cast<float*>(out), value, lanes);
        else T::store(reinterpret_cast<E*>(out), value, lanes);
    };
    auto products = products_into<In, Columns>([&](const Columns& to, int64_t row, Floats one, Floats two) {
        one = with(to.bias, one, to.low), two = with(to.bias == nullptr ? nullptr : to.bias + LANES, two, to.high);
        if (adapters) adapters.add(one, two, to.first + row, to.column / LANES, to.column / LANES + 1, to.expert);
        put(place(to, row), one, to.low);
        put(place(to, row) + LANES * size, two, to.high);
    }, place, std::max<int64_t>(1, op.b));
    Weights weights(op, op.k / In::PACK, In::PACK);
    auto panel_of = [&](const ExpertTask& task) { return (task.expert * pairs + task.part) * 2; };
    auto panels_at = [&](int64_t panel) { return Panels{weights.panel(panel), weights.panel(panel + 1)}; };
    for_experts(static_cast<const int64_t*>(op.extra), op.a, pairs, work, [&](const ExpertTask& now, const ExpertTask& next) {
        int64_t column = 2 * now.part * LANES, panel = panel_of(now), then = next.rows > 0 ? panel_of(next) : panel;
        products.want(weights, {then}, next.rows > 0 ? 2 : 0, warm_tiles<In>(op.k, now.rows));
        products.multiply(static_cast<const typename In::Element*>(op.in) + now.first * pitch_of<In>(op.k), op.k, now.rows, panels_at(panel),
                          panels_at(then), true,
                          {now.first, column, lanes_of(int(op.n - column)),
                           lanes_of(int(std::max<int64_t>(0, op.n - column - LANES))),
                           biases == nullptr ? nullptr : biases + now.expert * op.n + column, now.expert},
                          room_for<In>(weights, op.k, now.rows, 1));
    });
    products.finish();
}

// out [rows, n] = sum over its k pairs, in order, of in (weights, float) * results, wherever they are (+ out). extra: the exchange; more: that of
// ranks which have a part of each result, float [pairs, n] from byte a of each arena, or none; number: a factor on the sum
template <class T>
void combine(const Operation& op, const Step& step, Work& work) {
    using E = typename T::Element;
    auto& exchange = *static_cast<const Exchange*>(op.extra);
    auto* ranks = static_cast<const Exchange*>(op.more);
    auto* weights = static_cast<const float*>(op.in);
    auto* ids = reinterpret_cast<const int64_t*>(exchange.arenas[exchange.rank] + exchange.ids_at);
    int64_t before = exchange.firsts[exchange.rank], pitch = pitch_of<T>(op.n);
    const Floats factor = factor_of(op.number);
    struct Result {
        const E* row;   // if it is not in parts
        int64_t place;
    };
    thread_local std::vector<Result> results;
    results.resize(size_t(op.k));
    work.for_each(rows_of(op, step), [&](int64_t token) {
        for (int64_t choice = 0; choice < op.k; ++choice) {
            int64_t pair = token * op.k + choice;
            const char* arena = exchange.returned[owner_of(exchange, exchange.rank, token, ids[pair])];
            int64_t place = reinterpret_cast<const int64_t*>(arena + exchange.places_at)[before + pair];
            results[size_t(choice)] = {reinterpret_cast<const E*>(arena + exchange.results_at) + place * pitch, place};
        }
        for (int64_t i = 0; i < op.n; i += LANES) {
            Mask lanes = lanes_of(int(op.n - i));
            Floats sum = filled(0.f);
            for (int64_t choice = 0; choice < op.k; ++choice) {
                const Result& from = results[size_t(choice)];
                Floats result = ranks == nullptr ? T::load(from.row + i, lanes)
                                                 : T::rounded(sum_over_ranks(*ranks, op.a, from.place * op.n + i, lanes));
                sum = fmadd(filled(weights[token * op.k + choice]), result, sum);
            }
            E* to = static_cast<E*>(op.out) + token * pitch + i;
            T::store(to, op.flags & ADD ? fmadd(sum, factor, T::load(to, lanes)) : sum * factor, lanes);
        }
    });
}

// Both products with inputs of the kind that the weights multiply.
template <class T>
void experts_up_of_kind(const Operation& op, Work& work) {
    op.flags & ROUNDED ? experts_up<T, Bytes>(op, work) : experts_up<T>(op, work);
}
template <class T>
void experts_down_of_kind(const Operation& op, Work& work) {
    op.flags & ROUNDED ? experts_down<T, Bytes>(op, work) : experts_down<T>(op, work);
}

}  // namespace

extern "C" {

int64_t lockstep_routing_bytes() { return sizeof(Routing); }
}
