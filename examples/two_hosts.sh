#!/usr/bin/env bash
# A mesh over two hosts, on one machine: two network namespaces with addresses and host names of their own, joined
# by a virtual cable. The commands that run in them are those for two real machines:
#
#   both hosts   lockstep doctor measures the network between them
#   the head     coordinator, router and instance 0; makes the mesh key, which is copied to the other one
#   the other    instance 1; its experts and those of instance 0 are one set, and all steps are taken together
#
# A third command on the other host tries to join without the key, and ends with the reason. At last both are
# ended, and one instance is spread over the two hosts: a tensor-parallel rank on each.
#
#   sudo examples/two_hosts.sh [MODEL]     default: the model that ships with Lockstep
#   LOG=/tmp/mesh.log sudo -E examples/two_hosts.sh
#
# Needs root (for the namespaces) and the programs ip (Debian: iproute2), unshare and hostname.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

MODEL=${1:-lockstep-moe}
LOG=${LOG:-/dev/stderr}
HEAD=198.18.77.1
OTHER=198.18.77.2
names=("lockstep-head-$$" "lockstep-other-$$")
key=$(mktemp -d)/mesh.key
pids=()

clean_up() {
    kill "${pids[@]}" 2>/dev/null || true
    wait
    for name in "${names[@]}"; do
        ip netns del "$name" 2>/dev/null || true # with its end of the cable
    done
    rm -rf "$(dirname "$key")"
}
trap clean_up EXIT

for name in "${names[@]}"; do
    ip netns add "$name"
    ip -n "$name" link set lo up
done
ip link add eth0 netns "${names[0]}" type veth peer name eth0 netns "${names[1]}"
ip -n "${names[0]}" addr add "$HEAD/24" dev eth0
ip -n "${names[1]}" addr add "$OTHER/24" dev eth0
for name in "${names[@]}"; do
    ip -n "$name" link set eth0 up
done

enter() {  # enter HOST COMMAND...: this process becomes the command, there, under the host's own name
    local number=0
    [ "$1" = head ] || number=1
    exec ip netns exec "${names[$number]}" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$@"
}

on() { (enter "$@"); }

show() {  # a command whose output matters here
    printf '\n%s$ %s\n' "$1" "${*:2}"
    on "$@"
}

run() {  # a command that goes on running
    printf '\n%s$ %s &\n' "$1" "${*:2}"
    enter "$@" >>"$LOG" 2>&1 & # so that this is the pid to end
    pids+=($!)
}

mesh=(-dpa "$HEAD" -dpp 62300 --mesh-key-file "$key")

show head lockstep keygen "$key"
between=(--nnodes 2 --master-addr "$HEAD" --mesh-key-file "$key")
printf '\nother$ lockstep doctor %s --node-rank 1 &\n' "${between[*]}"
on other lockstep doctor "${between[@]}" --node-rank 1 >/dev/null &
show head lockstep doctor "${between[@]}" --node-rank 0
wait $!

run head lockstep serve "$MODEL" -dp 2 -dpl 1 -ep --port 8000 "${mesh[@]}"
run other lockstep serve "$MODEL" -dp 2 -dpl 1 -dpr 1 -ep --headless "${mesh[@]}"
for _ in $(seq 120); do
    (($(on head lockstep status "${mesh[@]}" --json 2>/dev/null | grep -c '"state": "ready"') == 2)) && break
    sleep 0.5
done

show head lockstep status "${mesh[@]}"
show head curl -sS http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
    -d "{\"model\": \"$MODEL\", \"prompt\": \"The morning was so fine, that\", \"max_tokens\": 40}"
echo
show other lockstep doctor "${mesh[@]}" || true
show other lockstep serve --headless -dpa "$HEAD" -dpp 62300 --insecure-mesh || echo "exit status $?"

kill "${pids[@]}"
wait "${pids[@]}" || true
pids=()
instance=(-tp 2 --nnodes 2 --master-addr "$HEAD" --mesh-key-file "$key")
run head lockstep serve "$MODEL" "${instance[@]}" --node-rank 0
run other lockstep serve "$MODEL" "${instance[@]}" --node-rank 1
for _ in $(seq 120); do
    (($(on head lockstep status --json --mesh-key-file "$key" 2>/dev/null | grep -c '"state": "ready"') == 1)) && break
    sleep 0.5
done
show head curl -sS http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
    -d "{\"model\": \"$MODEL\", \"prompt\": \"The morning was so fine, that\", \"max_tokens\": 40}"
echo
