"""A pooling model in torch: transformers' encoder or decoder, and a head.

Sequences are packed into one row of tokens without padding, where the model's attention goes through
transformers' interface; else they are computed one after the other. Products are computed in blocks of fixed
size. So the bits of an answer are the same alone and in any batch, which is tried when a model is loaded.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers.modeling_outputs import BaseModelOutputWithPooling

from coordinator.pooled_model import PoolingTask
from engine.compute.fixed_blocks import FixedBlocks, LargeBlocks
from engine.config.quantization import OnlineName
from engine.model.checkpoint import ModelInfo
from engine.model.errors import CheckpointError
from engine.model.quantization.attached import attach_codes, reader_of
from engine.model.quantization.layers import round_inputs
from engine.model.sharding.shard_weights import all_tensors
from engine.model.weight_files import open_weights
from engine.pooling.detection import OFFSET_POSITIONS, SEQUENCE, TOKENS
from engine.pooling.native_stack import NativeStack
from engine.pooling.packed_attention import IMPLEMENTATION, UnknownAttention, packed, register
from engine.pooling.sentence_files import DENSE_WEIGHTS, read_sentence_files
from engine.pooling_params import PoolingParams

logger = logging.getLogger(__name__)

TRIAL_LENGTHS = (7, 19, 1, 40)
"""Tokens of the sequences on which a model is tried."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Most difference from transformers' own result in a trial, relative to its largest number."""
TOLERANCE_OF_CODES = 0.1
"""The same where inputs of products are rounded to codes."""


class PooledInput(msgspec.Struct, frozen=True):
    """One input of a step."""

    token_ids: Sequence[int]
    params: PoolingParams


