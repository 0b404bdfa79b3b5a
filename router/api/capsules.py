"""Capsules of answers: made from finished samples, put into the last object (pure).

See :mod:`router.capsule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from coordinator.numerics import Numerics
from engine.prompt_images import PromptImage
from engine.sampling import SamplingParams
from router.capsule import (
    FIELD,
    FORMAT,
    IMAGE_FORMAT,
    LATER_FORMAT,
    Capsule,
    CapsuleAdapter,
    CapsuleModel,
    CapsulePixels,
    CapsulePlace,
    CapsulePrompt,
    CapsuleSample,
    CapsuleTensor,
    CapsuleWeights,
    class_name_of,
    written,
)
from router.mesh import Prompt
from router.signing.keys import CapsuleKey
from router.text.output_stream import OutputStream
from router.text.text_model import TextModel


def capsule_of(
    id: str,
    created: int,
    model: TextModel,
    classes: Mapping[Numerics, object],
    params: SamplingParams,
    samples: Sequence[OutputStream],
    *,
    request: str = "",
    key: CapsuleKey | None = None,
) -> bytes:
    """The capsule of an answer as JSON, signed if there is a key.

    ``classes`` are those of the mesh now; ``params`` those of the request, stop strings included; ``request``
    is the digest of its body.
    """
    used = {class_name_of(sample.fingerprint) for sample in samples if sample.fingerprint}
    firsts = (sample.first_class for sample in samples)
    known = {each.fingerprint: each for each in (*classes, *firsts) if each is not None}
    digest = samples[0].prompt.adapter if samples else ""
    adapter = CapsuleAdapter(digest, model.served.ranks) if digest else None
    weights = tuple(CapsuleWeights(sample.index, tuple(sample.weight_spans)) for sample in samples)
    if not any(span.number or span.label for each in weights for span in each.spans):
        weights = ()
    groups = _by_prompt(samples)
    pixels = {image.digest: _pixels(image) for group in groups for image in group[0].prompt.images}
    places = tuple(
        CapsulePlace(number, image.first, image.end, image.digest.hex())
        for number, group in enumerate(groups)
        for image in group[0].prompt.images
    )
    capsule = Capsule(
        format=IMAGE_FORMAT if places else LATER_FORMAT if weights or adapter is not None else FORMAT,
        id=id,
        created=created,
        model=model_of(model),
        numerics=tuple(each for name, each in known.items() if name in used),
        prompts=tuple(_prompt(group, params) for group in groups),
        weights=weights,
        adapter=adapter,
        images=tuple(pixels.values()),
        places=places,
        request=request,
    )
    return written(capsule, key)


def model_of(model: TextModel) -> CapsuleModel:
    """Digests of a model's files, by which a replay knows the model again."""
    return CapsuleModel(
        model.name, model.served.fingerprint, model.tokenizer.digest, model.chat_template_digest
    )


def with_capsule(body: bytes, capsule: bytes) -> bytes:
    """A JSON object with the capsule as its last field."""
    assert body.endswith(b"}"), "it is an object with fields"
    return body[:-1] + b',"' + FIELD.encode() + b'":' + capsule + b"}"


def event_with_capsule(events: bytes, capsule: bytes) -> bytes:
    """Server-sent events with the capsule in the last one."""
    return with_capsule(events.removesuffix(b"\n\n"), capsule) + b"\n\n"


def _by_prompt(samples: Sequence[OutputStream]) -> list[list[OutputStream]]:
    groups: list[list[OutputStream]] = []
    for sample in samples:
        if sample.is_first_of_prompt:
            groups.append([])
        groups[-1].append(sample)
    return groups


def _prompt(samples: Sequence[OutputStream], params: SamplingParams) -> CapsulePrompt:
    asked = samples[0].prompt
    return CapsulePrompt(
        prompt_ids=tuple(asked.prompt_ids),
        params=asked_params(asked, params),
        seed=str(asked.seed),
        samples=tuple(_sample(sample) for sample in samples),
    )


def _pixels(image: PromptImage) -> CapsulePixels:
    tensors = (CapsuleTensor(each.name, each.dtype, each.shape, each.data) for each in image.tensors)
    return CapsulePixels(image.digest.hex(), tuple(tensors))


def asked_params(asked: Prompt, params: SamplingParams) -> SamplingParams:
    """Parameters of a prompt in its capsule; ``params``: those of the request."""
    return msgspec.structs.replace(
        asked.params,
        stop=params.stop,
        max_tokens=0 if params.max_tokens == 0 else asked.params.max_tokens,
        logprobs=None,
        prompt_logprobs=None,
    )


def _sample(sample: OutputStream) -> CapsuleSample:
    return CapsuleSample(
        index=sample.index,
        sample_index=sample.prompt.sample_index,
        system_fingerprint=sample.fingerprint,
        result=sample.recorded,
        numerics_changes=tuple(sample.numerics_changes),
    )
