"""Facts about a model family in transformers' sources, and models ruled out (no torch).

The sources are read as text: the caller may be a process without torch, which the code itself would load.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engine.model.impossible_sizes import why_sizes_refused
from engine.model.quantization.formats import why_refused

EXPERTS_INTERFACE = "use_experts_implementation"
"""In modelling code, the mark of experts that can be spread."""
STATE_UPDATES = ("update_conv_state", "update_recurrent_state")
"""In modelling code, the calls by which layers keep a recurrent state in transformers' cache."""
OWN_STATE = "keeps a recurrent state in a way of its own, which is not built"
LINEAR_ATTENTION = '"linear_attention"'
"""In modelling code, the type of layers that keep a recurrent state."""
INDEXERS = (
    ("self.wq_b =", "self.k_norm =", "self.weights_proj =", "self.index_topk"),
    ("self.topk_blocks =", "self.block_size =", "self.local_blocks ="),
)
"""In modelling code, the parts of each kind of indexer that :mod:`engine.attention.indexers` knows."""
INDEXER_CLASS = re.compile(r"^class \w+Indexer\(", re.M)
UNKNOWN_INDEXER = "chooses keys by an indexer of a kind that is not built"
STATEFUL = "_is_stateful = True"
"""In modelling code, the mark of models whose layers may have a recurrent state."""

STATE_LAYER_TYPES = frozenset({"linear_attention", "conv", "hybrid", "mamba"})
"""Types with a recurrent state that :mod:`engine.states` computes."""
ALONE_LAYER_TYPES = frozenset({"moe", "mlp"})
"""Types that compute each token by itself."""
CHOOSING_LAYER_TYPES = frozenset({"indexed_attention", "minimax_m3_sparse"})
"""Types that attend to keys that an indexer chooses."""
SUPPORTED_LAYER_TYPES = (
    STATE_LAYER_TYPES
    | ALONE_LAYER_TYPES
    | CHOOSING_LAYER_TYPES
    | {"attention", "full_attention", "sliding_attention", "chunked_attention", "dense", "sparse"}
)
RECURRENT_LAYER_TYPES = frozenset({"hybrid_sliding", "recurrent"})
"""Types with a recurrent state that are not built."""
LAYER_TYPES = ("layer_types", "layers_block_type")
"""Fields of a config.json that list the type of each layer."""
PATTERN = "hybrid_override_pattern"
"""Key of Nemotron-H's original checkpoints: a letter for each layer."""
PATTERN_TYPES = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}
NUMBERED = "linear_attn_config"
"""Key of Kimi-Linear's original checkpoints: numbers of the layers of each type."""
NUMBERED_TYPES = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}
PLAIN_HEADS = frozenset(
    {
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
        "glm4v_text",
        "glm4v_moe_text",
    }
)
"""Language parts without a causal language model of their own in transformers.

The larger model computes logits as one product of the last hidden state, and takes positions of text as any
model does.
"""
NO_TYPE = (
    "has no 'model_type' in its config.json, by which transformers knows a family: add the one of the "
    "original checkpoint, or pass --trust-remote-code if this one brings its own code"
)
ENCODER = "is an encoder-decoder model: only decoder-only models are served"
NO_DECODER = (
    "is an encoder by its config.json: only decoders are served. A checkpoint that was trained as one has "
    "is_decoder true there"
)
NOT_THROUGH_INTERFACE = (
    "its attention does not go through transformers' attention interface (AttentionInterface), "
    "so it cannot be paged"
)
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""In modelling code, the name of transformers' table of attention functions."""
OWN_TABLE = re.compile(rf"^({INTERFACE}|\w+_ATTENTION_CLASSES) = ", re.M)
"""In modelling code, a table of attention functions or modules beside transformers'."""
TWO_SIDED = re.compile(
    r"(?<!encoder_)attention_mask = create_bidirectional_mask|else create_bidirectional_mask"
)
"""In modelling code, the mask of encoders that may be decoders."""
OWN_ATTENTION = frozenset(
    {
        "bloom",
        "codegen",
        "falcon",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "megatron_bert",
        "mpt",
        "openai",
        "rembert",
        "xglm",
    }
)
"""Directories of models for which :mod:`engine.attention.own_attention` calls the attention function."""
FLAT = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Larger models whose checkpoints may describe the language part at the top level of config.json."""
RENAMED = {"kimi_k2": "deepseek_v3"}
"""Types that the configuration class of a larger model gives to its language part."""


def has_experts_interface(model_type: str) -> bool:
    """Whether the experts of this family go through transformers' experts interface."""
    return EXPERTS_INTERFACE in _modeling_code(model_type)


def calls_interface(model_type: str) -> bool:
    """Whether a family's attention calls a function of transformers' table, or is adapted to."""
    code = _modeling_code(model_type)
    brought = not OWN_ATTENTION.isdisjoint(_homes(model_type))
    return not code or brought or (INTERFACE in code and not OWN_TABLE.search(code))


