"""``lockstep chat``: a conversation with the model of any OpenAI-compatible server, in the terminal."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
from collections.abc import Generator, Iterator
from typing import Annotated, Any

import msgspec

from coordinator.process import process
from coordinator.settings.flags import Count, flag, parse
from router.launcher.endpoint_config import EndpointConfig
from router.tools.api_client import Api, NoApi, ServerError, message_of

Temperature = Annotated[float, msgspec.Meta(ge=0)]

HELP = (
    "/reset forgets the conversation, /system TEXT sets its first line, /exit or Ctrl-D ends, "
    "Ctrl-C stops an answer."
)
GOES_ON = "(/exit or Ctrl-D ends)"
"""Printed for a Ctrl-C after an answer, which does not end the conversation."""


class ChatConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chat."""

    url: Annotated[
        str | None, flag(help="Base URL of the API, with or without /v1; unset: that of --host and --port.")
    ] = None
    endpoint: EndpointConfig = EndpointConfig()
    model_name: Annotated[
        str | None,
        flag("--model", help="Model to use; unset: the first that the server lists. In a file: model-name."),
    ] = None
    system_prompt: Annotated[str | None, flag(help="System prompt at the start of the conversation.")] = None
    quick: Annotated[str | None, flag("-q", help="Send this one message, print the answer and exit.")] = None
    max_tokens: Annotated[Count | None, flag(help="Most tokens of an answer.")] = None
    temperature: Annotated[
        Temperature | None, flag(help="Sampling temperature; unset: the model's default.")
    ] = None
    timeout: Annotated[
        float, msgspec.Meta(gt=0), flag(help="Seconds without any output after which to give up.")
    ] = 120.0


class Conversation:
    """Conversation: its messages so far, and how the next one is sent."""

    def __init__(self, config: ChatConfig) -> None:
        self._config = config
        self._api = Api(config.url, config.endpoint, config.timeout)
        self._system = config.system_prompt
        self._messages: list[dict[str, str]] = []
        self.model = ""
        self.reset()

    @property
    def url(self) -> str:
        """URL at which the API was found."""
        return self._api.url

    def reset(self, system: str | None = None) -> None:
        """Begin again; ``system`` replaces the first line."""
        self._system = system or self._system
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def connect(self) -> None:
        """Find the server's API and the model to talk to.

        Raises:
            ServerError: the server is not there, or does not want us.
        """
        self._api.trust()
        try:
            listed = self._listed()
        except NoApi as error:
            given = self._api.url
            if given.endswith("/v1"):
                raise ServerError(f"there is no API at {given}: {error}; see --url") from error
            self._api.url += "/v1"
            try:
                listed = self._listed()
            except NoApi:
                raise ServerError(f"there is no API at {given} or {self.url}: {error}; see --url") from error
        wanted = self._config.model_name
        if wanted is not None and wanted not in listed:
            raise ServerError(f"the server has no model {wanted!r}; it has {', '.join(listed) or 'none'}")
        if not listed:
            raise ServerError("the server lists no model")
        self.model = wanted or listed[0]

    def _listed(self) -> list[str]:
        with self._api.open("/models") as answer:
            return [entry["id"] for entry in json.load(answer)["data"]]

    def ask(self, text: str) -> Generator[str, None, None]:
        """Send a message; yields the answer as it comes, reasoning first.

        It becomes part of the conversation without that, also what came of it until it was stopped; a
        question that got no answer does not.

        Raises:
            ServerError: there is none.
        """
        question = {"role": "user", "content": text}
        body: dict[str, Any] = {"model": self.model, "messages": [*self._messages, question], "stream": True}
        if self._config.max_tokens is not None:
            body["max_completion_tokens"] = self._config.max_tokens
        if self._config.temperature is not None:
            body["temperature"] = self._config.temperature
        said: list[str] = []
        try:
            with self._api.open("/chat/completions", json.dumps(body).encode()) as answer:
                thinks = False
                for piece, is_content in _pieces(answer):
                    if thinks and is_content:
                        yield "\n\n"
                    thinks = not is_content
                    if is_content:
                        said.append(piece)
                    yield piece
        finally:
            if said:
                self._messages += [question, {"role": "assistant", "content": "".join(said)}]


def _pieces(answer: http.client.HTTPResponse) -> Iterator[tuple[str, bool]]:
    """Text of a stream of chunks, and whether it is content: else it is reasoning."""
    for line in answer:
        data = line.strip().removeprefix(b"data:").strip()
        if not data or not line.startswith(b"data:"):
            continue
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if event.get("error"):
            raise ServerError(message_of(event["error"]) or "the server reports an error")
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if thought := delta.get("reasoning"):
                yield thought, False
            if piece := delta.get("content"):
                yield piece, True
    raise ServerError("the connection broke before the answer ended")


def main(argv: list[str] | None = None) -> int:
    config = parse(
        ChatConfig,
        sys.argv[1:] if argv is None else argv,
        prog="lockstep chat",
        description="Talk to the model of a server that speaks OpenAI's API.",
        shares_file=True,
    )
    conversation = Conversation(config)
    try:
        conversation.connect()
        if config.quick is not None:
            _say(conversation, config.quick)
            return 0
    except ServerError as error:
        print(f"lockstep chat: error: {error}", file=sys.stderr)
        return process.EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history
    if sys.stdin.isatty():
        print(f"{conversation.model} at {conversation.url}. {HELP}")
    return _converse(conversation)


def _converse(conversation: Conversation) -> int:
    """Chat until the end of the input; returns the exit status.

    It is 1 if the last question had no answer and the input is no terminal.
    """
    status = 0
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return status
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                return 130
            print(f"\n{GOES_ON}")
            continue
        command, _, rest = text.partition(" ")
        match command:
            case "":
                continue
            case "/exit" | "/quit":
                return status
            case "/help":
                print(HELP)
            case "/reset":
                conversation.reset()
                print("(forgotten)")
            case "/system" if rest.strip():
                conversation.reset(rest.strip())
                print("(forgotten, with a new first line)")
            case _ if command.startswith("/"):
                print(f"there is no command {command}. {HELP}", file=sys.stderr)
            case _:
                status = _try_to_say(conversation, text)


def _try_to_say(conversation: Conversation, text: str) -> int:
    try:
        _say(conversation, text)
    except KeyboardInterrupt:
        print("\n(stopped)")
    except ServerError as error:
        print(f"\nlockstep chat: error: {error}", file=sys.stderr)
        return process.EXIT_FAILED
    return 0


def _say(conversation: Conversation, text: str) -> None:
    pieces = conversation.ask(text)
    with contextlib.closing(pieces):
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    sys.exit(main())