class _StoredStates(torch.nn.Module):  # type: ignore[misc]
    """Stands in a model's place below its head, and gives states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.output: BaseModelOutputWithPooling | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        """The stored output, whatever it is called with."""
        return self.output


class PoolingModel:
    """Computes the answers of pooled requests."""

    def __init__(
        self,
        info: ModelInfo,
        dtype: torch.dtype,
        *,
        reads_weights: bool = True,
        trusts_code: bool = False,
        online: OnlineName | None = None,
    ) -> None:
        """Reads the weights, or makes random ones, and tries the model.

        ``online``: how weights of layers are quantised while they are read.

        Raises:
            CheckpointError: the model cannot be computed.
        """
        assert info.pooling is not None
        self._info, self.facts = info, info.pooling
        self._dtype = dtype
        register()
        self._online = online
        self._module = _load(info, dtype, reads_weights=reads_weights, trusts_code=trusts_code, online=online)
        self._base = self._module.base_model
        if self.facts.convert == "embed" and isinstance(getattr(self._base, "pooler", None), torch.nn.Module):
            self._base.pooler = None  # a head that embeddings do not have
        self._stored = _StoredStates()
        self._has_head = self._base is not self._module and not self.facts.answer_tokens
        if self._has_head and self.facts.convert != "embed":
            setattr(self._module, self._module.base_model_prefix, self._stored)
        self._dense = [_dense_layer(each, dtype) for each in read_sentence_files(Path(info.directory)).dense]
        self._answers = self._answer_rows()
        self._wants = inspect.signature(self._base.forward).parameters
        self._first_position = self._offset()
        shapes = {tuple(each.shape) for each in self._base.parameters() if each.dim() == 2}
        self._blocks = FixedBlocks(LargeBlocks(shapes))
        self._sees_all = getattr(self._base.config, "is_causal", None) is False
        """Whether a decoder was trained as an encoder (``is_causal`` in config.json)."""
        self.packs = False
        """Whether sequences are computed together."""
        self.native: NativeStack | None = None
        """Native layers; None: they are computed by torch."""
        self.num_parameters, self.weight_bytes = self._sizes()
        """Numbers of all weights, and their bytes."""
        self._try()

    def __repr__(self) -> str:
        return f"<PoolingModel {type(self._module).__name__}, {self.facts.convert}, packs={self.packs}>"

    def _sizes(self) -> tuple[int, int]:
        parts = {id(each): each for part in (self._module, self._base) for each in part.parameters()}
        numbers = [(each.numel(), each.element_size()) for each in parts.values()]
        return sum(number for number, _ in numbers), sum(number * size for number, size in numbers)

    def answers(self, inputs: Sequence[PooledInput]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        """Answers to the inputs of a step, in float32; their numbers may be not finite."""
        with torch.inference_mode(), self._blocks:
            return [
                self._answer(each, states).float().contiguous().numpy()
                for each, states in zip(inputs, self._states(inputs), strict=True)
            ]

    @property
    def way(self) -> str:
        """How texts are computed, for the log."""
        if self.native is not None:
            return f"packed without padding, {self.native.kind}"
        return "packed without padding" if self.packs else "one after the other"

    def forget(self) -> None:
        """Keep nothing of texts whose numbers were not finite."""
        if self.native is not None:
            self.native.clear()

    # ---- states of tokens

    def _states(self, inputs: Sequence[PooledInput]) -> list[torch.Tensor]:
        """[tokens, width] states of each input's tokens."""
        if self.packs:
            return self._packed(inputs)
        return [self._call([each])[0] for each in inputs]

    def _packed(self, inputs: Sequence[PooledInput]) -> list[torch.Tensor]:
        order = sorted(range(len(inputs)), key=lambda number: len(inputs[number].token_ids))
        some = [inputs[number] for number in order]
        ends = np.cumsum([len(each.token_ids) for each in some]).tolist()
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        with packed(bounds, sees_all=self._sees_all):
            states = self._call(some)[0]
        found = {number: states[slice(*each)] for number, each in zip(order, bounds, strict=True)}
        return [found[number] for number in range(len(inputs))]

    def _call(self, inputs: Sequence[PooledInput]) -> torch.Tensor:
        """[1, tokens, width] states of all inputs' tokens in one row."""
        ids = [token for each in inputs for token in each.token_ids]
        given: dict[str, Any] = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        }
        if self.packs:
            first = self._first_position
            places = [range(first, first + len(each.token_ids)) for each in inputs]
            given["position_ids"] = torch.tensor([[place for each in places for place in each]])
        if "token_type_ids" in self._wants and self.facts.has_segments:
            segments = [each.params.token_type_ids or bytes(len(each.token_ids)) for each in inputs]
            given["token_type_ids"] = torch.tensor([[kind for each in segments for kind in each]])
        if "use_cache" in self._wants:
            given["use_cache"] = False
        output = self._base(**given)
        states: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        return states

    def _offset(self) -> int:
        """Position of a sequence's first token."""
        if self._info.model_type not in OFFSET_POSITIONS:
            return 0
        padding = self._base.config.pad_token_id
        return 1 + (padding if padding is not None else 1)

    # ---- heads

    def _answer(self, asked: PooledInput, states: torch.Tensor) -> torch.Tensor:
        params, facts = asked.params, self.facts
        if params.task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED):
            rows = self._pool(states, facts.pooling) if params.task is PoolingTask.EMBED else states
            return self._embedding(rows, params)
        activates = facts.activates if params.activation is None else params.activation
        logits = self._logits(states, params.task is PoolingTask.TOKEN_CLASSIFY).float()
        if not activates:
            return logits
        several = self._module.config.problem_type == "multi_label_classification"
        return logits.sigmoid() if logits.shape[-1] == 1 or several else logits.softmax(dim=-1)

    def _pool(self, states: torch.Tensor, pooling: str) -> torch.Tensor:
        """[width] of a sequence's [tokens, width]."""
        if pooling == "mean":
            return states.float().mean(dim=0).to(states.dtype)
        return states[0] if pooling == "cls" else states[-1]

    def _embedding(self, rows: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        for layer in self._dense:
            rows = layer(rows)
        found = rows.float()
        if params.dimensions:
            found = found[..., : params.dimensions]
        normalizes = self.facts.normalizes if params.normalize is None else params.normalize
        if not normalizes:
            return found
        return found / torch.linalg.vector_norm(found, dim=-1, keepdim=True).clamp_min(1e-12)

    def _logits(self, states: torch.Tensor, each_token: bool) -> torch.Tensor:
        """[labels], or [tokens, labels]; a single one for an answer of no or yes."""
        if self._answers is not None:
            no, yes = torch.nn.functional.linear(states[-1:], self._answers)[0].float()
            return (yes - no)[None]
        score = getattr(self._module, "score", None)
        if isinstance(score, torch.nn.Linear):  # decoders' classifiers
            return score(states if each_token else self._pool(states, self.facts.pooling)[None]).squeeze(
                0 if not each_token else ()
            )
        whole = states[None]
        pooler = getattr(self._base, "pooler", None)
        pooled = None
        if isinstance(pooler, torch.nn.Linear):
            pooled = self._base.pooler_activation(pooler(whole[:, 0]))
        elif pooler is not None:
            pooled = pooler(whole)
        self._stored.output = BaseModelOutputWithPooling(whole, pooled)
        try:
            logits: torch.Tensor = self._module(inputs_embeds=whole).logits[0]
        finally:
            self._stored.output = None
        return logits

    def _answer_rows(self) -> torch.Tensor | None:
        """[2, width] output rows for no and yes; None for other models."""
        if not self.facts.answer_tokens:
            return None
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(Path(self._info.directory) / "tokenizer.json"))
        ids = [tokenizer.token_to_id(each) for each in self.facts.answer_tokens]
        if None in ids:
            raise CheckpointError(
                f"the tokenizer has no tokens {' and '.join(self.facts.answer_tokens)}: name them by "
                "--pooler-config '{\"answer_tokens\": [NO, YES]}'"
            )
        rows: torch.Tensor = self._module.get_output_embeddings().weight[ids].detach().clone()
        return rows

    # ---- the trial

    def _try(self) -> None:
        """Choose whether sequences are packed; check bits and, roughly, numbers.

        Raises:
            CheckpointError: bits depend on what is computed beside, or the result is no finite number.
        """
        inputs = [self._made_up(number, length) for number, length in enumerate(TRIAL_LENGTHS)]
        own = [self._run([each])[0] for each in inputs]
        problem = self._try_packed(inputs, own)
        if problem is None:
            problem = self._try_native(inputs, own)
        else:
            logger.info("sequences of a step are computed one after the other: %s", problem)
            _use_own_attention(self._module, self._base)
            self.packs = False
        if self._online is not None and self.native is None:
            raise CheckpointError(
                f"--quantization {self._online} needs native layers, and those of {self._info.architecture} "
                f"are not computed by them ({problem}): leave it out"
            )

    def _try_native(self, inputs: list[PooledInput], own: list[torch.Tensor]) -> str:
        """Compute the layers natively if that gives what torch gives; returns why they are not."""
        native = NativeStack.of(self._base, self._dtype, sees_all=self._sees_all)
        if native is None:
            return "they have other parts, or this CPU has no kernels"
        for window in sorted(native.windows):  # texts that reach beyond it
            inputs = [*inputs, self._made_up(len(inputs), window + TRIAL_LENGTHS[1])]
            own = [*own, self._run(inputs[-1:])[0]]
        native.put_in()
        alone, beside = [self._run([each])[0] for each in inputs], self._run(inputs)
        if not all(map(torch.equal, alone, beside)):
            problem = "bits depend on what is packed beside"
        elif not all(map(self._is_close, alone, own)):
            problem = "results differ from those of torch"
        else:
            self.native = native
            native.let_go()
            return ""
        logger.warning("pooling: layers are not computed natively: %s", problem)
        native.take_out()
        return problem

    def _try_packed(self, inputs: Sequence[PooledInput], own: Sequence[torch.Tensor]) -> str | None:
        """Compare packed sequences with transformers' own attention; returns why they are not packed."""
        if "position_ids" not in self._wants:
            return f"{type(self._base).__name__} takes no positions"
        try:
            for part in {id(each): each for each in (self._module, self._base)}.values():
                part.set_attn_implementation(IMPLEMENTATION)
            self.packs = True
            alone = [self._run([each])[0] for each in inputs]
            beside = self._run(inputs)
        except (UnknownAttention, ValueError, TypeError, AttributeError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        if not all(map(torch.equal, alone, beside)):
            return "bits depend on what is packed beside"
        if not self._sees_all and not all(map(self._is_close, alone, own)):
            return "results differ from those of transformers' own attention"
        return None

    def _is_close(self, found: torch.Tensor, wanted: torch.Tensor) -> bool:
        most = TOLERANCE[self._dtype] if self._online is None else TOLERANCE_OF_CODES
        return bool((found - wanted).abs().max() <= most * wanted.abs().max())

    def _run(self, inputs: Sequence[PooledInput]) -> list[torch.Tensor]:
        with torch.inference_mode(), self._blocks:
            return [each.float() for each in self._states(inputs)]

    def _made_up(self, number: int, length: int) -> PooledInput:
        count = min(length, self._info.context_length)
        ids = [(37 * number + 11 * place * place) % self._info.vocab_size for place in range(count)]
        return PooledInput(ids, PoolingParams(self.facts.tasks[0]))


def _load(
    info: ModelInfo, dtype: torch.dtype, *, reads_weights: bool, trusts_code: bool, online: OnlineName | None
) -> Any:
    """The model and its head, in transformers' class for the task."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    facts = info.pooling
    assert facts is not None
    chosen = transformers.AutoModel
    if facts.answer_tokens:
        chosen = transformers.AutoModelForCausalLM
    elif facts.convert != "embed":
        tokens = info.architecture.endswith(TOKENS)
        kind = TOKENS if tokens else SEQUENCE
        chosen = getattr(transformers, f"AutoModel{kind}")
    first = {"attn_implementation": "eager"}
    try:
        config = transformers.AutoConfig.from_pretrained(info.directory, trust_remote_code=trusts_code)
        if not reads_weights:
            torch.manual_seed(0)
            return chosen.from_config(config, dtype=dtype, trust_remote_code=trusts_code, **first).eval()
        options = first | {"config": config, "dtype": dtype, "output_loading_info": True}
        if online is None:
            module, read = chosen.from_pretrained(
                info.directory, local_files_only=True, use_safetensors=True, trust_remote_code=trusts_code,
                **options,
            )  # fmt: skip
        else:
            module, read = _read_quantised(chosen, Path(info.directory), online, options)
    except (ValueError, OSError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{info.architecture} cannot be loaded as a pooling model: {error}") from error
    missing = sorted(
        name for name in read["missing_keys"] if not (facts.convert == "embed" and "pooler." in name)
    )
    if missing:
        raise CheckpointError(
            f"{info.architecture} as {type(module).__name__} lacks weights: {', '.join(missing[:4])}. Is "
            f"--convert {facts.convert} right?"
        )
    return module.eval()


def _read_quantised(
    chosen: Any, directory: Path, online: OnlineName, options: dict[str, Any]
) -> tuple[Any, Any]:
    """The model, whose layers' weights know their codes, and what transformers tells of the reading."""
    config = options["config"]
    if type(config) not in chosen._model_mapping:
        raise ValueError("its class is code of its own, which --quantization does not take apart")
    with open_weights(directory, options["dtype"], online) as files:
        made = chosen._model_mapping[type(config)]
        module, read = made.from_pretrained(None, state_dict=all_tensors(files), **options)
        attach_codes(module, files, None)
        for name, part in module.named_parameters():
            reader = reader_of(part)
            codes = None if reader is None else reader.keep(part.device)
            if codes is not None and codes.codes.shape != part.shape:
                raise ValueError(f"--quantization does not take apart what its files have of {name}")
    round_inputs(module)
    return module, read


def _use_own_attention(*modules: Any) -> None:
    for module in {id(each): each for each in modules}.values():
        module.set_attn_implementation("eager")


def _dense_layer(layer: Any, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """A layer behind the pooling, with its weights."""
    path = Path(layer.directory) / DENSE_WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: weights of a Dense layer are read from safetensors only")
    weights = load_file(path)
    weight = weights["linear.weight"].to(dtype)
    bias = weights["linear.bias"].to(dtype) if layer.has_bias else None
    activation = getattr(torch.nn, layer.activation)()
    return lambda rows: activation(torch.nn.functional.linear(rows, weight, bias))
