// The forward pass of a decoder as a short list of operations, run by one team of threads.
//
// All matrices are laid out in panels of 16 output rows ("words" of 32 bits: one float, or two bfloat16 that
// are neighbours along K), so that one 512-bit load serves 16 outputs and a row's inputs are broadcast:
// decode reads each weight once at the speed of memory, and nothing is summed across lanes. The KV cache has
// the same layout, so attention is the same inner loop: keys are a panel of 16 "outputs" (scores), values a
// panel along their keys. Every output is summed in one fixed order, whatever else is in the batch.
//
// This file runs a list of operations (operations.def), each of which is defined in the room of its kind. All of them need nothing
// but OpenMP. program.py writes the lists, docs/design/kernels.md explains.

#include <omp.h>

#include "adapters/adapted.hpp"
#include "attention/attention.hpp"
#include "choosing/choosing.hpp"
#include "choosing/logprobs.hpp"
#include "choosing/shaping.hpp"
#include "core/contract.hpp"
#include "core/rows.hpp"
#include "embedding/embedding.hpp"
#include "exchange/members.hpp"
#include "experts/experts.hpp"
#include "norms/norms.hpp"
#include "products/linear.hpp"
#include "states/conv.hpp"
#include "states/delta.hpp"
#include "states/ssd.hpp"
#include "states/state.hpp"

namespace {

// The names of all operations, by kind.
constexpr const char* NAMES =
#define OPERATION(kind, call) #kind " "
#define CALLERS OPERATION
#include "operations.def"
    ;

// False if the step did not come to its end. Each operation is called by all threads that take part, and returns when all of it is taken.
template <class T>
bool run(const Operation* operations, int64_t count, const Step& step, int threads) {
    Team team(count, threads);
    auto take_part = [&](bool is_caller) {
        TileUse tiles(tiles_allowed);  // also where the type of the model is float: rounded inputs are multiplied by tiles
        for (int64_t number = 0; number < count; number = team.behind(number)) {
            const Operation& op = operations[number];
            const Operation& before = operations[number == 0 ? 0 : number - 1];
            if ((is_callers(op.kind) && !is_caller) || !team.enter(number)) continue;
            Work work = team.work(number, is_caller);
            switch (op.kind) {
#define OPERATION(kind, call) case kind: call; break;
#define CALLERS OPERATION
#include "operations.def"
            }
            team.leave(number);
        }
    };
    if (threads == 1) {
        take_part(true);
    } else {
#pragma omp parallel num_threads(threads)
        take_part(omp_get_thread_num() == 0);
    }
    if (team.failed.load(std::memory_order_relaxed)) return false;
    if (step.seconds != nullptr)
        for (int64_t number = 0; number < count; ++number) step.seconds[operations[number].kind] += team.seconds(number);
    return true;
}

}  // namespace

extern "C" {

// Runs the operations in order. element: 0 float, 1 bfloat16. Returns 0, or 1 if the step was given up.
int64_t lockstep_run(const void* operations, int64_t count, const void* step, int64_t element, int64_t threads) {
    auto* list = static_cast<const Operation*>(operations);
    auto& with = *static_cast<const Step*>(step);
    bool done = element == 0 ? run<Float>(list, count, with, int(threads)) : run<BFloat16>(list, count, with, int(threads));
    return done ? 0 : 1;
}

int64_t lockstep_operation_bytes() { return sizeof(Operation); }
int64_t lockstep_step_bytes() { return sizeof(Step); }
const char* lockstep_operation_names() { return NAMES; }
const char* lockstep_vectors() { return LOCKSTEP_VECTORS; }
const char* lockstep_compiler() { return __VERSION__; }
// Whether products use AMX: asks for it, or switches it off.
int64_t lockstep_use_tiles(int64_t wanted) { return tiles_allowed = wanted != 0 && ask_for_tiles(); }
}
