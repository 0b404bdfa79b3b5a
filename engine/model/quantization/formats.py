"""Formats of quantised weights, read from config.json or refused (pure, no torch).

Formats: `compressed-tensors`_, block-wise fp8 as DeepSeek publishes it, GPTQ and AWQ as their tools write
them. Which matrices are quantised is seen in the files; what a file cannot say is taken from here.

.. _compressed-tensors: https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from engine.config.quantization import ONLINE, OnlineName

FIELDS = ("quantization_config", "compression_config", "quantization")
"""Fields of a config.json that say how weights are quantised; the last one is MLX's."""
MXFP4 = "mxfp4"
"""GPT-OSS's own, for experts only."""

Layout = Literal["scaled", "packed", "gptq", "awq", "mxfp4", "online"]
"""Kind of storage of a matrix: packed words, scaled numbers and so on.

``scaled``: a tensor of int8 or float8 numbers beside its scales. ``packed``: compressed-tensors' int32 words.
``mxfp4``: blocks of 32 floats of 4 bits, of all experts of a layer. ``online``: plain.
"""

_LAYOUTS: dict[str, Layout] = {
    "int-quantized": "scaled",
    "float-quantized": "scaled",
    "naive-quantized": "scaled",
    "pack-quantized": "packed",
}
"""Formats of compressed-tensors that are read."""
_GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""Offset of stored zero points, by ``checkpoint_format``."""
_READ = "compressed-tensors (int8, int4 and fp8), fp8, gptq, awq, mxfp4 and GGUF files"


class UnsupportedFormat(ValueError):
    """Refusal of a quantised checkpoint.

    The text is the end of a sentence that says why, and what to do.
    """


class Activations(msgspec.Struct, frozen=True):
    """Treatment of the inputs of some matrices: rounded to 8 bits, or not."""

    targets: tuple[str, ...]
    """Names of modules; patterns behind ``re:``; or the name of a class of modules."""
    is_rounded: bool
    """Whether they are rounded to whole numbers of 8 bits."""
    is_dynamic: bool = True
    """Whether each row has its own scale then."""
    is_symmetric: bool = True

    def are_of(self, module: str, *, by_class: bool) -> bool:
        """Whether this treatment applies to a module, by its name or class.

        All quantised matrices are of the class ``Linear``.
        """
        if by_class:
            return "Linear" in self.targets
        patterns = [each.removeprefix("re:") for each in self.targets if each.startswith("re:")]
        return module in self.targets or any(re.match(each, module) for each in patterns)


class Format(msgspec.Struct, frozen=True):
    """Format of a checkpoint's quantised matrices."""

    method: str
    """``quant_method`` of config.json."""
    layouts: tuple[Layout, ...]
    """Kinds of storage that may occur, one per matrix."""
    bits: int = 0
    """Bits of a number (GPTQ, AWQ); 0: the files say it."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: the shape of the scales says it."""
    group_sizes: tuple[int, ...] = ()
    """Sizes of groups of inputs that share a scale.

    Empty: the shape of the scales says it.
    """
    zero_offset: int = 0
    """Offset of GPTQ's stored zero points."""
    rounds_activations: bool = False
    """Whether the checkpoint was made for activations in 8 bits, too."""
    activations: tuple[Activations, ...] = ()
    """Inputs of each group of matrices."""

    def activations_of(self, module: str) -> Activations | None:
        """Rounding of a module's inputs; None: not at all."""
        for by_class in (False, True):
            for each in self.activations:
                if each.are_of(module, by_class=by_class):
                    return each if each.is_rounded else None
        return None


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object of a config.json that describes the quantisation of any part of the model."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in FIELDS:
            if isinstance(found := part.get(name), dict) and found:
                return found
    return None


def method_of(config: Mapping[str, Any]) -> str | None:
    """The quantisation method that a config.json names; None for plain weights."""
    found = quantization_of(config)
    if found is None:
        return None
    return str(found.get("quant_method") or ("mlx" if "bits" in found else None))


def why_refused(config: Mapping[str, Any]) -> str:
    """Error text for weights in a format that is not read; else empty."""
    try:
        format_of(config)
    except UnsupportedFormat as refused:
        return str(refused)
    return ""


def format_of(config: Mapping[str, Any]) -> Format | None:
    """The format of the quantised weights; None for plain ones.

    Raises:
        Refused: it is none of those that are read.
    """
    found, method = quantization_of(config), method_of(config)
    if found is None:
        return None
    match method:
        case "mxfp4":
            return Format(method, ("mxfp4",), bits=4)
        case "gguf":  # of a directory that was made from a file
            return Format(method, ())
        case "compressed-tensors":
            return _compressed_tensors(found)
        case "fp8":
            block = _block(found.get("weight_block_size"))
            return Format(method, ("scaled",), block=block, rounds_activations=True)
        case "gptq":
            kind = str(found.get("checkpoint_format") or "gptq")
            if kind not in _GPTQ_OFFSETS:
                raise UnsupportedFormat(_not_read(f"gptq in the layout {kind}"))
            if found.get("dynamic"):
                raise UnsupportedFormat(_not_read("gptq with different bits per layer ('dynamic')"))
            sizes = _group_sizes([found])
            return Format(
                method, ("gptq",), _bits(found, (4, 8)), group_sizes=sizes, zero_offset=_GPTQ_OFFSETS[kind]
            )
        case "awq":
            version = str(found.get("version") or "gemm").lower()
            if version != "gemm":
                raise UnsupportedFormat(_not_read(f"awq in the layout {version}"))
            return Format(method, ("awq",), _bits(found, (4,)), group_sizes=_group_sizes([found]))
    raise UnsupportedFormat(_not_read(str(method)))


