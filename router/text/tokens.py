"""Text to token ids and back, for whole texts and for streams of tokens.

The ``tokenizers`` package reads the model's tokenizer.json, so neither torch nor transformers is loaded here.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.processors import TemplateProcessing

from engine.model.tokenizer_files import TOKENIZER, TokenizerFilesError, tokenizer_directory

PRIMING = 6
"""Tokens of the prompt's tail that the first token is decoded with.

Without them some decoders strip a leading space.
"""
MOST_BYTES = 4
"""Most bytes of a character in UTF-8, and so most tokens."""
REPLACEMENT = "\ufffd"
"""Stands for bytes that are no character, or not yet."""
MAX_PENDING = 16
"""Tokens without any text after which a stream starts afresh.

The cost of decoding is quadratic in their number.
"""

PART_CHARACTERS = 8
"""Characters of text per token, in the first part tried.

Another part is four times as long.
"""
CUT_TOKENS = 64
"""Tokens next to a text's cut, which may differ from those of the whole."""

CUT_CHARACTERS = 4096
"""Characters within which a space is searched for to cut a text at."""

MOST_COMPOSED = 4
"""Most characters that NFC composes into one (three, but for rare Greek)."""

NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A directory without a usable tokenizer. The message suggests what to do."""


class Tokenizer:
    """Tokenizer of one model, safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], digest: str = "") -> None:
        self.backend = backend
        self.config = config
        self.digest = digest
        """Digest of its files, without the chat template."""
        self.special_tokens = _named_special_tokens(config)
        self.eos_id: int | None = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        """End-of-sequence token of tokenizer_config.json; a model may have others beside it."""
        backend.no_truncation()
        backend.no_padding()
        self._add_boundaries()
        added = backend.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self._special = {token.content: id for id, token in added.items() if token.special}
        self._piece_bytes = _piece_decoder(backend)
        self._most_characters = _most_characters_per_token(backend)
        self._bytes_of: dict[int, bytes] = {}
        self._is_byte_level = _decoder_kinds(backend) == {"ByteLevel"}
        self._special_ids = frozenset(self._special.values())
        self._whole_texts = WholeTexts(self._stream_bytes, frozenset())
        self._shown_texts = WholeTexts(self._stream_bytes, self._special_ids)

    def __repr__(self) -> str:
        return f"<Tokenizer with {self.size} tokens>"

    @property
    def size(self) -> int:
        """Number of known tokens; the model's vocabulary is often padded beyond."""
        return int(self.backend.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text.

        Frees the GIL while it works (``encode`` of the backend would not).
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """:meth:`encode` of several, at once."""
        found = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [each.ids for each in found]

    def encode_part(self, text: str, count: int, *, from_end: bool, add_special_tokens: bool) -> list[int]:
        """:meth:`encode`, of as much of the text as its last (or first) ``count`` tokens need.

        A text with no more tokens is encoded whole.
        """
        length = PART_CHARACTERS * (count + CUT_TOKENS)
        while length < len(text):
            part = _end_of(text, length) if from_end else _beginning_of(text, length)
            ids = self.encode(part, add_special_tokens=add_special_tokens)
            if len(ids) >= count + CUT_TOKENS:
                return ids
            length *= 4
        return self.encode(text, add_special_tokens=add_special_tokens)

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """:meth:`encode`, and where in the text each token begins.

        Tokens that are added to it have no length there; blanks that a tokenizer counts to none of two tokens
        go with the second.
        """
        (found,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets: list[int] = []
        end = 0
        for (begin, next_end), is_added in zip(found.offsets, found.special_tokens_mask, strict=True):
            offsets.append(end if is_added else min(begin, end))
            end = max(end, next_end)
        return found.ids, offsets

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def detokenizer(self, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """The detokenizer of a stream of tokens that follows a prompt."""
        if self._is_byte_level:
            texts = self._shown_texts if skip_special_tokens else self._whole_texts
            return ByteDetokenizer(texts, prompt_ids)
        return DecodingDetokenizer(self, prompt_ids, skip_special_tokens=skip_special_tokens)

    def _stream_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to a stream.

        Added tokens, too, are spelled in the letters for bytes.
        """
        piece = self.backend.id_to_token(token_id)
        return b"" if piece is None else self._piece_bytes(piece, token_id)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, at no cost.

        0 where the length of the longest token gives no bound.
        """
        return 0 if self._most_characters is None else len(text) // self._most_characters

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for, possibly a part of a character.

        Empty for ids without a token.
        """
        found = self._bytes_of.get(token_id)
        if found is None:
            found = self._bytes_of[token_id] = self._look_up_bytes(token_id)
        return found

    def is_special(self, text: str) -> bool:
        """Whether a text is a token that ``skip_special_tokens`` hides."""
        return text in self._special

    def special_id(self, text: str) -> int | None:
        """The token that a text is, if it is one that ``skip_special_tokens`` hides."""
        return self._special.get(text)

    @property
    def special_contents(self) -> Collection[str]:
        """Texts of all tokens that ``skip_special_tokens`` hides."""
        return self._special.keys()

    def token_text(self, token_id: int) -> str:
        """A token alone as text; U+FFFD stands for what is no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def piece(self, token_id: int) -> str:
        """A token as the vocabulary spells it; empty for ids without a token."""
        return self.backend.id_to_token(token_id) or ""

    def _look_up_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        return self._piece_bytes(piece, token_id)

    def _add_boundaries(self) -> None:
        """Add BOS and EOS as tokenizer_config.json asks, which has precedence over tokenizer.json."""
        if not {"add_bos_token", "add_eos_token"} & self.config.keys():
            return
        first, last = (self._boundary("bos"), self._boundary("eos"))
        single = " ".join([*first, "$A", *last])
        ids = {token: self.backend.token_to_id(token) for token in {*first, *last}}
        self.backend.post_processor = TemplateProcessing(single=single, special_tokens=list(ids.items()))

    def _boundary(self, name: str) -> list[str]:
        token = self.special_tokens.get(f"{name}_token")
        if token is None or not self.config.get(f"add_{name}_token"):
            return []
        return [token] if self.backend.token_to_id(token) is not None else []


def _end_of(text: str, length: int) -> str:
    """End of a text: at least its last ``length`` characters.

    The cut is before a space (as tokenizers do) if one is near.
    """
    cut = len(text) - length
    space = text.rfind(" ", max(0, cut - CUT_CHARACTERS), cut + 1)
    return text[cut if space < 0 else space :]


def _beginning_of(text: str, length: int) -> str:
    """Beginning of a text: at least ``length`` characters, cut before a near space."""
    space = text.find(" ", length, length + CUT_CHARACTERS)
    return text[: length if space < 0 else space]


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read tokenizer.json and tokenizer_config.json; other forms are converted first.

    Raises:
        TokenizerError: a file is missing or broken.
    """
    try:
        directory = tokenizer_directory(directory)
    except TokenizerFilesError as error:
        raise TokenizerError(str(error)) from error
    path = directory / TOKENIZER
    try:
        content = path.read_bytes()
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises nothing more special
        raise TokenizerError(
            f"{path} cannot be used ({error}): get it again, or name another directory with --tokenizer"
        ) from error
    config = read_tokenizer_config(directory)
    plain = {key: value for key, value in config.items() if key != "chat_template"}
    return Tokenizer(backend, config, short_digest(content + json.dumps(plain, sort_keys=True).encode()))


def short_digest(content: bytes) -> str:
    """Sixteen hexadecimal digits of a digest, for comparison and for people."""
    return hashlib.sha256(content).hexdigest()[:16]


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Content of tokenizer_config.json, empty if there is no such file.

    Raises:
        TokenizerError: it is no JSON object.
    """
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return config


NONE_KNOWN: Mapping[int, bytes] = {}


class Detokenizer(Protocol):
    """Text of one stream of tokens: a character is returned once it is whole."""

    json_texts: Mapping[int, bytes]
    """Texts that :meth:`step` would return now, as JSON, by token.

    :meth:`step` need not be called for these tokens.
    """

    def step(self, token_id: int) -> str:
        """Text that the next token makes certain."""
        ...

    def flush(self) -> str:
        """End the stream; returns pending text, with U+FFFD for what is no character."""
        ...


class ByteDetokenizer:
    """Detokenizer for vocabularies of bytes, whose text is that of all bytes in a row.

    Nothing is decoded twice, and a token of whole characters costs a look into a table.
    """

    def __init__(self, whole_texts: WholeTexts, prompt_ids: Sequence[int] = ()) -> None:
        """``whole_texts``: shared by all streams that hide the same tokens."""
        self._whole_texts = whole_texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(whole_texts.last_bytes(prompt_ids))
        self._is_open = bool(self._decoder.getstate()[0])
        """Whether the last token ended within a character."""
        self._began_in_prompt = self._is_open
        """Whether that character began in the prompt, which makes it no text of the stream."""
        self.json_texts: Mapping[int, bytes] = NONE_KNOWN if self._is_open else whole_texts.json

    def __repr__(self) -> str:
        return f"<ByteDetokenizer{' within a character' * self._is_open}>"

    def step(self, token_id: int) -> str:
        """See :class:`Detokenizer`."""
        if token_id in self._whole_texts.hidden:
            return ""
        if not self._is_open:
            text = self._whole_texts.of(token_id)
            if text is not None:
                return text
        text = self._decoder.decode(self._whole_texts.bytes_of(token_id))
        self._set_open(bool(self._decoder.getstate()[0]))
        return self._without_prompts(text)

    def flush(self) -> str:
        """See :class:`Detokenizer`."""
        self._set_open(False)
        return self._without_prompts(self._decoder.decode(b"", final=True))

    def _without_prompts(self, text: str) -> str:
        if not (text and self._began_in_prompt):
            return text
        self._began_in_prompt = False
        return text.removeprefix(REPLACEMENT)

    def _set_open(self, is_open: bool) -> None:
        self._is_open = is_open
        self.json_texts = NONE_KNOWN if is_open else self._whole_texts.json


class WholeTexts:
    """Tokens of a vocabulary of bytes that are whole characters, found one by one."""

    def __init__(self, bytes_of: Callable[[int], bytes], hidden: Collection[int]) -> None:
        """``hidden``: tokens that have no text."""
        self.bytes_of = bytes_of
        self.hidden = hidden
        self._texts: dict[int, str] = {}
        self.json: dict[int, bytes] = {}
        """The same texts as JSON, but for empty ones."""

    def __repr__(self) -> str:
        return f"<WholeTexts of {len(self._texts)} tokens>"

    def of(self, token_id: int) -> str | None:
        """Text of a token that is not hidden; None for a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            with contextlib.suppress(UnicodeDecodeError):
                text = self._texts[token_id] = self.bytes_of(token_id).decode()
                if text:
                    self.json[token_id] = msgspec.json.encode(text)
        return text

    def last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The last bytes of these tokens, with all of a character that they leave unfinished."""
        found = b""
        for token_id in reversed(token_ids[-MAX_PENDING:]):
            if token_id in self.hidden:
                continue
            if self.of(token_id) or len(found) >= MOST_BYTES:
                break
            found = self.bytes_of(token_id) + found
        return found[1 - MOST_BYTES :]


class DecodingDetokenizer:
    """Detokenizer for any tokenizer: decodes the last tokens together with the next one."""

    json_texts = NONE_KNOWN

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend
        self._skip = skip_special_tokens
        self._context, unfinished = self._split(prompt_ids)
        """Tokens of the last text returned, which the next ones are decoded with."""
        self._pending: list[int] = []
        """Tokens after those, whose text has not been returned."""
        self._of_prompt = ""
        """Text of the prompt's tokens among them, which is no text of the stream."""
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip)
        for token_id in unfinished:
            self.step(token_id)
        self._of_prompt = self._decode(self._pending)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {len(self._pending)} tokens pending>"

    def step(self, token_id: int) -> str:
        """See :class:`Detokenizer`."""
        try:
            text: str | None = self._stream.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 (is bare: what came before reads differently now)
            self._pending.append(token_id)
            return self._start_afresh()
        self._pending.append(token_id)
        if text is None:
            return "" if len(self._pending) < MAX_PENDING else self._start_afresh()
        self._context, self._pending = self._pending, []
        return self._without_prompts(text)

    def flush(self) -> str:
        """See :class:`Detokenizer`."""
        if not self._pending:
            return ""
        before, after = self._decode(self._context), self._decode(self._context + self._pending)
        if not after.startswith(before):
            before, after = "", self._decode(self._pending)
        self._pending = []
        return self._without_prompts(after[len(before) :])

    def _start_afresh(self) -> str:
        text = self.flush()
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip)
        return text

    def _without_prompts(self, text: str) -> str:
        of_prompt, self._of_prompt = self._of_prompt, ""
        return text.removeprefix(of_prompt)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _split(self, prompt_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The prompt's last tokens of whole characters, and those of an unfinished one behind them.

        A row of tokens for bytes is text only if it begins with a character's first byte.
        """
        for end in range(len(prompt_ids), max(0, len(prompt_ids) - MOST_BYTES), -1):
            for begin in range(end - PRIMING, end - PRIMING - MOST_BYTES, -1):
                whole = list(prompt_ids[max(0, begin) : end])
                if not self._decode(whole).endswith(REPLACEMENT):
                    return whole, list(prompt_ids[end:])
        return [], list(prompt_ids[-PRIMING:])


def _named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, each a string or an object with ``content``."""
    found = {}
    for name in NAMED_SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _piece_decoder(backend: tokenizers.Tokenizer) -> Callable[[str, int], bytes]:
    """Function that gives the bytes of a vocabulary entry by piece and id."""
    kinds = _decoder_kinds(backend)
    if "ByteLevel" in kinds:
        byte_of = _byte_level_alphabet()

        def byte_level(piece: str, _id: int) -> bytes:
            if all(character in byte_of for character in piece):
                return bytes(byte_of[character] for character in piece)
            return piece.encode()

        return byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:

        def sentence_piece(piece: str, _id: int) -> bytes:
            match = BYTE_PIECE.fullmatch(piece)
            return bytes.fromhex(match[1]) if match else piece.replace("▁", " ").encode()

        return sentence_piece

    def alone(_piece: str, id: int) -> bytes:
        return str(backend.decode([id], skip_special_tokens=False)).encode()

    return alone


def _most_characters_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Most characters of a text per token; None without such a bound.

    There is none where characters are dropped, unknown ones are fused, or spaces around a token belong to it.
    """
    normalizer = backend.normalizer
    kind = None if normalizer is None else json.loads(normalizer.__getstate__())["type"]
    added = backend.get_added_tokens_decoder().values()
    if "ByteLevel" not in _decoder_kinds(backend) or kind not in (None, "NFC"):
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    longest = max(map(len, backend.get_vocab()), default=1)
    return longest if kind is None else longest * MOST_COMPOSED


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes.

    Printable Latin-1 stands for itself; the other bytes are U+0100 and up, in order.
    """
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + n): byte for n, byte in enumerate(rest)}
