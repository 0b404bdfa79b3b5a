"""Capsules of answers that a model in this process gives, truthful or not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from coordinator.numerics import Numerics
from engine.adapters.adapter_settings import settled
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from engine.config.lora import LoraConfig
from engine.messages import Delta, Submit
from engine.model.finding import MODELS_DIRECTORY
from engine.sampling import SamplingParams
from engine.verification.scorer import Recorded, Scorer
from router.api.capsules import capsule_of, model_of
from router.api.headers import RequestTerms
from router.api.replaying import sample_of
from router.capsule import Capsule, CapsuleAdapter, ReplayImage, ReplayRequest, read, with_adapter, written
from router.config import HttpConfig
from router.mesh import ServedModel
from router.recorded import Recorder
from router.text.text_model import TextModel, load_text_model

DIRECTORY = MODELS_DIRECTORY / "lockstep-moe"
PROMPT = "It was a dark and stormy night, and"
ROOM = 1 << 27
"""Bytes of a scorer's KV cache."""
FLAGS = ["--model", str(DIRECTORY), "--cpu-threads", "1", "--kv-cache-memory-bytes", str(ROOM)]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True}


class Server:
    """A model that answers, and makes a capsule of each answer."""

    def __init__(
        self,
        directory: Path = DIRECTORY,
        kept: Any = "auto",
        quantization: Any = None,
        numerics: Any = "auto",
        adapters: tuple[str, ...] = (),
    ) -> None:
        lora = LoraConfig(enable_lora=bool(adapters), lora_modules=adapters)
        config = EngineConfig(
            model=ModelConfig(model=str(directory), dtype="bfloat16", quantization=quantization),
            cache=CacheConfig(kv_cache_dtype=kept, kv_cache_memory_bytes=ROOM),
            device=DeviceConfig(device="cpu", numerics=numerics),
            lora=lora,
        )
        self._scorer = Scorer(config, 1)
        self.numerics = self._scorer.numerics
        served = ServedModel(
            (str(directory),),
            str(directory),
            self._scorer.vocab_size,
            self._scorer.max_model_len,
            self._scorer.fingerprint,
            tuple(map(settled, lora.sources)),
        )
        self.text = load_text_model(served, HttpConfig())

    def answer(
        self,
        params: SamplingParams,
        *,
        text: str = PROMPT,
        ids: list[int] | None = None,
        samples: int = 1,
        seed: int = 7,
        claimed: Numerics | None = None,
        adapter: str = "",
        images: tuple[ReplayImage, ...] = (),
    ) -> Capsule:
        """The capsule of an answer, drawn token by token; ``claimed``: its class.

        ``ids``: tokens of the prompt in place of its text.
        """
        numerics = claimed or self.numerics
        ids = ids or self.text.tokenizer.encode(text, add_special_tokens=True)
        digest = self.text.served.adapter_of(adapter)
        adapted = CapsuleAdapter(digest) if digest else None
        streams, wanted = [], []
        for index in range(samples):
            request = ReplayRequest(
                model=model_of(self.text),
                numerics=numerics,
                prompt_ids=ids,
                params=params,
                seed=str(seed),
                sample_index=index,
                adapter=adapted,
                images=images,
            )
            stream = sample_of(request, self.text, RequestTerms(id=f"cmpl-{index}"), Recorder())
            stream.index, stream.fingerprint = index, numerics.fingerprint
            if adapted is not None:
                stream.fingerprint = with_adapter(numerics.fingerprint, adapted)
            streams.append(stream)
            asked = stream.prompt
            submit = Submit(
                0, asked.request_id, asked.prompt_ids, asked.params, asked.seed, index, adapter=digest,
                images=asked.images,
            )  # fmt: skip
            wanted.append(Recorded(submit, ()))

        def take(index: int, delta: Delta) -> bool:
            streams[index].take(delta)
            return streams[index].finish_reason is not None

        assert self._scorer.compute(wanted, take) == {}
        return read(capsule_of("cmpl-1", 1, self.text, {numerics: [0]}, params, streams))


@cache
def honest() -> Server:
    """Server of the shipped model, as it is."""
    return Server()


def edited(capsule: Capsule, sample: dict[str, Any] | None = None, **prompt: Any) -> Capsule:
    """The capsule with other fields of its first prompt or sample, and their digest."""
    fields = msgspec.json.decode(msgspec.json.encode(capsule))
    fields["prompts"][0] |= prompt
    fields["prompts"][0]["samples"][0]["result"] |= sample or {}
    return read(written(msgspec.json.decode(msgspec.json.encode(fields), type=Capsule)))


def named_as(capsule: Capsule, text: TextModel) -> Capsule:
    """The capsule under the name and digests of another model."""
    return read(written(msgspec.structs.replace(capsule, model=model_of(text))))


def save(path: Path, capsules: Sequence[Capsule]) -> str:
    """A file with capsules, one a line."""
    path.write_bytes(b"\n".join(map(written, capsules)))
    return str(path)
