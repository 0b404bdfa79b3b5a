"""Inputs of pooled requests as token ids: texts, pairs, or ids (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from coordinator.pooled_model import PooledModel
from router.api.prompts import check_vocabulary
from router.errors import refuse
from router.text.text_model import TextModel

MOST_INPUTS = 2048
"""Inputs of one request, as with OpenAI."""
TO_FIT = -1
"""``truncate_prompt_tokens`` that cuts to what the model takes."""
JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
JUDGED = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"
JUDGE_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Text of a pair, for rerankers that answer with a token (Source: Qwen3-Reranker's model card).

The three parts become tokens apart from each other, as there; the document in the middle one is cut.
"""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

Text = str | list[int]
"""A text, or its token ids."""


class PooledTokens(msgspec.Struct, frozen=True):
    """Token ids of one input, and those of a pair's second text."""

    ids: list[int]
    type_ids: bytes = b""


class Cutting(msgspec.Struct, frozen=True):
    """What happens to an input that is too long."""

    limit: int | None = None
    """Most tokens, special ones included; :data:`TO_FIT`; None: it is refused if the model takes less."""
    from_end: bool = False
    """Whether the end is kept."""
    max_tokens: int | None = None
    """Tokens above which an input is refused, under this name."""

    def most(self, model: TextModel) -> int | None:
        """Tokens to which inputs are cut; None if they stay whole.

        Raises:
            ApiError: the limit cannot be (400).
        """
        longest = model.served.max_model_len
        if self.limit is None:
            return None
        if self.limit == TO_FIT:
            return longest
        if not 0 < self.limit <= longest:
            refuse(
                f"truncate_prompt_tokens must be from 1 to the model's {longest}, or -1, got {self.limit}.",
                "truncate_prompt_tokens",
            )
        return self.limit


def texts_of(given: Any, param: str) -> list[Text]:
    """Inputs of a field that takes texts or token ids.

    Raises:
        ApiError: it is none of these, is empty, or has too many (400).
    """
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(x) is int for x in given)):
        given = [given]
    if not isinstance(given, list) or not given:
        refuse(f"{param} must be a text, token ids, or a list of texts or of token ids; not empty.", param)
    if len(given) > MOST_INPUTS:
        refuse(f"{param} has {len(given)} inputs; one request takes up to {MOST_INPUTS}.", param)
    for index, each in enumerate(given):
        where = f"{param}[{index}]"
        is_ids = isinstance(each, list) and all(type(id) is int for id in each)
        if not (isinstance(each, str) or is_ids):
            refuse(f"{where} must be a text or a list of token ids.", where)
        if not each:
            refuse(f"{where} is empty.", where)
    return given


def inputs_of(
    texts: Sequence[Text], model: TextModel, cutting: Cutting, param: str, *, prompt: str = ""
) -> list[PooledTokens]:
    """Token ids of texts; ``prompt`` is put before each that is no list of ids.

    Raises:
        ApiError: one is too long, or has ids that the model does not know (400).
    """
    found = []
    most = cutting.most(model)
    for index, text in enumerate(texts):
        where = f"{param}[{index}]"
        if isinstance(text, str):
            ids, _ = _encoded(prompt + text, None, model, most, cutting)
        else:
            check_vocabulary(text, model.served, where)
            ids = text if most is None else (text[-most:] if cutting.from_end else text[:most])
        if cutting.max_tokens is not None and len(ids) > cutting.max_tokens:
            refuse(f"{where} has {len(ids)} tokens, max_tokens is {cutting.max_tokens}.", "max_tokens")
        found.append(_checked(PooledTokens(ids), model, where))
    return found


def pairs_of(
    pairs: Sequence[tuple[str, str]], model: TextModel, cutting: Cutting, param: str, *, instruction: str = ""
) -> list[PooledTokens]:
    """Token ids of pairs of texts, as a cross-encoder or a reranker reads them.

    Raises:
        ApiError: one is too long (400).
    """
    pooling = _pooling(model)
    most = cutting.most(model)
    found = []
    for index, (first, second) in enumerate(pairs):
        where = f"{param}[{index}]"
        if pooling.answer_tokens:
            judged = _judged(first, second, instruction, model, most, from_end=cutting.from_end)
            found.append(_checked(judged, model, where))
            continue
        ids, type_ids = _encoded(first, second, model, most, cutting)
        types = bytes(type_ids) if pooling.has_segments and any(type_ids) else b""
        found.append(_checked(PooledTokens(ids, types), model, where))
    return found


def prompt_named(name: str | None, model: TextModel, param: str = "prompt_name") -> str:
    """The text that a model has under a prompt's name, or for none.

    Raises:
        ApiError: the model has no such prompt (400).
    """
    pooling = _pooling(model)
    if name is None:
        return pooling.prompts.get(pooling.default_prompt, "")
    if name not in pooling.prompts:
        known = ", ".join(pooling.prompts) or "none"
        refuse(f"{param} {name[:60]!r} is none of this model's prompts ({known}).", param)
    return pooling.prompts[name]


def _pooling(model: TextModel) -> PooledModel:
    pooling = model.served.pooling
    assert pooling is not None, "the task was checked"
    return pooling


def _judged(
    query: str, text: str, instruction: str, model: TextModel, most: int | None, *, from_end: bool
) -> PooledTokens:
    """A pair within the text that asks a model for yes or no."""
    before = JUDGED.format(instruction or INSTRUCTION, query, "")
    begin, end = (model.tokenizer.encode(each, add_special_tokens=False) for each in (JUDGE, JUDGE_END))
    (asked,) = model.tokenizer.backend.encode_batch([before + text], add_special_tokens=False)
    middle: list[int] = asked.ids
    room = len(middle) if most is None else max(0, most - len(begin) - len(end))
    if from_end and room < len(middle):
        kept = min(room, sum(stop <= len(before) for _, stop in asked.offsets))
        middle = middle[:kept] + middle[len(middle) - (room - kept) :]
    return PooledTokens([*begin, *middle[:room], *end])


def _encoded(
    first: str, second: str | None, model: TextModel, most: int | None, cutting: Cutting
) -> tuple[list[int], list[int]]:
    """Token ids and type ids of a text or a pair, with special tokens.

    What is too long is cut before these are added; of a pair, the longer text.
    """
    backend = model.tokenizer.backend
    texts = [first] if second is None else [first, second]
    parts = backend.encode_batch(texts, add_special_tokens=False)
    if most is not None:
        room = max(0, most - backend.num_special_tokens_to_add(second is not None))
        lengths = _cut([len(each.ids) for each in parts], room)
        for part, length in zip(parts, lengths, strict=True):
            part.truncate(length, direction="left" if cutting.from_end else "right")
    whole = backend.post_process(parts[0], parts[1] if second is not None else None)
    return whole.ids, whole.type_ids


def _cut(lengths: list[int], room: int) -> list[int]:
    """Lengths of one or two texts that fit into ``room`` together."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    surplus = max(0, first + second - room)
    first_gives = min(surplus, max(0, first - second))
    second_gives = min(surplus, max(0, second - first))
    rest = surplus - first_gives - second_gives
    return [max(0, first - first_gives - rest // 2), max(0, second - second_gives - (rest - rest // 2))]


def _checked(found: PooledTokens, model: TextModel, where: str) -> PooledTokens:
    longest = model.served.max_model_len
    if len(found.ids) > longest:
        refuse(
            f"{where} has {len(found.ids)} tokens; this model's maximum context length is {longest}. Please "
            "reduce its length, or have it cut with truncate_prompt_tokens.",
            where,
        )
    if not found.ids:
        refuse(f"{where} has no tokens.", where)
    return found