def online_format(name: OnlineName) -> Format:
    """The format of a plain checkpoint whose weights are quantised while they are read."""
    activations = (Activations(("Linear",), is_rounded=True),) if name == "int8" else ()
    return Format(f"--quantization {name}", ("online",), activations=activations)


def why_not_so(config: Mapping[str, Any], name: str, *, reads_weights: bool) -> str | None:
    """Why ``--quantization`` cannot have this value, with what to do; None if it can."""
    method = method_of(config)
    if name not in ONLINE:
        if method == name:
            return None
        has = "plain weights" if method is None else f"weights quantised by {method}"
        other = "" if method else f", or quantise its weights by one of {', '.join(ONLINE)}"
        return (
            f"--quantization {name}: the checkpoint has {has}. Leave it out, which serves the checkpoint as "
            f"it is{other}"
        )
    if method is not None:
        return (
            f"--quantization {name} is for plain weights, and those of this checkpoint are quantised by "
            f"{method}: leave it out"
        )
    if not reads_weights:
        return f"--quantization {name} with --load-format dummy: random weights are not quantised"
    return None


def _compressed_tensors(found: Mapping[str, Any]) -> Format:
    sparse = found.get("sparsity_config")
    if isinstance(sparse, dict) and sparse.get("format") not in (None, "dense"):
        raise UnsupportedFormat(_not_read(f"compressed-tensors in the sparse format {sparse['format']}"))
    if found.get("transform_config"):
        raise UnsupportedFormat(
            _not_read("compressed-tensors with transforms (rotations) of the activations")
        )
    layouts: dict[Layout, None] = {}
    blocks: set[tuple[int, int]] = set()
    activations: list[Activations] = []
    all_weights: list[Mapping[str, Any]] = []
    rounds = False
    for group in _groups(found):
        named = str(group.get("format") or found.get("format"))
        if named not in _LAYOUTS:
            raise UnsupportedFormat(_not_read(f"compressed-tensors in the format {named}"))
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise UnsupportedFormat(
                "has a group in its quantization_config that says nothing about 'weights'"
            )
        layouts[_LAYOUTS[named]] = None
        all_weights.append(weights)
        if block := _block(weights.get("block_structure")):
            blocks.add(block)
        rounds |= bool(group.get("input_activations"))
        activations.append(_activations(group))
    if len(blocks) > 1:
        raise UnsupportedFormat(_not_read("compressed-tensors with blocks of several sizes"))
    return Format(
        "compressed-tensors",
        tuple(layouts),
        block=next(iter(blocks), None),
        group_sizes=_group_sizes(all_weights),
        rounds_activations=rounds,
        activations=tuple(activations),
    )


def _activations(group: Mapping[str, Any]) -> Activations:
    """Treatment of the inputs of one group of config.json."""
    given, named = group.get("input_activations"), group.get("targets")
    targets = tuple(str(each) for each in named) if isinstance(named, list) else ()
    for each in targets:
        try:
            re.compile(each.removeprefix("re:"))
        except re.error as error:
            raise UnsupportedFormat(
                f"has a quantization_config with the pattern {each!r}: {error}"
            ) from error
    if not isinstance(given, dict):
        return Activations(targets, is_rounded=False)
    return Activations(
        targets,
        is_rounded=given.get("num_bits") == 8
        and given.get("type") == "int"
        and given.get("strategy") in ("token", "tensor"),
        is_dynamic=bool(given.get("dynamic")),
        is_symmetric=bool(given.get("symmetric", True)),
    )


def _groups(found: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise UnsupportedFormat(
            "has a quantization_config without 'config_groups': it does not say what is quantised"
        )
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise UnsupportedFormat(f"has a quantization_config whose group {name} is no object")
        yield group


def _bits(found: Mapping[str, Any], possible: tuple[int, ...]) -> int:
    bits = found.get("bits", found.get("w_bit"))
    if bits not in possible:
        raise UnsupportedFormat(_not_read(f"{found.get('quant_method')} with {bits} bits"))
    return int(bits)


def _group_sizes(parts: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Inputs that share a scale, as these parts of the config say.

    -1 and null stand for whole rows.
    """
    given = [part.get("group_size", part.get("q_group_size")) for part in parts]
    return tuple(sorted({each for each in given if isinstance(each, int) and each > 0}))


def _block(given: Any) -> tuple[int, int] | None:
    """Outputs and inputs of a block, given as two numbers or as text like 128x128."""
    if given is None:
        return None
    sizes = given.split("x") if isinstance(given, str) else given
    try:
        outputs, inputs = (int(each) for each in sizes)
    except (TypeError, ValueError):
        outputs = inputs = 0
    if outputs < 1 or inputs < 1:
        raise UnsupportedFormat(
            f"has a quantization_config with blocks of size {given!r}: two numbers are expected"
        )
    return outputs, inputs


def _not_read(what: str) -> str:
    return (
        f"has weights quantised by {what}, which are not built: use a checkpoint in bfloat16, float16 or "
        f"float32, or one quantised by {_READ}"
    )
