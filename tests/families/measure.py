"""One family against transformers' ``generate`` in float32: as one instance, with experts spread, and cut."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore, ModelPlace
from engine.executor.uni import UniExecutor
from engine.messages import Submit
from engine.model.checkpoint import CheckpointError, check_servable, read_model_info, why_experts_stay_whole
from engine.pieces.kinds import BoundarySlots
from engine.sampling import SamplingParams
from tests.engine.groups.test_lockstep_engine import (
    NUM_REQUESTS,
    ROUTER,
    Layout,
    generated,
    length,
    prompt,
    run_instances,
)
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import widen
from tests.families.configs import make_config

EXACT = "exact"
REFUSED = "refused"
NONE = "–"
"""A layout that a family has nothing for: experts of a dense model."""
NUM_BLOCKS = 24
NUM_STATES = 12
"""Slots of recurrent states, for families that have such."""
BLOCK_SIZE = 16
NATIVE = "native kernels: "


class Row(msgspec.Struct):
    """A line of the table."""

    family: str
    model_class: str = ""
    dp: str = ""
    ep: str = ""
    tp: str = ""
    pp: str = ""
    kernels: str = ""
    """``native`` or ``torch``, as one instance."""
    notes: list[str] = []


class _Lines(logging.Handler):
    """Keeps what the engine logs about its kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`."""
        if record.getMessage().startswith(NATIVE):
            self.found.append(record.getMessage().removeprefix(NATIVE))


def measure(family: str, directory: Path) -> Row:
    """Make the family's tiny model in a directory, and compare all layouts with the truth.

    No model is made of a family that its config.json rules out, as nothing else would be fetched.
    """
    row = Row(family)
    try:
        config = make_config(family)
        row.model_class = model_class(config)
        config.architectures = [row.model_class]
        config.save_pretrained(directory)
        check_servable(directory, trust_remote_code=False)
        read_model_info(directory, weights=False)
        model = make_model(config, directory)
    except CheckpointError as error:
        row.dp = row.ep = row.tp = row.pp = REFUSED
        row.notes.append(f"config.json: {_short(error, directory)}")
        return row
    except Exception as error:  # noqa: BLE001 (of classes that want other sizes; the table says so)
        row.notes.append(f"no tiny model: {_short(error)}")
        return row
    try:
        # With a cache, some families forget what their attention sees (Moshi).
        expected = generated(model, use_cache=False)
    except Exception as error:  # noqa: BLE001 (of a family that does not generate text from tokens alone)
        expected = None
        row.notes.append(f"transformers does not generate: {_short(error)}")
    del model
    _fill(row, directory, expected)
    return row


def model_class(config: Any) -> str:
    """The class that transformers makes of a configuration; with a language part, the whole model's."""
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if _is_whole(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return str(mapping[type(config)].__name__)


def make_model(config: Any, directory: Path) -> Any:
    """The tiny model of a configuration, saved and in memory."""
    auto = AutoModelForImageTextToText if _is_whole(config) else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    widen(model, 0)
    for name, token in (("bos", 0), ("eos", 1), ("pad", 2)):
        setattr(model.generation_config, f"{name}_token_id", token)
    model.save_pretrained(directory)
    fix_angles(model)
    return model


def fix_angles(model: Any) -> None:
    """Rotary angles of long requests, for all requests.

    transformers changes them with the length of a call; an instance does not, as in vLLM.
    """
    for rotary in model.modules():
        if getattr(rotary, "rope_type", None) == "longrope":
            longest = rotary.config.max_position_embeddings
            angles, _ = ROPE_INIT_FUNCTIONS["longrope"](rotary.config, "cpu", seq_len=longest)
            rotary.original_inv_freq = angles


def _is_whole(config: Any) -> bool:
    """Whether this is a larger model of which a language part would be served."""
    return config.get_text_config(decoder=True) is not config and (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    )


def _fill(row: Row, directory: Path, expected: list[list[int]] | None) -> None:
    info = read_model_info(directory)
    lines = _Lines()
    for name in ("engine", "parallel"):
        logging.getLogger(name).addHandler(lines)
    logging.getLogger("engine").setLevel(logging.INFO)
    row.dp = _verdict(row, "dp", directory, expected, lambda: _one(directory, tp=1, pp=1))
    row.kernels = ("native" if lines.found[0].startswith("on") else "torch") if lines.found else ""
    if row.dp == REFUSED:
        row.ep = row.tp = row.pp = row.dp
        return
    row.tp = _verdict(row, "tp", directory, expected, lambda: _one(directory, tp=2, pp=1))
    row.pp = _verdict(row, "pp", directory, expected, lambda: _one(directory, tp=1, pp=2))
    if not info.num_experts:
        row.ep = NONE
    elif why := why_experts_stay_whole(info):
        row.ep = REFUSED
        row.notes.append(f"ep: {why}")
    else:
        row.ep = _verdict(row, "ep", directory, expected, lambda: run_instances(directory, Layout(2))[0])


def _verdict(
    row: Row,
    layout: str,
    directory: Path,
    expected: list[list[int]] | None,
    run: Callable[[], list[list[int]]],
) -> str:
    try:
        found = run()
    except CheckpointError as error:
        row.notes.append(f"{layout}: {_short(error, directory)}")
        return REFUSED
    except Exception as error:  # noqa: BLE001 (the table is there to show it)
        row.notes.append(f"{layout}: {_short(error, directory)}")
        return "fails"
    if expected is None:
        return "runs"
    differ = sum(one != other for one, other in zip(found, expected, strict=True))
    return f"{differ} of {len(expected)} differ" if differ else EXACT


def _one(directory: Path, *, tp: int, pp: int) -> list[list[int]]:
    """The outputs of one instance of so many workers, all requests at once."""
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=8),
    )
    info = read_model_info(directory)
    executor: Any = (
        UniExecutor(config, info, 1) if tp * pp == 1 else ThreadedShards(config, info, tp=tp, pp=pp)
    )
    try:
        facts = executor.load(lambda _phase: None)
        boundaries = [BoundarySlots(kind, NUM_STATES) for kind in facts.boundaries]
        executor.allocate(NUM_BLOCKS, NUM_STATES)
        core = EngineCore(
            config,
            info,
            executor,
            num_blocks=NUM_BLOCKS,
            max_model_len=info.context_length,
            place=ModelPlace(boundaries=boundaries),
        )
        outputs: list[list[int]] = [[] for _ in range(NUM_REQUESTS)]
        for index in range(NUM_REQUESTS):
            params = SamplingParams(temperature=0.0, max_tokens=length(index), ignore_eos=True)
            name = str(index)
            problem = core.submit(
                ROUTER,
                Submit(request=index, request_id=name, prompt_ids=prompt(index), params=params, seed=0),
            )
            assert problem is None, problem
        while core.has_work:
            for delta in core.step().get(ROUTER, []):
                outputs[delta.request] += delta.token_ids
        return outputs
    finally:
        executor.close()


def _short(error: BaseException, directory: Path | None = None) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, CheckpointError):
        text = f"{type(error).__name__}: {text}"
    return text.replace(f"{directory}/", "").replace(str(directory), "the model")[:240]


def quieten() -> None:
    """Few threads, and no output of transformers."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    threading.excepthook = lambda _arguments: None
