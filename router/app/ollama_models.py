"""Ollama's endpoints about models: what is served, and what of Ollama is not done here."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.answers import encode, json_response
from router.api.ollama.answer import timestamp
from router.api.ollama.handlers import OllamaGenerating
from router.api.ollama.request import known_name
from router.api.ollama.wire import REFUSED_CHANGES
from router.config import HttpConfig
from router.errors import refuse
from router.http.body import decoder, read_body
from router.http.large_bodies import run_sized
from router.mesh import ServedModel
from router.text.text_model import TextModel
from router.text.text_models import TextModels
from router.turns.turn_format import writes_harmony

OLLAMA_VERSION = "0.13.0"
"""Release of Ollama whose API this is: clients ask for a least version."""
FOREVER = "2318-01-01T00:00:00Z"
"""When a model is unloaded that stays."""


class ModelDetails(msgspec.Struct, kw_only=True):
    """``details`` of a model; what is not known is empty."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str = ""
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, kw_only=True):
    """One model of ``/api/tags`` or ``/api/ps``."""

    name: str
    model: str
    modified_at: str
    size: int
    """Bytes of the weight files, where this host has them."""
    digest: str
    details: ModelDetails
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct):
    models: list[OllamaModel]


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """Body of ``/api/show``."""

    model: str | None = None
    name: str | None = None
    """The older name of ``model``."""
    verbose: bool | None = None


class OllamaShown(msgspec.Struct, kw_only=True):
    """Answer of ``/api/show``."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    version: str


_read_show = decoder(OllamaShowRequest)


class OllamaModelEndpoints:
    """Handlers of ``/api/tags``, ``/api/show``, ``/api/ps``, ``/api/version``, and of what is refused."""

    def __init__(self, config: HttpConfig, models: TextModels) -> None:
        self._config = config
        self._models = models
        self._started = timestamp(int(time.time()))

    def __repr__(self) -> str:
        return f"<OllamaModelEndpoints of {self._models!r}>"

    async def tags(self, _request: Request) -> Response:
        return json_response(encode(OllamaModels(await self._served(is_loaded=False))))

    async def ps(self, _request: Request) -> Response:
        return json_response(encode(OllamaModels(await self._served(is_loaded=True))))

    async def version(self, _request: Request) -> Response:
        return json_response(encode(OllamaVersion(OLLAMA_VERSION)))

    async def show(self, request: Request) -> Response:
        body = await read_body(request, self._config, any_type=True)
        asked = _read_show(body)
        name = asked.model or asked.name
        if not name:
            refuse("model is required.", "model")
        model = await self._models.get(known_name(name, self._models.served().knows))
        return json_response(await run_sized(lambda: encode(self._shown(model)), len(body)))

    async def refused(self, request: Request) -> Response:
        """Refuses what would change which models there are."""
        path = request.scope["path"]
        what = next(what for known, (_, what) in REFUSED_CHANGES.items() if path.startswith(known[:8]))
        refuse(f"This server does not {what}: it serves the model that it was started with (GET /api/tags).")

    async def _served(self, *, is_loaded: bool) -> list[OllamaModel]:
        served = self._models.served()
        checkpoint = await run_sized(lambda: _Checkpoint(served), 0)
        names = [*served.names, *(each.name for each in served.adapters)]
        return [
            OllamaModel(
                name=name,
                model=name,
                modified_at=self._started,
                size=checkpoint.size,
                digest=served.fingerprint.rpartition(":")[2],
                details=checkpoint.details,
                expires_at=FOREVER if is_loaded else UNSET,
                size_vram=0 if is_loaded else UNSET,
                context_length=served.max_model_len if is_loaded else UNSET,
            )
            for name in names
        ]

    def _shown(self, model: TextModel) -> OllamaShown:
        served = model.served
        checkpoint = _Checkpoint(served)
        family = checkpoint.details.family
        template = next(iter(model.templates.sources.values()), "")
        return OllamaShown(
            modelfile=f"FROM {served.names[0]}\n",
            parameters="\n".join(f"{name} {value}" for name, value in model.defaults.items()),
            template=template,
            details=checkpoint.details,
            model_info={
                "general.architecture": family,
                "general.basename": served.names[0],
                f"{family}.context_length": served.max_model_len,
                f"{family}.vocab_size": served.vocab_size,
                **{f"{family}.{ours}": value for ours, value in checkpoint.sizes().items()},
            },
            capabilities=self._capabilities(model),
            modified_at=self._started,
        )

    def _capabilities(self, model: TextModel) -> list[str]:
        config = self._config
        harmony = writes_harmony(model.tokenizer, config.reasoning_parser, config.tool_call_parser)
        if model.served.pooling is not None:
            return ["embedding"]
        found = ["completion"]
        if self._models.take_images(model.served):
            found.append("vision")
        if harmony or (config.enable_auto_tool_choice and config.tool_call_parser):
            found.append("tools")
        if harmony or config.reasoning_parser:
            found.append("thinking")
        return found


class _Checkpoint:
    """Facts of a model's files, as far as this host has them."""

    SIZES = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
    }

    def __init__(self, served: ServedModel) -> None:
        directory = Path(served.directory)
        try:
            config = json.loads((directory / "config.json").read_bytes())
            self.size = sum(each.stat().st_size for each in directory.glob("*.safetensors"))
        except (OSError, ValueError):
            config, self.size = {}, 0
        self._config: dict[str, Any] = config if isinstance(config, dict) else {}
        family = str(self._config.get("model_type", "unknown"))
        level = str(self._config.get("dtype") or self._config.get("torch_dtype") or "")
        self.details = ModelDetails(family=family, families=[family], quantization_level=level)

    def sizes(self) -> dict[str, Any]:
        return {ours: self._config[name] for name, ours in self.SIZES.items() if name in self._config}


def ollama_routes(generating: OllamaGenerating, config: HttpConfig, models: TextModels) -> list[Route]:
    """Routes of Ollama's API."""
    about = OllamaModelEndpoints(config, models)
    return [
        Route("/api/chat", generating.chat, methods=["POST"]),
        Route("/api/generate", generating.generate, methods=["POST"]),
        Route("/api/tags", about.tags, methods=["GET"]),
        Route("/api/ps", about.ps, methods=["GET"]),
        Route("/api/show", about.show, methods=["POST"]),
        Route("/api/version", about.version, methods=["GET"]),
        *(Route(path, about.refused, methods=[method]) for path, (method, _) in REFUSED_CHANGES.items()),
    ]
