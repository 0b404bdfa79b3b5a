"""Second stage of a request: its parameters, its prompts and the format of its answer.

A request is checked, its prompts are tokenised and its grammar is tried before anything of it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from engine.sampling import SamplingParams
from router.api.parameters import sampling_params
from router.api.prompts import num_prompt_tokens, prompts_of
from router.api.validation import check, keep_offered_tools
from router.config import HttpConfig
from router.http.heavy import run_sized
from router.mesh import ServedModel
from router.openai_api import ChatRequest, CompletionRequest
from router.text.prompt_text import PromptText
from router.text.text_model import TextModel
from router.text.text_models import TextModels, check_name
from router.turns.grammar_check import GrammarCheck
from router.turns.harmony import is_written
from router.turns.structured import ANSWER, form_of, text_of
from router.turns.tool_parsers.base import Tools
from router.turns.turn_format import TurnFormat

Wanted = ChatRequest | CompletionRequest
Read = Callable[[ServedModel], Wanted]
"""Reads a request's body; what it asks for may depend on the model."""


@dataclass(frozen=True)
class Understood:
    """A request that was understood: all that its samples and its answer are made of."""

    wanted: Wanted
    model: TextModel
    params: SamplingParams
    prompts: Sequence[PromptText]
    chat_format: TurnFormat | None = None
    """How the text of a chat's answer becomes a turn; None for a completion."""
    not_enforced: Sequence[str] = ()
    """Paths of the given schemas that the answer need not follow."""

    @property
    def turn_format(self) -> TurnFormat:
        """The format of a chat's answer."""
        assert self.chat_format is not None, "it is a chat"
        return self.chat_format


class _Grammar(msgspec.Struct, frozen=True):
    """A grammar that is not tried yet."""

    text: str
    param: str
    """The field that asked for it."""
    places: Mapping[str, str]
    """What the client calls each of its parts."""


class Understanding:
    """Understands requests to the mesh's model."""

    def __init__(self, models: TextModels, config: HttpConfig) -> None:
        self._models = models
        self._config = config
        self._grammars = GrammarCheck()

    def __repr__(self) -> str:
        return f"<Understanding with {self._models!r}>"

    async def understand(self, read: Read, size: int, *, budget_is_advice: bool = False) -> Understood:
        """The request that ``read`` finds in a body of ``size`` bytes.

        ``budget_is_advice``: a reasoning budget that cannot be kept does not refuse the request.

        Raises:
            ApiError: it cannot be answered as it is.
        """
        model = await self._models.get(None)

        def prepare() -> tuple[Understood, _Grammar | None]:
            wanted, sent = self._checked(read, model)
            if isinstance(wanted, ChatRequest):
                return self._chat(wanted, sent, model, budget_is_advice)
            return self._completion(wanted, model)

        understood, grammar = await run_sized(prepare, size)
        if grammar is None:
            return understood
        checked = await self._grammars.check(grammar.text, grammar.param, grammar.places)
        params = msgspec.structs.replace(understood.params, grammar=checked.text)
        return replace(understood, params=params, not_enforced=checked.remarks(grammar.places))

    async def prompts(self, read: Read, size: int) -> tuple[Wanted, list[PromptText]]:
        """A checked request and its prompts.

        Whether its parameters are right, or there are parsers for its tools, does not matter.
        """
        model = await self._models.get(None)

        def prepare() -> tuple[Wanted, list[PromptText]]:
            wanted, _ = self._checked(read, model)
            return wanted, prompts_of(wanted, model)

        return await run_sized(prepare, size)

    async def count(self, read: Callable[[ServedModel], ChatRequest], size: int) -> int:
        """Number of prompt tokens of a conversation, whether there is room for them or not."""
        model = await self._models.get(None)

        def prepare() -> int:
            wanted, _ = self._checked(read, model)
            assert isinstance(wanted, ChatRequest)
            return num_prompt_tokens(wanted, model)

        return await run_sized(prepare, size)

    def _checked(self, read: Read, model: TextModel) -> tuple[Wanted, Tools]:
        """A request as its prompt shows it, and all tools that were sent."""
        wanted = read(model.served)
        check(wanted)
        check_name(wanted.model, model.served)
        return wanted, keep_offered_tools(wanted, self._config) if isinstance(wanted, ChatRequest) else ()

    def _completion(self, wanted: CompletionRequest, model: TextModel) -> tuple[Understood, _Grammar | None]:
        form = form_of(wanted, self._config.structured_outputs)
        params = sampling_params(wanted, model, self._config.max_logprobs)
        understood = Understood(wanted, model, params, prompts_of(wanted, model))
        if form is None:
            return understood, None
        return understood, _Grammar(text_of({ANSWER: form.body}), form.param, {ANSWER: form.param})

    def _chat(
        self, wanted: ChatRequest, sent: Tools, model: TextModel, budget_is_advice: bool
    ) -> tuple[Understood, _Grammar | None]:
        config = self._config
        harmony = is_written(model.tokenizer, config.reasoning_parser, config.tool_call_parser)
        turn_format = TurnFormat(wanted, config, harmony=harmony, sent=sent)
        if turn_format.needs_special_tokens(model.tokenizer):
            wanted.skip_special_tokens = False
        params = sampling_params(wanted, model, config.max_logprobs)
        (prompt,) = prompts = prompts_of(wanted, model)
        if turn_format.reads_reasoning or not budget_is_advice:
            thinking = turn_format.thinking(prompt.text, model.tokenizer)
            params = msgspec.structs.replace(params, thinking=thinking)
        understood = Understood(wanted, model, params, prompts, turn_format)
        grammar = turn_format.grammar(prompt.text, model.tokenizer)
        if grammar is None:
            return understood, None
        return understood, _Grammar(grammar, turn_format.grammar_param, turn_format.grammar_places)
