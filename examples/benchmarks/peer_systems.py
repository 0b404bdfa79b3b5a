"""Serving systems that benchmarks compare: how each starts and ends."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from examples.benchmarks.formats.checkpoints import Variant, variant_of

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("PEERS", ROOT / "build" / "peers"))
CORES = os.cpu_count() or 1
START_SECONDS = 600.0
STOP_SECONDS = 30.0

ONLY_AVX2 = {
    "LOCKSTEP_NATIVE_KERNELS": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""Environment in which Lockstep, torch and its libraries use nothing beyond AVX2."""


class NotReady(Exception):
    """Error of a server that ended or did not become healthy in time."""


@dataclass(frozen=True)
class Room:
    """What a server has room for."""

    context: int = 2048
    """Tokens of one request, with its answer."""
    kv_gib: int = 1
    """GiB of the KV cache."""


USUAL_ROOM = Room()


@dataclass(frozen=True)
class System:
    """A server and its command.

    ``{model}``, ``{dtype}``, ``{port}``, ``{rpc_port}``, ``{drafts}``, ``{examples}`` and ``{python}`` of the
    command are filled in, and the fields of :class:`Room` in command and environment.
    """

    command: str
    environment: dict[str, str] = field(default_factory=dict)
    peer: str = ""
    """Name of its environment under build/peers; empty for Lockstep."""
    texts: bool = False
    """Whether it takes texts only, ends streams without [DONE] and lacks ignore_eos."""
    name: str = "bench"
    """Model name in requests; empty: the model's directory."""
    most: int = 1 << 30
    """Most requests at once that it is made for."""
    model_types: tuple[str, ...] = ()
    """Model types that it serves; empty: all."""
    variant: Variant | None = None
    """Quantised copy of the model that it serves; None: the model."""

    @property
    def is_ours(self) -> bool:
        return not self.peer

    def only_avx2(self) -> System:
        """The same on a CPU that has nothing beyond AVX2.

        llama.cpp chooses among its libraries by the CPU: it has an installation of its own.
        """
        own = {"PYTHONPATH": str(Path(__file__).with_name("only_avx2"))} if self.peer == "vllm" else {}
        peer = "llama.cpp-avx2" if self.peer == "llama.cpp" else self.peer
        return replace(self, environment=self.environment | ONLY_AVX2 | own, peer=peer)

    def lacks(self, model: Path) -> str:
        """Reason why it cannot serve the model; empty if it can."""
        if self.peer and not (PEERS / self.peer / "bin" / shlex.split(self.command)[0]).exists():
            return f"is not installed (examples/benchmarks/install_peers.sh {self.peer})"
        model_type = json.loads((model / "config.json").read_text()).get("model_type", "")
        if self.model_types and model_type not in self.model_types:
            return f"is not set up for {model_type} here"
        return ""

    def words(self, room: Room = USUAL_ROOM, **values: object) -> list[str]:
        """Words of its command with these values and those common to all systems."""
        values |= vars(room) | {"python": sys.executable, "examples": Path(__file__).parent, "drafts": DRAFTS}
        quoted = {name: shlex.quote(str(value)) for name, value in values.items()}
        words = shlex.split(self.command.format_map(quoted))
        if self.peer:
            words[0] = str(PEERS / self.peer / "bin" / words[0])
        return words