def is_known(model_type: str) -> bool:
    """Whether this version of transformers has models of this type."""
    return model_type in _names("CONFIG_MAPPING_NAMES")


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model, with its own model type."""
    text = config.get("text_config")
    if not isinstance(text, dict) or not text:
        if config.get("model_type") in FLAT:
            return {**config, "model_type": f"{config['model_type']}_text"}
        return dict(config)
    model_type = str(text.get("model_type") or f"{config.get('model_type', '')}_text")
    return {**text, "model_type": RENAMED.get(model_type, model_type)}


def why_not_served(config: Mapping[str, Any], *, trust_remote_code: bool = False) -> str:
    """The reason for which config.json alone rules a model out, as a sentence's end.

    Empty if none is known. A model that passes may still be refused when its modules have been made.
    """
    text = language_config(config)
    if problem := why_refused(config):
        return problem
    own_code = trust_remote_code and "AutoConfig" in (config.get("auto_map") or ())
    if not isinstance(model_type := config.get("model_type"), str) or not model_type:
        return "" if own_code else NO_TYPE
    text_type = str(text["model_type"])
    if not is_known(model_type):
        return "" if own_code or not _names("CONFIG_MAPPING_NAMES") else why_unknown(model_type)
    defaults = config_defaults(text_type)
    if config.get("is_encoder_decoder", defaults.get("is_encoder_decoder")):
        return ENCODER
    if not has_language_model(text_type) and not (trust_remote_code and "auto_map" in config):
        return why_no_language_model(text_type)
    named = _names("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").get(model_type, "")
    architecture = next(iter(config.get("architectures") or ()), "")
    is_whole = config.get("text_config") and architecture.endswith("ForConditionalGeneration")
    if not is_whole and (problem := why_another_head(architecture, named)):
        return problem
    code = _modeling_code(text_type)
    is_stateful = STATEFUL in code or LINEAR_ATTENTION in code
    if is_stateful and not any(update in code for update in STATE_UPDATES):
        return OWN_STATE
    if INDEXER_CLASS.search(code) and not any(all(part in code for part in kind) for kind in INDEXERS):
        return UNKNOWN_INDEXER
    if not is_stateful and not calls_interface(text_type):
        return f"is not served: {NOT_THROUGH_INTERFACE}"
    is_decoder = text.get("is_decoder", defaults.get("is_decoder"))
    if is_decoder is False and TWO_SIDED.search(code):
        return NO_DECODER
    return why_layers_unsupported(_layer_types(text)) or why_sizes_refused(
        text, defaults, has_states=has_states(text)
    )


def why_unknown(model_type: str) -> str:
    """Error text for a model type that transformers does not have."""
    return (
        f"is not served: this version of transformers has no model type {model_type!r}. Upgrade "
        "transformers, or pass --trust-remote-code if the checkpoint brings its own code"
    )


def has_language_model(text_type: str) -> bool:
    """Whether this type, or its language part, can be made as a causal language model."""
    names = _names("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    return not names or text_type in names or text_type in PLAIN_HEADS


def why_no_language_model(text_type: str) -> str:
    """Error text for a model type without a causal language model."""
    return (
        f"is not served: transformers has no causal language model for model type {text_type!r}, and only "
        "models that AutoModelForCausalLM can load are served"
    )


def why_another_head(architecture: str, language_model: str) -> str:
    """Error text for a checkpoint without the output layer of its language model.

    Empty for all others; the family must be known.
    """
    family = re.sub(r"(For[A-Z]\w+|LMHeadModel)$", "", language_model)
    if not language_model or architecture == language_model or not architecture.startswith(family):
        return ""
    return (
        f"is not a causal language model: transformers would load this model type as {language_model}, whose "
        "output layer the checkpoint does not have"
    )


def why_layers_unsupported(types: Collection[str]) -> str:
    """Error text for layers that are not supported; empty if all are.

    ``types`` are the types of the layers, as far as they are known.
    """
    recurrent = sorted(RECURRENT_LAYER_TYPES.intersection(types))
    unknown = sorted(set(types) - SUPPORTED_LAYER_TYPES)
    if recurrent:
        return f"has layers of type {', '.join(recurrent)}, whose recurrent state is not built"
    if unknown:
        return (
            f"has layers of type {', '.join(unknown)}: only full, sliding-window and chunked attention, and "
            "recurrent states are built"
        )
    return ""


def has_states(text: Mapping[str, Any]) -> bool:
    """Whether the language model of a config.json has layers with a recurrent state.

    ``text`` is what :func:`language_config` returns.
    """
    if listed := _listed_types(text):
        return not STATE_LAYER_TYPES.isdisjoint(listed)
    return STATEFUL in _modeling_code(str(text.get("model_type", "")))


def _listed_types(text: Mapping[str, Any]) -> set[str]:
    """Types that a config.json lists, by today's keys or by those of original checkpoints."""
    for name in LAYER_TYPES:
        if isinstance(listed := text.get(name), list) and listed:
            return {str(each) for each in listed}
    if isinstance(pattern := text.get(PATTERN), str):
        return {PATTERN_TYPES.get(letter, letter) for letter in pattern}
    numbers = text.get(NUMBERED)
    found = numbers if isinstance(numbers, Mapping) else {}
    return {kind for key, kind in NUMBERED_TYPES.items() if found.get(key)}


