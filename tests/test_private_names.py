"""Private names of libraries that Lockstep uses, and a check that they exist.

Each is a reason for the upper bound of its library in pyproject.toml. Raise a bound when this test and all others
pass with the newer version.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("coordinator", "engine", "parallel", "router")
BOUNDED = ("torch", "transformers", "uvicorn")

PUBLIC = {
    "torch.distributed",
    "torch.nn",
    "torch.nn.functional",
    "torch.overrides",
    "transformers",
    "transformers.modeling_outputs",
    "transformers.utils",
}
"""Modules whose names are documented, as are those of the libraries themselves."""

IMPORTED = {
    "torch.utils._python_dispatch.TorchDispatchMode",
    "transformers.cache_utils.DynamicCache",
    "transformers.cache_utils.LinearAttentionLayer",
    "transformers.conversion_mapping.get_checkpoint_conversion_mapping",
    "transformers.conversion_mapping.get_model_conversion_mapping",
    "transformers.conversion_mapping.register_checkpoint_conversion_mapping",
    "transformers.masking_utils.bidirectional_mask_function",
    "transformers.masking_utils.causal_mask_function",
    "transformers.core_model_loading.WeightConverter",
    "transformers.core_model_loading.dot_natural_key",
    "transformers.core_model_loading.rename_source_key",
    "transformers.integrations.accelerate",
    "transformers.integrations.gguf.gguf_tokenizer_mapping.GGUF_TOKENIZER_MAPPING",
    "transformers.integrations.gguf.gguf_tokenizer_mapping.convert_gguf_tokenizer",
    "transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS",
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS",
    "transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING",
    "transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "transformers.models.auto.modeling_auto.MODEL_MAPPING",
    "transformers.pytorch_utils.Conv1D",
    "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol",
    "uvicorn.protocols.http.httptools_impl.RequestResponseCycle",
}
"""What is imported from modules that are not public."""

ATTRIBUTES = {
    "torch.distributed.ProcessGroupGloo": ["_Options"],
    "torch.distributed.ProcessGroupGloo._Options": ["_devices", "_threads"],
    "torch.nn.Module": ["_buffers", "_parameters"],
    "torch.ops.aten": ["_scaled_dot_product_flash_attention_for_cpu"],
    "torch.utils._python_dispatch.TorchDispatchMode": ["_should_skip_dynamo"],
    "transformers.PreTrainedModel": [
        "_can_set_experts_implementation",
        "_from_config",
        "_keys_to_ignore_on_load_unexpected",
    ],
    "transformers.ProcessorMixin": ["_get_arguments_from_pretrained", "get_attributes"],
    "transformers.integrations.moe": ["_apply_gate"],
    "transformers.utils.import_utils": [
        "create_import_structure_from_path",
        "is_torch_distributed_available",
        "is_torch_flex_attn_available",
    ],
    "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol": [
        "_should_upgrade",
        "_unset_keepalive_if_required",
        "cycle",
        "flow",
        "headers",
        "loop",
        "parser",
        "pipeline",
        "scope",
        "timeout_keep_alive_task",
        "transport",
        "url",
    ],
    "uvicorn.protocols.http.httptools_impl.RequestResponseCycle": [
        "chunked_encoding",
        "disconnected",
        "flow",
        "message_event",
        "response_complete",
        "response_started",
        "transport",
    ],
}
"""Attributes that are set or read, by what has them."""

MODULES = ["torch._dynamo", "torch._meta_registrations", "torch.export"]
"""Loaded late by :mod:`engine.host.deferred`."""


def imports() -> set[str]:
    """Dotted names that our packages import from the bounded libraries, outside public modules."""
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in BOUNDED:
                if node.module not in {*PUBLIC, *BOUNDED}:
                    found |= {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")}
    return found


def test_the_list_is_whole() -> None:
    assert imports() == IMPORTED


def found(dotted: str) -> object:
    """The object of this name."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            value = getattr(value, name)
        return value
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("dotted", sorted(IMPORTED))
def test_what_is_imported_is_there(dotted: str) -> None:
    assert found(dotted) is not None


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in ATTRIBUTES.items() for name in names]
)
def test_an_attribute_is_there(owner: str, name: str) -> None:
    """On the class, in the source of what it builds, or with what it inherits."""
    value = found(owner)
    if hasattr(value, name):
        return
    sources = [
        inspect.getsource(base)
        for base in getattr(value, "__mro__", [value])
        if getattr(base, "__module__", "") != "builtins"
    ]
    assert any(re.search(rf"\b{name}\b", source) for source in sources)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_is_loaded_late_is_there(name: str) -> None:
    assert importlib.util.find_spec(name) is not None


@pytest.mark.parametrize("library", BOUNDED)
def test_each_library_has_an_upper_bound(library: str) -> None:
    page = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (need,) = [each for each in page["project"]["dependencies"] if re.split(r"[<>=]", each)[0] == library]
    assert re.fullmatch(rf"{library}>=[\d.]+,<[\d.]+", need)
