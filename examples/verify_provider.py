#!/usr/bin/env python3
"""Random requests to a server, whose answers are checked against a checkpoint on this machine.

    python examples/verify_provider.py --base-url https://HOST/v1 --model DIR
    python examples/verify_provider.py --model DIR --serve '--reasoning-parser qwen3'

Each answer comes with its capsule. ``lockstep verify`` reads the checkpoint in DIR and computes every answer
again. It compares all tokens and log-probabilities to the bit, and prompts and parameters with those sent.
So a server is found that runs another checkpoint, quantises weights or cache, has another chat template, cuts
reasoning short, or samples in another way. Requests and answers stay in the directory that is printed.

The exit status is 0 if every answer is what was asked for, 1 if one is not, 2 if there was nothing to check.
It is 3 if bits cannot be compared, as the server's kernels cannot run here: then only closeness is shown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers

SUBJECTS = [
    "Emma",
    "the weather",
    "a ball at Netherfield",
    "prime numbers",
    "rivers",
    "a letter",
    "tea",
    "ships",
]
OPENINGS = [
    "It was a dark night, and",
    "Once upon a time",
    "Dear sir,",
    "In the beginning",
    "The following list:",
]
TIMEOUT = 600.0
"""Seconds for one answer."""
ONLY_CLOSE = "only closeness can be shown"
"""Words of a verdict about an answer of kernels that cannot run here."""
KINDS = {"completion": "/completions", "chat": "/chat/completions"}


def drawn(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A random request: its kind, and its fields."""
    kind = chance.choice(list(KINDS))
    fields: dict[str, Any] = {
        "max_tokens": chance.randint(24, 96),
        "temperature": chance.choice([0, 0.7, 1, 1.2]),
    }
    if kind == "chat":
        fields["messages"] = [{"role": "user", "content": f"Tell me about {chance.choice(SUBJECTS)}."}]
        if chance.random() < 0.5:
            fields["messages"].insert(0, {"role": "system", "content": "You answer in verse."})
    else:
        fields["prompt"] = f"{chance.choice(OPENINGS)} " * chance.randint(1, 20)
    extras = {
        "top_p": chance.choice([0.8, 0.95]),
        "seed": chance.getrandbits(31),
        "frequency_penalty": chance.choice([0.3, 0.8]),
        "presence_penalty": chance.choice([0.3, 0.8]),
        "n": 2,
    }
    fields |= {name: value for name, value in extras.items() if chance.random() < 0.3}
    if not fields["temperature"]:
        fields.pop("n", None)  # greedy samples would all be the same
    return kind, fields


def ask(url: str, key: str, body: bytes) -> bytes:
    """The body of an answer, with its capsule.

    Raises:
        OSError: the server cannot be reached, or refuses.
    """
    headers = {"Content-Type": "application/json", "X-Lockstep-Capsule": "1"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=TIMEOUT) as answer:
        found: bytes = answer.read()
    return found