DRAFTS = json.dumps(
    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
)
OURS = "{python} -P -m router.launcher.serve {model} --served-model-name bench --dtype {dtype} --port {port}"
OURS += " --data-parallel-rpc-port {rpc_port}"
OURS += " --max-model-len {context} --disable-access-log --kv-cache-memory-bytes {kv_gib}G"
VLLM = "vllm serve {model} --served-model-name bench --dtype {dtype} --host 127.0.0.1 --port {port}"
VLLM += " --max-model-len {context}"
HF = "transformers serve {model} --host 127.0.0.1 --port {port} --device cpu --dtype {dtype}"
HF += " --continuous-batching --cb-num-blocks 64"
LLAMA = "python {examples}/llama_cpp_server.py {model} --port {port} --context {context} --threads " + str(
    CORES
)
GGUF_TYPES = ("llama", "qwen3", "qwen3_moe")
VARIANTS: tuple[Variant, ...] = ("int8", "int4", "gptq", "awq")
KV = {"VLLM_CPU_KVCACHE_SPACE": "{kv_gib}"}
SYSTEMS = {
    "lockstep": System(OURS + " -dp 2 --no-enable-expert-parallel"),
    "lockstep-dp1": System(OURS + " -dp 1"),
    "lockstep-drafts": System(OURS + " -dp 1 --speculative-config {drafts}"),
    "lockstep-ep": System(OURS + " -dp 2 -ep"),
    "lockstep-pp2": System(OURS + " -pp 2"),
    "lockstep-tp2": System(OURS + " -tp 2"),
    "lockstep-tp2-torch": System(OURS + " -tp 2", {"LOCKSTEP_NATIVE_KERNELS": "0"}),
    "vllm": System(VLLM, KV, peer="vllm"),
    "vllm-cores": System(VLLM, KV | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}"}, peer="vllm"),
    "vllm-drafts": System(
        VLLM + " --speculative-config {drafts}",
        KV | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}"},
        peer="vllm",
    ),
    "vllm-dp2": System(
        VLLM + " --enforce-eager -dp 2 --data-parallel-rpc-port {rpc_port}",
        KV | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
        peer="vllm",
    ),
    "vllm-eager": System(VLLM + " --enforce-eager", KV, peer="vllm"),
    "vllm-pp2": System(VLLM + " -pp 2", KV | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, peer="vllm"),
    "vllm-tp2": System(VLLM + " -tp 2", KV | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, peer="vllm"),
    "transformers": System(HF, {"OMP_NUM_THREADS": str(CORES)}, peer="vllm", texts=True, name=""),
    "llama.cpp": System(LLAMA, peer="llama.cpp", most=1, model_types=GGUF_TYPES),
}
BOUND = KV | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}"}
SYSTEMS |= {  # quantised
    f"lockstep-{variant}": System(OURS + " -dp 1", variant=variant) for variant in VARIANTS
}
DENSE_TYPES = ("llama", "qwen3")
SYSTEMS |= {
    # vLLM has no experts in AWQ on a CPU: "No WNA16 MoE backend supports the deployment configuration".
    f"vllm-{variant}": System(
        VLLM, BOUND, peer="vllm", variant=variant, model_types=DENSE_TYPES if variant == "awq" else ()
    )
    for variant in VARIANTS
}
SYSTEMS |= {
    f"llama.cpp-{kind}": System(
        f"{LLAMA} --kind {kind} --sequences 32", peer="llama.cpp", most=32, model_types=GGUF_TYPES
    )
    for kind in ("bf16", "q8_0", "q4_0")
}


@contextlib.contextmanager
def started(
    name: str, model: Path, dtype: str, room: Room = USUAL_ROOM
) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """Start a server as a child: its address and its log.

    Ended with the block, and its children with it.
    """
    system = SYSTEMS[name]
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, rpc_port = one.getsockname()[1], other.getsockname()[1]
    if system.variant is not None:
        model = variant_of(model, system.variant)
    words = system.words(room, model=model, dtype=dtype, port=port, rpc_port=rpc_port)
    with tempfile.NamedTemporaryFile("w+", prefix=f"bench-{name}-", suffix=".log") as log:
        print(f"starting {name} (log: {log.name})", file=sys.stderr, flush=True)
        environment = environment_of(system, room)
        child = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)
        with ended(child):
            yield child, f"http://127.0.0.1:{port}", Path(log.name)


def environment_of(system: System, room: Room) -> dict[str, str]:
    """This process's environment with what a system sets, and without what misleads it."""
    environment = {**os.environ, "LOCKSTEP_PARENT_PID": str(os.getpid()), "HF_HUB_OFFLINE": "1"}
    environment["VLLM_NO_USAGE_STATS"] = "1"
    misleading = {"OMP_NUM_THREADS", "PYTHONPATH"} if system.peer else {"OMP_NUM_THREADS"}
    for variable in misleading:
        environment.pop(variable, None)  # each chooses its own
    return environment | {key: value.format_map(vars(room)) for key, value in system.environment.items()}


@contextlib.contextmanager
def ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """End a child with the block, and all of the session that it leads."""
    try:
        yield
    finally:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # whatever it left behind
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def until_ready(child: subprocess.Popen[bytes], url: str, log: Path) -> float:
    """Seconds until it is healthy.

    Raises:
        NotReady: it ended, or START_SECONDS have passed.
    """
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS and child.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=2) as response:
            if response.status == 200:
                return time.monotonic() - began
        time.sleep(0.2)
    raise NotReady(f"did not become ready; its log ends with\n{log.read_text(errors='replace')[-2000:]}")
