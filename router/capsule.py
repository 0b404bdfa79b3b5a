"""Capsules: records of answers, complete enough to compute these again (pure).

A capsule holds what instances were asked and what they gave. A client that asks for one
(``X-Lockstep-Capsule: 1``) finds it in its answer. :mod:`router.api.capsules` makes it, ``lockstep replay``
(:mod:`router.tools.replay`) reads it, and :mod:`router.api.replaying` computes a sample of it again. Its
digest shows that it was edited or cut off. A mesh with ``--capsule-key`` signs it as well
(:mod:`router.signing.keys`).
"""

from __future__ import annotations

import enum
import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from coordinator.numerics import Numerics
from engine.sampling import SamplingParams
from router.mesh import NumericsSwitch, WeightSpan
from router.recorded import RecordedSample
from router.signing.canonical import canonical
from router.signing.keys import CapsuleKey, CapsuleSignature

FORMAT = 3
"""Version of the capsule's format: raised where an older reader would misread it."""
LATER_FORMAT = 4
"""Format of capsules that name weight versions or an adapter, unknown to older readers."""
IMAGE_FORMAT = 5
"""Format of capsules of prompts with images, which older readers would answer without them."""
FIELD = "lockstep_capsule"
"""Field of an answer that holds its capsule."""
DIGEST_PREFIX = "sha256:"
LORA = "-lora-"
"""Mark between a numerics class and an adapter in ``system_fingerprint``."""
ADAPTER_DIGITS = 16
"""Digits of an adapter's digest in ``system_fingerprint``."""

Seed = Annotated[str, Meta(pattern=r"^-?[0-9]{1,19}$")]
"""A seed in decimal digits: as numbers, many programs would round it to 53 bits."""
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
"""An index or a size, small enough for messages to instances."""


class CapsuleProblem(enum.StrEnum):
    """Kind of a :class:`CapsuleError`."""

    UNREADABLE = "unreadable"
    """Cut off, or no capsule at all."""
    VERSION = "version"
    EDITED = "edited"


class CapsuleError(Exception):
    """Missing or unusable capsule; the message is for its owner."""

    def __init__(self, message: str, problem: CapsuleProblem = CapsuleProblem.UNREADABLE) -> None:
        super().__init__(message)
        self.problem = problem


class CapsuleModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model that gave the answer."""

    name: str
    fingerprint: str
    """Fingerprint of the checkpoint; the digest of its weights is that of the classes."""
    tokenizer: str
    """Digest of the router's tokenizer: text and stop strings depend on it."""
    chat_template: str
    """Digest of the router's chat template; empty without one."""


class CapsuleAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The low-rank adapter that an answer was computed with."""

    digest: str
    """Digest of its numbers and settings."""
    ranks: int = 1
    """Tensor-parallel ranks, whose sums decide the bits where an adapter adds to them."""


def with_adapter(fingerprint: str, adapter: CapsuleAdapter) -> str:
    """``system_fingerprint`` of an answer that was computed with an adapter, in this numerics class."""
    ranks = f"-tp{adapter.ranks}" if adapter.ranks > 1 else ""
    return f"{fingerprint}{LORA}{adapter.digest[:ADAPTER_DIGITS]}{ranks}"


def class_name_of(fingerprint: str) -> str:
    """Name of the numerics class in a ``system_fingerprint``."""
    return fingerprint.partition(LORA)[0]


class CapsuleSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One choice of the answer."""

    index: int
    """Number of the choice."""
    sample_index: int
    """Which of the prompt's samples it is; mixed into the seed."""
    system_fingerprint: str | None
    """Numerics class of its first token; None if the instance named none."""
    result: RecordedSample
    numerics_changes: tuple[NumericsSwitch, ...] = ()
    """Empty if all tokens were computed in one class."""


class CapsuleTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array that the encoder reads of an image."""

    name: str
    dtype: str
    """As numpy names it."""
    shape: tuple[Count, ...]
    data: bytes
    """In C order; base64 in JSON."""


class CapsulePixels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image as its encoder gets it, once in a capsule."""

    digest: str
    """Its name in the prompts' blocks, in hexadecimal digits."""
    tensors: tuple[CapsuleTensor, ...]


class CapsulePlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Place of an image in a prompt: its rows are among the tokens [first, end)."""

    prompt: Count
    """Index of the prompt."""
    first: Count
    end: Count
    digest: str
    """Digest of its pixels."""


class CapsuleWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weight versions that made the tokens of one choice."""

    index: int
    """Number of the choice."""
    spans: tuple[WeightSpan, ...]


class CapsulePrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt as instances got it, with all its samples."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    """Parameters that instances got, with the stop strings that routers look for."""
    seed: Seed
    """Seed of the client, or the one that was drawn."""
    samples: tuple[CapsuleSample, ...]


class Capsule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An answer's requests and results."""

    format: int
    id: str
    """Id of the answer."""
    created: int
    """When the answer was made, in seconds since 1970."""
    model: CapsuleModel
    numerics: tuple[Numerics, ...]
    """Classes of the samples, as far as they were known."""
    prompts: tuple[CapsulePrompt, ...]
    weights: tuple[CapsuleWeights, ...] = ()
    """Weight versions by choice; empty where all are those of the mesh's start."""
    adapter: CapsuleAdapter | None = None
    """Low-rank adapter of all choices; None: the model itself gave them."""
    images: tuple[CapsulePixels, ...] = ()
    """Images of all prompts, each once."""
    places: tuple[CapsulePlace, ...] = ()
    """Where these are."""
    request: str = ""
    """Digest of the request's body, as it came."""
    digest: str = ""
    """Digest of the other fields but the signature."""
    signature: CapsuleSignature | None = None
    """Signature of the other fields, where the mesh has a key."""


class ReplayImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image of a prompt that is computed again."""

    first: Count
    end: Count
    tensors: tuple[CapsuleTensor, ...]


def images_of(capsule: Capsule, prompt: int) -> tuple[ReplayImage, ...]:
    """Images of the prompt with this index.

    Raises:
        CapsuleError: a place is of an image that the capsule lacks.
    """
    pixels = {each.digest: each.tensors for each in capsule.images}
    try:
        return tuple(
            ReplayImage(each.first, each.end, pixels[each.digest])
            for each in capsule.places
            if each.prompt == prompt
        )
    except KeyError as error:
        raise CapsuleError(f"the capsule lacks the pixels of image {error}", CapsuleProblem.EDITED) from error


def tokens_of_first_weights(capsule: Capsule, index: int) -> int | None:
    """Tokens of a choice before its weights changed; None if they did not."""
    spans = next((each.spans for each in capsule.weights if each.index == index), ())
    return spans[1].first_token if len(spans) > 1 else None


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/replay``: one sample to compute again."""

    model: CapsuleModel
    numerics: Numerics
    """The class to compute it in."""
    prompt_ids: list[int]
    params: SamplingParams
    seed: Seed
    sample_index: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    adapter: CapsuleAdapter | None = None
    images: tuple[ReplayImage, ...] = ()


class ReplayAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that was computed again."""

    system_fingerprint: str | None
    """Numerics class of its first token."""
    dp_rank: int
    """Instance that computed it."""
    result: RecordedSample
    numerics_changes: tuple[NumericsSwitch, ...] = ()
    weight_spans: tuple[WeightSpan, ...] = ()
    remarks: tuple[str, ...] = ()
    """Differences from the first computation that do not affect the sample."""


class _Head(msgspec.Struct):
    """Fields that capsules of all versions have."""

    format: int | None = None


def written(capsule: Capsule, key: CapsuleKey | None = None) -> bytes:
    """A capsule as JSON, with its digest; signed, if there is a key."""
    fields = fields_of(msgspec.json.encode(capsule))
    fields["digest"] = _digest_of(fields)
    fields.pop("signature", None)
    if key is not None:
        fields["signature"] = msgspec.to_builtins(key.sign(fields))
    return msgspec.json.encode(fields)


def fields_of(text: bytes) -> dict[str, Any]:
    """Fields of a capsule, as any program reads them."""
    return msgspec.json.decode(text, type=dict[str, Any])


def _digest_of(fields: dict[str, Any]) -> str:
    """Digest of a capsule's fields but itself and the signature, in canonical form."""
    rest = {name: value for name, value in fields.items() if name not in ("digest", "signature")}
    return DIGEST_PREFIX + hashlib.sha256(canonical(rest)).hexdigest()


def read(text: bytes) -> Capsule:
    """A capsule from JSON.

    Raises:
        CapsuleError: it is none, of another version, or not as it was made.
    """
    try:
        version = msgspec.json.decode(text, type=_Head).format
        if version not in (FORMAT, LATER_FORMAT, IMAGE_FORMAT):
            named = "has no version" if version is None else f"has format {version}"
            raise CapsuleError(
                f"the capsule {named}, and this version of Lockstep "
                f"reads formats {FORMAT} to {IMAGE_FORMAT}: "
                "use the version of Lockstep that made it",
                CapsuleProblem.VERSION,
            )
        capsule = msgspec.json.decode(text, type=Capsule)
    except msgspec.ValidationError as error:
        raise CapsuleError(f"the capsule was edited, or is none: {error}", CapsuleProblem.EDITED) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CapsuleError(f"the capsule is cut off, or no JSON: {error}") from error
    if capsule.digest != _digest_of(fields_of(text)):
        raise CapsuleError(
            "the capsule was edited after it was made, as its digest shows: "
            "use the answer as it was received",
            CapsuleProblem.EDITED,
        )
    return capsule


def found_in(data: bytes) -> list[tuple[str, bytes]]:
    """The capsules in a file, as JSON, each with its place there.

    A place is like ``line 3: ``, and empty for the whole file. The file is a capsule, an answer with one, a
    saved stream of events, or JSON lines of the first two.

    Raises:
        CapsuleError: there is none, or one of the lines has none.
    """
    lines = [(f"line {number}: ", line.strip()) for number, line in enumerate(data.splitlines(), 1)]
    lines = [(place, line) for place, line in lines if line]
    if not lines:
        raise CapsuleError("the file is empty")
    events = [(place, line[5:].strip()) for place, line in lines if line.startswith(b"data:")]
    if events:
        return _in_events(events)
    if len(lines) > 1 and _is_json(lines[0][1]):
        return [(place, _in_value(place, line)) for place, line in lines]
    return [("", _in_value("", data))]


def _in_events(events: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Capsules of a saved stream: most of its events have none."""
    found = []
    for place, data in events:
        if data != b"[DONE]" and (capsule := _held_by(place, data)) is not None:
            found.append((place, capsule))
    if not found:
        raise CapsuleError(
            "the stream has no capsule: it comes with the last event, so the stream is cut off, or was made "
            "without the header X-Lockstep-Capsule: 1"
        )
    return found


def _in_value(place: str, text: bytes) -> bytes:
    capsule = _held_by(place, text)
    if capsule is None:
        raise CapsuleError(
            f"{place}no capsule, and no answer that holds one: ask with the header X-Lockstep-Capsule: 1"
        )
    return capsule


def _held_by(place: str, text: bytes) -> bytes | None:
    """The capsule that a JSON text is or holds."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CapsuleError(f"{place}cut off, or no JSON: {error}") from error
    if FIELD in fields:
        return bytes(fields[FIELD])
    return text if "prompts" in fields and "digest" in fields else None


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