def first_model(base_url: str, key: str) -> str:
    """Name of the first model that a server has."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(
        urllib.request.Request(f"{base_url}/models", headers=headers), timeout=60
    ) as answer:
        return str(json.load(answer)["data"][0]["id"])


def collect(
    base_url: str, key: str, model: str, bodies: Sequence[tuple[str, bytes]], directory: Path
) -> list[str]:
    """Ask all requests and save the answers; returns what went wrong with each."""

    def one(number: int) -> str:
        kind, body = bodies[number]
        try:
            answer = ask(base_url + KINDS[kind], key, body)
        except urllib.error.HTTPError as error:
            return f"refused with status {error.code}: {error.read(300).decode(errors='replace')}"
        except OSError as error:
            return f"no answer: {error}"
        file_of(directory, number).write_bytes(answer)
        return ""

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(len(bodies))))


def file_of(directory: Path, number: int) -> Path:
    return directory / f"answer-{number:03}.json"


def verified(directory: Path, files: Sequence[Path], arguments: argparse.Namespace) -> dict[Path, str]:
    """What ``lockstep verify`` finds about each file."""
    program = "import sys; from router.launcher.serve import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "verify", *map(str, files), "--model", arguments.model]
    command += [
        "--requests",
        str(directory / "requests.jsonl"),
        f"--serve={arguments.serve}",
        "--unquantized",
    ]
    command += [each for each in arguments.verify.split() if each]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [
        line.removeprefix("lockstep verify: error: ") for line in (done.stdout + done.stderr).splitlines()
    ]
    found = {}
    for file in files:
        own = [line.removeprefix(f"{file}: ") for line in lines if line.startswith(f"{file}: ")]
        found[file] = "; ".join(own) or f"not checked: {lines[-1] if lines else 'no output'}"
    return found


def shown_otherwise(answer: dict[str, Any], body: bytes, tokenizer: tokenizers.Tokenizer) -> str:
    """How an answer differs from what its capsule records; empty if it does not."""
    capsule = answer["lockstep_capsule"]
    if capsule["request"] != f"sha256:{hashlib.sha256(body).hexdigest()}":
        return "its capsule is that of another request"
    samples = [each for prompt in capsule["prompts"] for each in prompt["samples"]]
    for choice, sample in zip(answer["choices"], samples, strict=True):
        message = choice.get("message", {})
        shown = [choice.get("text"), *(message.get(name) for name in ("reasoning", "content"))]
        text = tokenizer.decode(sample["result"]["token_ids"])
        if any(part.strip() not in text for part in shown if part):
            return f"choice {choice['index']} has other text than its tokens"
    return ""


def findings(
    directory: Path, bodies: Sequence[bytes], problems: Sequence[str], arguments: argparse.Namespace
) -> list[str]:
    """What is wrong with each answer; empty where it is what was asked for."""
    found = list(problems)
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(arguments.model) / "tokenizer.json"))
    files = {number: file_of(directory, number) for number, problem in enumerate(problems) if not problem}
    verdicts = verified(directory, list(files.values()), arguments) if files else {}
    for number, file in files.items():
        line = verdicts[file]
        words = line.partition(": ")[2] or line
        is_equal = words.startswith("equal, ") and ", with --" not in words
        answer = json.loads(file.read_bytes()) if is_equal else {}
        found[number] = shown_otherwise(answer, bodies[number], tokenizer) if is_equal else words
    return found


def table(kinds: Sequence[str], found: Sequence[str]) -> None:
    """Print answers by kind, then the findings, equal ones together."""
    print("| requests | asked | as asked for | only close | wrong |\n|---|---|---|---|---|")
    for kind in (*KINDS, "all"):
        own = [each for each, name in zip(found, kinds, strict=True) if kind in (name, "all")]
        close = sum(ONLY_CLOSE in each for each in own)
        wrong = len(own) - own.count("") - close
        print(f"| {kind} | {len(own)} | {own.count('')} | {close} | {wrong} |")
    for number, each in enumerate(found):
        if each:
            print(f"answer {number:03}: {each}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the server")
    parser.add_argument("--model", required=True, help="directory of the checkpoint that it claims to run")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--seed", type=int, help="of the random requests; unset: others each time")
    parser.add_argument("--serve", default="", help="flags of serve that prompts and answers depend on")
    parser.add_argument("--verify", default="", help="further flags of lockstep verify")
    parser.add_argument("--save", type=Path, help="directory for requests and answers")
    arguments = parser.parse_args(argv)
    key = os.environ.get("OPENAI_API_KEY", "")
    base_url = arguments.base_url.rstrip("/")
    try:
        model = first_model(base_url, key)
    except (OSError, LookupError, ValueError) as error:
        print(f"no server answers at {base_url}/models: {error}", file=sys.stderr)
        return 2
    directory = arguments.save or Path(tempfile.mkdtemp(prefix="verify-provider-"))
    directory.mkdir(parents=True, exist_ok=True)
    chance = random.Random(arguments.seed)
    asked = [drawn(chance) for _ in range(arguments.requests)]
    bodies = [(kind, json.dumps({"model": model, **fields}).encode()) for kind, fields in asked]
    (directory / "requests.jsonl").write_bytes(b"\n".join(body for _, body in bodies))
    problems = collect(base_url, key, model, bodies, directory)
    found = findings(directory, [body for _, body in bodies], problems, arguments)
    table([kind for kind, _ in asked], found)
    is_wrong = any(each and ONLY_CLOSE not in each for each in found)
    result = "is not" if is_wrong else "may be" if any(found) else "is"
    print(f"{base_url} {result} what it claims to be; requests and answers are in {directory}")
    return 1 if is_wrong else 3 if any(found) else 0


if __name__ == "__main__":
    sys.exit(main())
