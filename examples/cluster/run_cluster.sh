#!/usr/bin/env bash
# Runs one `serve` on each node of a Slurm allocation (in sbatch or salloc), as one mesh, and drains it at SIGTERM.
#
#   examples/cluster/run_cluster.sh [MODEL [FLAGS OF serve...]]
#
#   LOCKSTEP               the program                                       default: lockstep
#   LOCKSTEP_LOCAL         instances per node                                default: 1
#   LOCKSTEP_HEAD_ADDRESS  the head's address                                default: its first one
#   LOCKSTEP_PORT          port of the endpoint, on the head's node          default: 8000
#   LOCKSTEP_RPC_PORT      port of the coordinator, there                    default: 29550
#   LOCKSTEP_DRAIN         seconds that requests may still run after SIGTERM default: 120
#   LOCKSTEP_REQUEUE       1: a job that drained is queued again             default: 1 in a batch job, else 0
#
# The nodes need Lockstep at the same path, and no shared directory: the key reaches them through srun.
set -euo pipefail

LOCKSTEP=${LOCKSTEP:-lockstep}
LOCAL=${LOCKSTEP_LOCAL:-1}
PORT=${LOCKSTEP_PORT:-8000}
RPC_PORT=${LOCKSTEP_RPC_PORT:-29550}
DRAIN=${LOCKSTEP_DRAIN:-120}
batch=0
[ "${SLURM_TASK_PID:-}" = "$$" ] && batch=1
REQUEUE=${LOCKSTEP_REQUEUE:-$batch}

say() { printf '%s run_cluster: %s\n' "$(date '+%m-%d %H:%M:%S')" "$*"; }

# On every node: the key comes on standard input; the first one is the head.
run_node() { # DIRECTORY PROGRAM LOCAL HEAD PORT RPC_PORT DRAIN MODEL [FLAGS...]
    local directory=$1 program=$2 local_size=$3 head=$4 port=$5 rpc_port=$6 drain=$7 status=0
    shift 7
    directory=$directory-$SLURM_NODEID
    mkdir -m 700 "$directory" # fails where there is one
    trap "rm -rf '$directory'" EXIT
    (umask 077 && cat >"$directory/mesh.key")
    local mesh=(-dp $((local_size * SLURM_NNODES)) -dpl "$local_size" -dpa "$head" -dpp "$rpc_port")
    mesh+=(--mesh-key-file "$directory/mesh.key" --drain-timeout "$drain")
    if [ "$SLURM_NODEID" = 0 ]; then
        mesh+=(--port "$port" --shutdown-timeout "$drain")
    else
        mesh+=(--headless -dpr $((local_size * SLURM_NODEID)))
    fi
    "$program" serve "$@" "${mesh[@]}" </dev/null &
    echo $! >"$directory/pid"
    wait $! || status=$?
    return "$status"
}

# On every node: SIGTERM for serve alone. It tells its processes in the right order; a signal of Slurm reaches all of them.
drain_node() { # DIRECTORY
    kill -TERM "$(cat "$1-$SLURM_NODEID/pid")"
}

HEAD=${LOCKSTEP_HEAD_ADDRESS:-$(srun --nodes=1 --ntasks=1 --relative=0 hostname -I | cut -d' ' -f1)}
directory=$(mktemp -d "${TMPDIR:-/tmp}/lockstep-$SLURM_JOB_ID-XXXXXXXX")
trap 'rm -rf "$directory"' EXIT
"$LOCKSTEP" keygen "$directory/mesh.key" >/dev/null
say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, head $HEAD, restart ${SLURM_RESTART_COUNT:-0}"

# A node that is lost does not end the step of the others: the mesh goes on without it.
srun --kill-on-bad-exit=0 --ntasks-per-node=1 --label \
    bash -c "set -eu; $(declare -f run_node); run_node \"\$@\"" node "$directory" \
    "$LOCKSTEP" "$LOCAL" "$HEAD" "$PORT" "$RPC_PORT" "$DRAIN" "${@:-lockstep-moe}" <"$directory/mesh.key" &
step=$!

drained=0
drain() {
    [ "$drained" = 0 ] || return 0
    drained=1
    say "SIGTERM: instances drain, for at most $DRAIN s"
    srun --overlap --ntasks-per-node=1 bash -c "$(declare -f drain_node); drain_node \"\$@\"" node "$directory" || true
}
trap drain TERM INT

status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do # wait returns at a signal, too
    status=0
    wait "$step" || status=$?
done
say "the mesh has ended, status $status"
if [ "$drained" = 1 ] && [ "$REQUEUE" = 1 ]; then
    say "queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
