"""Command ``lockstep verify``: flags, files, exit status."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import msgspec

from coordinator.settings.flags import Bytes, Size, flag, parse
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from engine.config.cache import KVCacheDType
from engine.config.lora import LoraConfig
from engine.config.model import DType
from engine.config.quantization import QuantizationName
from engine.host.cache_size import TooLittleMemory
from engine.kernels.core import library
from engine.model.checkpoint import CheckpointError, weight_format
from engine.settings import resolve
from parallel.kernel_kinds import KINDS
from parallel.topology import usable_cores
from router.api.capsules import model_of
from router.capsule import CapsuleProblem, fields_of
from router.config import HttpConfig
from router.errors import one_line
from router.mesh import ServedModel
from router.signing.keys import PublicKeys, signature_problem
from router.text.text_model import TextModel, load_text_model
from router.text.tokens import TokenizerError
from router.tools.replay.saved import MOST_CHARACTERS, Files, Saved, line_of, read_files
from router.tools.verify.requests import SentRequests
from router.tools.verify.run import ScorerWish, Verification, printed
from router.tools.verify.samples import Computes
from router.tools.verify.verdict import VerifyStatus

PROG = "lockstep verify"
MOST_RANK = 256
"""Highest rank of an adapter."""
STATUS_OF = {
    CapsuleProblem.UNREADABLE: VerifyStatus.UNREADABLE,
    CapsuleProblem.EDITED: VerifyStatus.EDITED,
    CapsuleProblem.VERSION: VerifyStatus.VERSION,
}


KERNELS: tuple[str, ...] = get_args(get_type_hints(DeviceConfig)["numerics"])


class VerifyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Verify."""

    files: Files = ()
    model: Annotated[
        str | None,
        flag(help="Directory, GGUF file or Hugging Face repository id of the checkpoint to compute with."),
    ] = None
    keys: Annotated[
        str | None,
        flag(
            path=True,
            help="File with the server's keys, as GET /.well-known/lockstep-keys.json gave them: one of them "
            "must have signed each capsule.",
        ),
    ] = None
    tokenizer: Annotated[
        str | None, flag(path=True, help="Directory with tokenizer.json; unset: the model's.")
    ] = None
    numerics: Annotated[
        str,
        flag(
            help=f"Kernels to compute with: {', '.join(KERNELS)}; auto: those that a capsule names, where "
            "this CPU has them."
        ),
    ] = "auto"
    dtype: Annotated[DType, flag(help="Data type; auto: the one that a capsule names.")] = "auto"
    kv_cache_dtype: Annotated[
        KVCacheDType, flag(help="What keys and values are kept as; auto: found by a capsule's class.")
    ] = "auto"
    quantization: Annotated[
        QuantizationName | None,
        flag("-q", help="Quantise plain weights while they are read; unset: found by a capsule's class."),
    ] = None
    max_model_len: Annotated[
        Size | None, flag(help="Context length; unset: the model's own, as much of it as fits.")
    ] = None
    kv_cache_memory_bytes: Annotated[
        Bytes | None, flag(help="Bytes for the KV cache (4G and the like work); unset: from free memory.")
    ] = None
    cpu_threads: Annotated[
        int, msgspec.Meta(ge=0, le=1024), flag(help="Compute threads (0: this machine's cores).")
    ] = 0
    trust_remote_code: Annotated[
        bool, flag(help="Run the checkpoint's model code where transformers has none for its family.")
    ] = False
    lora_modules: Annotated[
        tuple[str, ...],
        flag(help="Adapters as NAME=DIRECTORY, for capsules of their answers; they are known by digest."),
    ] = ()
    requests: Annotated[
        str | None,
        flag(
            path=True,
            help="File with the bodies of the requests as they were sent, one a line: each capsule must be "
            "of one of them, with the prompt and the parameters that it asks for.",
        ),
    ] = None
    serve: Annotated[
        str,
        flag(
            help="Flags of serve that prompts and parameters depend on, such as '--reasoning-parser qwen3'; "
            "for --requests."
        ),
    ] = ""
    unquantized: Annotated[
        bool,
        flag(help="Accept no answer of weights or a KV cache that the server quantised by a flag."),
    ] = False
    explain: Annotated[
        bool,
        flag(
            help="Where the model gives other log-probabilities, read it again with quantised weights or "
            "caches, to find those that the server used."
        ),
    ] = True

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("give the FILES with the answers to verify, or - for standard input")
        if self.model is None:
            raise ValueError("give --model: the directory of the checkpoint to compute with")
        if self.serve and self.requests is None:
            raise ValueError("--serve is for --requests: give the file with the requests, too")
        if self.numerics not in KERNELS:
            raise ValueError(f"--numerics must be one of {', '.join(KERNELS)}, not {self.numerics!r}")

    def engine(self, wish: ScorerWish) -> EngineConfig:
        """Settings of a scorer; those of flags go before those of a wish."""
        settings = wish.settings
        kept = self.kv_cache_dtype if settings is None else settings.kv_cache_dtype
        quantization = self.quantization if settings is None else settings.quantization
        dtype = wish.dtype if self.dtype == "auto" else self.dtype
        return EngineConfig(
            model=ModelConfig(
                model=self.model,
                dtype=msgspec.convert(dtype if dtype in get_args(DType) else "auto", DType),
                max_model_len=self.max_model_len,
                trust_remote_code=self.trust_remote_code,
                quantization=quantization,
            ),
            cache=CacheConfig(kv_cache_dtype=kept, kv_cache_memory_bytes=self.kv_cache_memory_bytes),
            lora=LoraConfig(
                enable_lora=bool(self.lora_modules),
                lora_modules=self.lora_modules,
                max_lora_rank=MOST_RANK,
            ),
            device=msgspec.convert(
                {
                    "device": "cpu",
                    "numerics": kernels_for(self.numerics, wish.kernels),
                    "batch_invariant": settings is not None and settings.batch_invariant,
                },
                DeviceConfig,
            ),
        )


