"""Settings of ``--speculative-config``: how tokens are drafted ahead (pure)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

NGRAM_NAMES = ("ngram", "[ngram]")
"""vLLM's names of the method that needs no second model.

The second is its older one.
"""
WITH_MODEL = ("draft_model", "eagle3")
"""Methods by a model in a directory of its own."""
METHODS = ("ngram", "draft_model", "mtp", "eagle3")
MOST_DRAFTED = 64
"""Most tokens of a draft; far shorter ones already cost more than they save."""
USUAL = 5
"""Most tokens of a draft where nothing says how many."""
LONGEST_MATCH = 64
"""Most tokens of a match: upper bound of ``prompt_lookup_min`` and ``prompt_lookup_max``."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of drafts, with vLLM's names."""

    method: Literal["ngram", "draft_model", "mtp", "eagle3"] = "ngram"
    """Source of the tokens.

    The request's text, a small model, the checkpoint's MTP layer, or an EAGLE-3 head.
    """
    model: str = ""
    """Directory or name of the model or head that proposes; empty where none does."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MOST_DRAFTED)] | None = None
    """Tokens of a draft at most; None: the head's own number, else :data:`USUAL`."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=LONGEST_MATCH)] = 2
    """The last tokens of a context that must have stood there before."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=LONGEST_MATCH)] = 5
    """Tokens compared to choose among several matches: the longest agreement wins."""
    combines: bool = False
    """Whether a model proposes only where the text has no match.

    A given length of matches asks for it.
    """
    adaptive: bool = True
    """Whether measured prices decide how much is drafted; False: as much as there is."""
    disable_by_batch_size: Annotated[int, Meta(ge=1)] | None = None
    """With more requests running nothing is drafted; None: as long as it pays."""

    def __post_init__(self) -> None:
        if (self.method in WITH_MODEL) != bool(self.model):
            needs = "takes no" if self.model else "needs"
            raise ValueError(f'method "{self.method}" {needs} "model", the directory of one that proposes')
        if self.combines and not self.by_model:
            raise ValueError(f'method "{self.method}" has no model beside which "combines" looks texts up')
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not exceed prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )

    @property
    def most(self) -> int:
        """Tokens of a draft at most, once a head's number is taken over."""
        return USUAL if self.num_speculative_tokens is None else self.num_speculative_tokens

    @property
    def by_model(self) -> bool:
        """Whether a model proposes, not the text of the request."""
        return self.method != "ngram"

    @property
    def by_head(self) -> bool:
        """Whether what proposes reads rows of each step of the served model."""
        return self.method in ("mtp", "eagle3")


def with_most(text: str, most: int) -> str:
    """The JSON of ``--speculative-config`` with this number of tokens where it has none."""
    found = msgspec.json.decode(text, type=dict[str, Any])
    if found.get("num_speculative_tokens") is None:
        found["num_speculative_tokens"] = most
    return msgspec.json.encode(found).decode()


def _method_of(model: object) -> str | None:
    """Method of a model that is given without one, by its name as in vLLM."""
    if model is None:
        return None
    return "eagle3" if "eagle3" in str(model).lower() else "draft_model"


def read_config(text: str) -> SpeculativeConfig:
    """Parses ``--speculative-config``; if one length of a match is given, it stands for both.

    Raises:
        ValueError: it is no JSON object with these settings, or of a method that is not ours.
    """
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
        given = {name: value for name, value in found.items() if value is not None}
        if given.get("model") in NGRAM_NAMES:  # vLLM's older spelling
            given["method"] = given.pop("model")
        method = given.get("method", _method_of(given.get("model")))
        if method not in (*NGRAM_NAMES, *METHODS):
            raise ValueError(
                'the method must be "ngram" (the text of each request), "draft_model" (a small model), "mtp" '
                f'(the checkpoint\'s own layer) or "eagle3" (a head), not {method!r}'
            )
        given["method"] = "ngram" if method in NGRAM_NAMES else method
        lengths = [given[name] for name in ("prompt_lookup_min", "prompt_lookup_max") if name in given]
        if len(lengths) == 1:
            given["prompt_lookup_min"] = given["prompt_lookup_max"] = lengths[0]
        if lengths and given["method"] != "ngram":
            given["combines"] = True
        return msgspec.convert(given, SpeculativeConfig)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        raise ValueError(f"--speculative-config: {name + ': ' if name else ''}{what}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--speculative-config: {error}") from error
