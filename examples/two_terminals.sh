#!/usr/bin/env bash
# One mesh from several commands, as it is started over several terminals or hosts:
#
#   terminal 1   the head: coordinator and router, no instance of its own
#   terminal 2   headless instance, rank 0
#   terminal 3   headless instance, rank 1
#   terminal 4   one more while the mesh serves: it learns model, settings and rank from the coordinator
#
# Here they all run in the background of one script, which asks for some text, shows the table of instances,
# adds the third instance, takes it out again, and ends everything.
#
#   examples/two_terminals.sh [MODEL]      default: the model that ships with Lockstep
#   LOG=/tmp/mesh.log PORT=8010 RPC=62310 examples/two_terminals.sh
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

MODEL=${1:-lockstep-moe}
PORT=${PORT:-8000}
RPC=${RPC:-62300}
LOG=${LOG:-/dev/stderr}
mesh=(-dpa 127.0.0.1 -dpp "$RPC")
pids=()

run() {  # a command as it would be typed in a terminal of its own
    printf '\n$ %s &\n' "$*"
    "$@" >>"$LOG" 2>&1 &
    pids+=($!)
}

show() {  # a command whose output matters here
    printf '\n$ %s\n' "$*"
    "$@"
}

stop() {
    kill "${pids[@]}" 2>/dev/null || true
    wait
}
trap stop EXIT

wait_for() {  # wait_for STATE COUNT: until so many instances are in this state
    for _ in $(seq 120); do
        (($(lockstep status "${mesh[@]}" --json 2>/dev/null | grep -c "\"state\": \"$1\"") == $2)) && return
        sleep 0.5
    done
    echo "the mesh did not come to $2 instances that are $1 within a minute or two" >&2
    exit 1
}

# The order does not matter: the one that comes first waits for the others.
run lockstep serve "$MODEL" -dp 2 -dpr 0 --headless "${mesh[@]}"
run lockstep serve "$MODEL" -dp 2 -dpl 0 --port "$PORT" "${mesh[@]}"
run lockstep serve "$MODEL" -dp 2 -dpr 1 --headless "${mesh[@]}"
wait_for ready 2

show curl -sS "http://127.0.0.1:$PORT/v1/completions" -H 'Content-Type: application/json' \
    -d "{\"model\": \"$MODEL\", \"prompt\": \"The morning was so fine, that\", \"max_tokens\": 40}"
echo
show lockstep status "${mesh[@]}"

run lockstep serve --headless "${mesh[@]}"
third=${pids[-1]}
wait_for ready 3
show lockstep status "${mesh[@]}"

printf '\n$ kill %s   # the third instance finishes what it has and leaves; no client notices\n' "$third"
kill "$third"
wait "$third"
show lockstep status "${mesh[@]}"