def _layer_types(text: Mapping[str, Any]) -> set[str]:
    """Types that a config.json lists, or that its class takes where the file lists none."""
    if listed := _listed_types(text):
        return listed
    filled_in = _filled_in_types(str(text["model_type"]))
    return {name for name, key in filled_in if not key or _names_any(text, key)}


def _names_any(config: Mapping[str, Any], key: str) -> bool:
    """Whether a legacy key, here or in a part, lists any layer."""
    if key in config:
        value = config[key]
        return any(value) if isinstance(value, list) else bool(value)
    return any(_names_any(part, key) for part in config.values() if isinstance(part, Mapping))


@cache
def _filled_in_types(model_type: str) -> frozenset[tuple[str, str]]:
    """The types that are not built, of those that the configuration class fills in.

    Each with the legacy key that it needs in a config.json, empty without one.
    """
    node = _configuration_class(model_type)
    found = frozenset() if node is None else frozenset(_assigned_types(node, ""))
    return frozenset(each for each in found if each[0] in RECURRENT_LAYER_TYPES)


def _assigned_types(node: ast.AST, key: str) -> Iterator[tuple[str, str]]:
    """Texts assigned to ``layer_types``, with the key whose presence is the condition."""
    match node:
        case ast.Assign(targets=[ast.Attribute(attr="layer_types")], value=value):
            yield from ((str(each.value), key) for each in ast.walk(value) if isinstance(each, ast.Constant))
        case ast.If(test, body, otherwise):
            for statement in body:
                yield from _assigned_types(statement, _key_asked_for(test) or key)
            for statement in otherwise:
                yield from _assigned_types(statement, key)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _assigned_types(child, key)


def _key_asked_for(test: ast.expr) -> str:
    """The key of ``"key" in settings`` in a condition; empty if there is none."""
    for each in ast.walk(test):
        match each:
            case ast.Compare(left=ast.Constant(str(key)), ops=[ast.In()]):
                return key
    return ""


@cache
def config_defaults(model_type: str) -> dict[str, Any]:
    """Constant defaults of a type's configuration class.

    They count where a config.json is silent. Empty for a type that transformers does not have.
    """
    node = _configuration_class(model_type)
    return {} if node is None else _constants(node, _configuration_classes(model_type))


def _configuration_class(model_type: str) -> ast.ClassDef | None:
    classes = _configuration_classes(model_type)
    own = (node for node in classes.values() if _constants(node, classes).get("model_type") == model_type)
    return next(own, None)


@cache
def _configuration_classes(model_type: str) -> dict[str, ast.ClassDef]:
    code = _code_of("configuration", model_type)
    return {node.name: node for node in ast.parse(code).body if isinstance(node, ast.ClassDef)}


def _modeling_code(model_type: str) -> str:
    return _code_of("modeling", model_type)


def _code_of(kind: str, model_type: str) -> str:
    """Text of a type's file of one kind; empty if there is none."""
    homes = _homes(model_type)
    texts = (_code(home, f"{kind}_{name}.py") for home in homes for name in (home, *homes))
    return next(filter(None, texts), "")


def _homes(model_type: str) -> tuple[str, ...]:
    """Directories that may have a type's code: a language part is with its whole model."""
    name = model_type.replace("-", "_")
    named = _names("SPECIAL_MODEL_TYPE_TO_MODULE_NAME").get(model_type, name)
    return named, name, name.removesuffix("_text")


@cache
def _names(mapping: str) -> dict[str, str]:
    """One of transformers' tables of names by model type; empty if it is elsewhere."""
    for file in ("auto_mappings.py", "modeling_auto.py"):
        table = re.search(rf"^{mapping} = OrderedDict\(\n(.*?)^\)", _code("auto", file), re.M | re.S)
        if table is not None:
            return dict(re.findall(r'\("([^"]+)",\s*"([^"]+)"\)', table[1]))
    return {}


@cache
def _code(directory: str, file: str) -> str:
    """Text of a file of transformers' models; empty if there is none."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None or not directory.isidentifier():
        return ""
    path = Path(found.origin).parent / "models" / directory / file
    return path.read_text(errors="replace") if path.is_file() else ""


def _constants(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> dict[str, Any]:
    """Constants assigned in a class, or in its bases in the same file.

    None stands for what is no constant.
    """
    constants: dict[str, Any] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name) and base.id in classes:
            constants |= _constants(classes[base.id], classes)
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                constants[name] = _value(value)
            case ast.Assign(targets=[ast.Name(name)], value=value):
                constants[name] = _value(value)
    return constants


def _value(node: ast.expr) -> Any:
    """Value of a constant, or of a product of numbers like 4096 * 32.

    None for all else.
    """
    match node:
        case ast.Constant(value):
            return value
        case ast.BinOp(ast.Constant(int(left)), ast.Mult(), ast.Constant(int(right))):
            return left * right
    return None
