"""Model that proposes tokens, compared with the served one (no torch)."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from engine.config import EngineConfig, SchedulerConfig
from engine.config.speculation import MOST_DRAFTED, SpeculativeConfig, with_most
from engine.host.cores import has_gpu
from engine.model.checkpoint import CheckpointError, ModelInfo, read_model_info
from engine.model.finding import find_model
from engine.model.model_files import read_json
from engine.model.tokenizer_files import TOKENIZER
from engine.speculation.eagle_config import read_eagle_config, why_no_head
from engine.speculation.prediction_names import names_of

logger = logging.getLogger(__name__)


def find_draft(config: EngineConfig, info: ModelInfo) -> ModelInfo | None:
    """The model that proposes tokens for the model ``info``; None where none does.

    The served one where a layer of it does.

    Raises:
        CheckpointError: it is not there, or cannot propose for this model.
    """
    wanted = config.scheduler.speculative
    if wanted is None or not wanted.by_model:
        return None
    if has_gpu(config.device) or config.device.on_torch:
        raise CheckpointError(
            f"--speculative-config: a {wanted.method} is computed by the native kernels, on a CPU: leave "
            "--device cuda, --attention-backend and LOCKSTEP_NATIVE_KERNELS=0 out, or draft by ngram"
        )
    if wanted.method == "mtp":
        names_of(info)
        return info
    if wanted.method == "eagle3":
        return _find_head(config, wanted, info)
    draft = read_model_info(find_model(wanted.model, None, weights=True))
    if problem := why_not(draft, info):
        raise CheckpointError(f"--speculative-config: {problem}")
    return draft


def _find_head(config: EngineConfig, wanted: SpeculativeConfig, info: ModelInfo) -> ModelInfo:
    """The EAGLE-3 head for the model ``info``, with the context length of that model."""
    head = read_eagle_config(find_model(wanted.model, None, weights=True))
    stages = config.device.pipeline_parallel_size
    if problem := why_no_head(head, info, most=wanted.num_speculative_tokens, stages=stages):
        raise CheckpointError(f"--speculative-config: {problem}")
    return msgspec.structs.replace(
        info, directory=head.directory, architecture="EAGLE-3 head", model_type=head.model_type, num_layers=1
    )


def with_length_of_head(scheduler: SchedulerConfig) -> SchedulerConfig:
    """The settings with the head's own number of tokens, where they have none.

    Raises:
        CheckpointError: the head is not there, or none.
    """
    wanted, text = scheduler.speculative, scheduler.speculative_config
    if wanted is None or text is None or wanted.method != "eagle3" or wanted.num_speculative_tokens:
        return scheduler
    most = read_eagle_config(find_model(wanted.model, None, weights=True)).most
    if most is None:
        return scheduler
    return msgspec.structs.replace(scheduler, speculative_config=with_most(text, min(most, MOST_DRAFTED)))


def why_not(draft: ModelInfo, info: ModelInfo) -> str:
    """Reason why a model cannot propose tokens for another one; empty if it can."""
    if draft.has_states:
        return f"{draft.directory} ({draft.architecture}) keeps recurrent states, which a draft must not"
    if draft.vocab_size != info.vocab_size:
        return (
            f"{draft.directory} has {draft.vocab_size} tokens, and {info.directory} has {info.vocab_size}: "
            "a draft model needs the tokenizer of the model"
        )
    own, served = _vocabulary(draft), _vocabulary(info)
    if own is not None and served is not None and own != served:
        other = min((text for text in own | served if own.get(text) != served.get(text)), default="")
        return (
            f"{draft.directory} has another tokenizer than {info.directory}: {other!r} is token "
            f"{own.get(other)} in one and {served.get(other)} in the other"
        )
    return ""


def _vocabulary(info: ModelInfo) -> dict[str, int] | None:
    """Ids of a tokenizer's tokens; None where its file has no list of them."""
    tokenizer = read_json(Path(info.directory) / TOKENIZER)
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):
        return {str(pair[0]): index for index, pair in enumerate(vocab)}
    return vocab if isinstance(vocab, dict) else None