def kernels_for(asked: str, named: str) -> str:
    """Kernels asked for, or those that a capsule names if this CPU has them."""
    if asked != "auto" or named not in KERNELS:
        return asked
    kind = KINDS.get(named)
    return named if kind is None or library.why_not(kind.name) is None else "auto"


def main(argv: list[str] | None = None) -> int:
    """Verify all files; returns the exit status, a :class:`router.tools.verify.verdict.VerifyStatus`."""
    config = parse(
        VerifyConfig,
        sys.argv[1:] if argv is None else argv,
        prog=PROG,
        description="Check saved answers against a checkpoint: compute them again in this process, from "
        "their capsules, and compare all tokens and log-probabilities to the bit.",
        shares_file=True,
    )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    found, unread = read_files(config.files)
    statuses = [STATUS_OF[each.problem] for each in unread]
    for each in unread:
        _complain(each.message)
    if config.keys is not None:
        try:
            found, unsigned = signed(found, config.keys)
        except (OSError, ValueError) as error:
            _complain(f"--keys {config.keys} cannot be used: {error}")
            return VerifyStatus.USAGE
        statuses += [VerifyStatus.SIGNATURE] * len(unsigned)
        for problem in unsigned:
            _complain(problem)
    try:
        bodies = None if config.requests is None else Path(config.requests).read_bytes().splitlines()
    except OSError as error:
        _complain(f"--requests {config.requests} cannot be read: {error.strerror or error}")
        return VerifyStatus.USAGE
    if found:
        try:
            checks = verification(config)
            if bodies is not None:
                found, others = answering(found, sent_requests(config, checks.model, bodies))
                statuses += [VerifyStatus.REQUEST] * len(others)
                for problem in others:
                    _complain(problem)
            for verdict in checks.verify(found):
                statuses.append(verdict.status)
                print(*printed(verdict), sep="\n", flush=True)
        except (CheckpointError, TokenizerError) as error:
            _complain(f"--model {config.model}: {error}")
            return VerifyStatus.NO_MODEL
        except TooLittleMemory as error:
            _complain(str(error))
            return VerifyStatus.TOO_LONG
    print(counted(statuses))
    return exit_status(statuses)


def signed(found: list[Saved], file: str) -> tuple[list[Saved], list[str]]:
    """Capsules that are signed by keys of a file, and why the others are not.

    Raises:
        OSError, ValueError: the file cannot be read, or has no keys.
    """
    keys = msgspec.json.decode(Path(file).read_bytes(), type=PublicKeys)
    good, problems = [], []
    for saved in found:
        problem = signature_problem(fields_of(saved.text), keys)
        if problem is None:
            good.append(saved)
        else:
            problems.append(saved.place + one_line(problem, MOST_CHARACTERS))
    return good, problems


def sent_requests(config: VerifyConfig, model: TextModel, bodies: Sequence[bytes]) -> SentRequests:
    """Requests with these bodies, read as a server with the flags of ``--serve`` does."""
    served_with = parse(HttpConfig, shlex.split(config.serve), prog=f"{PROG} --serve", description="")
    model = load_text_model(model.served, msgspec.structs.replace(served_with, tokenizer=config.tokenizer))
    return SentRequests(bodies, model, served_with)


def answering(found: list[Saved], sent: SentRequests) -> tuple[list[Saved], list[str]]:
    """Capsules that answer requests as they were sent, and why the others do not."""
    problems = sent.problems([each.capsule for each in found])
    good = [saved for saved, problem in zip(found, problems, strict=True) if problem is None]
    bad = [line_of(saved, problem) for saved, problem in zip(found, problems, strict=True) if problem]
    return good, bad


def verification(config: VerifyConfig) -> Verification:
    """The checks that the flags ask for.

    Raises:
        CheckpointError, TokenizerError: the model is not there, or its files are broken.
    """
    info, settings = resolve(config.engine(ScorerWish("", "auto")), 1)
    served = ServedModel(
        names=settings.served_model_name,
        directory=info.directory,
        vocab_size=settings.vocab_size,
        max_model_len=settings.max_model_len,
        fingerprint=settings.fingerprint,
        adapters=() if settings.lora is None else settings.lora.adapters,
    )
    model = load_text_model(served, HttpConfig(tokenizer=config.tokenizer))

    @contextlib.contextmanager
    def opens(wish: ScorerWish) -> Iterator[Computes]:
        from engine.verification.scorer import Scorer  # loads torch

        threads = config.cpu_threads or usable_cores()
        with Scorer(config.engine(wish), threads) as scorer:
            yield scorer

    return Verification(
        opens,
        model,
        model_of(model),
        weight_format(info.directory),
        explains=config.explain,
        only_plain=config.unquantized,
    )


def exit_status(statuses: list[VerifyStatus]) -> VerifyStatus:
    """Exit status for capsules of these.

    A difference goes before other problems, the first of which counts.
    """
    wrong = [each for each in statuses if each]
    return (
        VerifyStatus.DIFFERENT if VerifyStatus.DIFFERENT in wrong else next(iter(wrong), VerifyStatus.EQUAL)
    )


def counted(statuses: list[VerifyStatus]) -> str:
    """How many capsules have each status."""
    names = {status: status.name.lower().replace("_", " ") for status in VerifyStatus}
    counts = {names[status]: statuses.count(status) for status in dict.fromkeys(sorted(statuses))}
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _complain(problem: str) -> None:
    print(f"{PROG}: error: {problem}", file=sys.stderr, flush=True)
