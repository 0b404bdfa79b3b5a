"""Second stage of a request: its parameters, its prompts and the format of its answer.

A request is checked, its prompts are tokenised and its grammar is tried before anything of it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from engine.sampling import SamplingParams
from router.api.parameters import sampling_params
from router.api.prompts import num_prompt_tokens, prompts_of
from router.api.validation import check, keep_offered_tools
from router.config import HttpConfig
from router.errors import refuse
from router.http.large_bodies import run_sized
from router.mesh import ServedModel
from router.openai_api import ChatRequest, CompletionRequest
from router.text.prompt_text import PromptText
from router.text.text_model import TextModel
from router.text.text_models import no_such_model
from router.turns.grammar_check import GrammarCheck
from router.turns.tool_parsers.base import Tools
from router.turns.turn_format import TurnFormat, writes_harmony

Wanted = ChatRequest | CompletionRequest
Read = Callable[[ServedModel], Wanted]
"""Reads a request's body; what it asks for may depend on the model."""


class TextSide(Protocol):
    """What :class:`.TextModels` does."""

    async def get(self, name: str | None) -> TextModel: ...


@dataclass(frozen=True)
class Understood:
    """An understood request: all that its samples and its answer are made of."""

    wanted: Wanted
    model: TextModel
    params: SamplingParams
    prompts: Sequence[PromptText]
    turn_format: TurnFormat
    """How the text of an answer becomes a turn."""
    not_enforced: Sequence[str] = ()
    """Paths of the given schemas that the answer need not follow."""


class Understanding:
    """Second stage of all requests to the mesh's model."""

    def __init__(self, models: TextSide, config: HttpConfig) -> None:
        self._models = models
        self._config = config
        self._grammars = GrammarCheck()

    def __repr__(self) -> str:
        return f"<Understanding with {self._models!r}>"

    async def understand(self, read: Read, size: int, *, budget_is_advice: bool = False) -> Understood:
        """A checked request with its parameters, prompts and grammar.

        ``read`` finds the request in a body of ``size`` bytes.

        ``budget_is_advice``: a reasoning budget that cannot be kept does not refuse the request.

        Raises:
            ApiError: it cannot be answered as it is.
        """
        model = await self._models.get(None)
        understood, grammar = await run_sized(
            lambda: self._prepared(read, model, budget_is_advice), size, waits=model.images is not None
        )
        if grammar is None:
            return understood
        places = understood.turn_format.grammar_places
        checked = await self._grammars.check(grammar, understood.turn_format.grammar_param, places)
        params = msgspec.structs.replace(understood.params, grammar=checked.text)
        return replace(understood, params=params, not_enforced=checked.remarks(places))

    def _prepared(
        self, read: Read, model: TextModel, budget_is_advice: bool
    ) -> tuple[Understood, str | None]:
        """A request without its grammar, and the grammar that is still to be tried."""
        config, tokenizer = self._config, model.tokenizer
        wanted, sent = self._checked(read, model)
        harmony = writes_harmony(tokenizer, config.reasoning_parser, config.tool_call_parser)
        turn_format = TurnFormat(wanted, config, harmony=harmony, sent=sent)
        if any(map(tokenizer.is_special, turn_format.markers)):
            wanted.skip_special_tokens = False
        params = sampling_params(wanted, model, config.max_logprobs)
        prompts = prompts_of(wanted, model)
        rules = turn_format.rules(prompts[0].text, tokenizer, budget_is_advice=budget_is_advice)
        params = msgspec.structs.replace(params, thinking=rules.thinking)
        return Understood(wanted, model, params, prompts, turn_format), rules.grammar

    async def prompts(self, read: Read, size: int) -> tuple[Wanted, list[PromptText]]:
        """A checked request and its prompts.

        Whether its parameters are right, or there are parsers for its tools, does not matter.
        """
        model = await self._models.get(None)

        def prepare() -> tuple[Wanted, list[PromptText]]:
            wanted, _ = self._checked(read, model)
            return wanted, prompts_of(wanted, model)

        return await run_sized(prepare, size, waits=model.images is not None)

    async def count(self, read: Callable[[ServedModel], ChatRequest], size: int) -> int:
        """Number of prompt tokens of a conversation, whether there is room for them or not."""
        model = await self._models.get(None)

        def prepare() -> int:
            wanted, _ = self._checked(read, model)
            assert isinstance(wanted, ChatRequest)
            return num_prompt_tokens(wanted, model)

        return await run_sized(prepare, size, waits=model.images is not None)

    def _checked(self, read: Read, model: TextModel) -> tuple[Wanted, Tools]:
        """A request as its prompt shows it, and all tools that were sent."""
        wanted = read(model.served)
        check(wanted)
        sent = keep_offered_tools(wanted, self._config) if isinstance(wanted, ChatRequest) else ()
        if wanted.model and not model.served.knows(wanted.model):
            raise no_such_model(wanted.model)
        if model.served.pooling is not None:
            refuse(f"This model generates no text, it does {model.served.pooling.offer}.", "model")
        return wanted, sent
