"""Events of a streamed response about its output items (pure)."""

from __future__ import annotations

from typing import Any

from router.api.items import Closed, Item, ItemEvent, ItemKind, Opened, TextAdded
from router.api.responses import wire
from router.api.responses.custom_input import InputReader, custom_input
from router.api.responses.output_items import IN_PROGRESS, OutputItems
from router.openai_api import TokenLogprob


class ItemEvents:
    """Writer of the events of one response's items."""

    def __init__(self, items: OutputItems) -> None:
        self._items = items
        self._inputs: dict[int, InputReader] = {}
        """Readers for calls of custom tools, by the index of their item."""

    def __repr__(self) -> str:
        return f"<ItemEvents of {self._items!r}>"

    def of(self, event: ItemEvent, logprobs: list[TokenLogprob], status: str) -> list[wire.WireEvent]:
        """Wire events for the event of an item.

        ``status`` is that of the response if it ends now.
        """
        match event:
            case Opened(item):
                return self._opened(item)
            case TextAdded(item, text):
                return self._added(item, text, logprobs)
            case Closed(item):
                return self._closed(item, self._items.status_of(item, status))

    def _opened(self, item: Item) -> list[wire.WireEvent]:
        added = wire.ItemAdded(output_index=item.index, item=self._items.written(item, IN_PROGRESS, ""))
        if item.kind is ItemKind.CALL:
            return [added]
        return [added, wire.PartAdded(**self._position(item), part=self._items.part(item, ""))]

    def _added(self, item: Item, text: str, logprobs: list[TokenLogprob]) -> list[wire.WireEvent]:
        position = self._position(item)
        match item.kind:
            case ItemKind.REASONING:
                return [wire.ReasoningDelta(**position, delta=text)]
            case ItemKind.TEXT:
                return [wire.OutputTextDelta(**position, delta=text, logprobs=logprobs)]
            case ItemKind.CALL if self._items.called(item).is_custom:
                return self._input_delta(item, self._inputs.setdefault(item.index, InputReader()).feed(text))
            case ItemKind.CALL:
                return [wire.ArgumentsDelta(**position, delta=text)]

    def _closed(self, item: Item, status: str) -> list[wire.WireEvent]:
        done = wire.ItemDone(output_index=item.index, item=self._items.written(item, status, item.text))
        if item.kind is ItemKind.CALL:
            return [*self._call_done(item), done]
        part = wire.PartDone(**self._position(item), part=self._items.part(item, item.text))
        return [self._text_done(item), part, done]

    def _text_done(self, item: Item) -> wire.WireEvent:
        if item.kind is ItemKind.REASONING:
            return wire.ReasoningDone(**self._position(item), text=item.text)
        return wire.TextDone(**self._position(item), text=item.text, logprobs=self._items.logprobs_of(item))

    def _call_done(self, item: Item) -> list[wire.WireEvent]:
        position, called = self._position(item), self._items.called(item)
        if called.is_custom:
            rest = self._inputs[item.index].end() if item.index in self._inputs else ""
            done = wire.InputDone(**position, input=custom_input(item.text))
            return [*self._input_delta(item, rest), done]
        return [wire.ArgumentsDone(**position, name=called.name, arguments=item.text)]

    def _input_delta(self, item: Item, text: str) -> list[wire.WireEvent]:
        return [wire.CustomInputDelta(**self._position(item), delta=text)] if text else []

    def _position(self, item: Item) -> dict[str, Any]:
        return {"item_id": self._items.id_of(item), "output_index": item.index}
