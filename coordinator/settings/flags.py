"""Command-line flags and YAML files made from config structs: each setting is written once.

A config is a frozen msgspec struct; its fields carry type, bounds, default and :func:`flag`. Structs
nest to any depth, the flags are flat: ``engine.cache.block_size`` is ``--block-size``. Precedence:
command line, then the YAML file of ``--config`` (keys are long flag names), then defaults.
"""

from __future__ import annotations

import argparse
import functools
import os
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from coordinator.settings.command_line import FOREIGN, OneLineParser, TakeOnce, add_foreign, nearest
from coordinator.settings.errors import FlagError
from coordinator.settings.foreign import ForeignError, ForeignFlags
from coordinator.settings.help_topics import HINT

Config = TypeVar("Config", bound=msgspec.Struct)

Size = Annotated[int, Meta(extra={"size": True})]
"""A count that may be written 8k (8000), 8K (8192), 2M, 2G and so on."""
Bytes = Annotated[int, Meta(ge=1, extra={"size": True})]
"""A size of at least one byte."""

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]

UNITS = {name: 1000**power for power, name in enumerate("kmgt", 1)}
UNITS |= {name.upper(): 1024**power for power, name in enumerate("kmgt", 1)}


LARGEST = 2**63 - 1
"""Largest integer that messages between processes can hold."""


def flag(
    *names: str,
    help: str,
    positional: bool = False,
    repeated: bool = False,
    path: bool = False,
    secret: bool = False,
    json: bool = False,
    words: dict[str, int] | None = None,
) -> Meta:
    """Metadata of a config field: further flag names, short ones included, and help text.

    A list takes several values after one flag, or, ``repeated``, one value each time the flag is given. A
    ``path`` may begin with ~. What is ``secret`` is on no command line of ours (:func:`to_argv`). A text of
    ``json`` may be a mapping in a file, and in Python. ``words`` stand for numbers.
    """
    kinds = {"positional": positional, "repeated": repeated, "path": path, "secret": secret, "json": json}
    return Meta(description=help, extra={"names": names, "words": words or {}, **kinds})


class Field(msgspec.Struct, frozen=True):
    """One setting, seen from the command line."""

    path: tuple[str, ...]
    """Field names from the root config down, ``("engine", "cache", "block_size")``."""
    group: str
    """Title of its group of flags."""
    config: str
    """Name of its struct, which is the group's for ``--help=NAME``."""
    names: tuple[str, ...]
    help: str
    positional: bool
    default: Any
    kind: type
    """bool, int, float or str: what one value is parsed as."""
    many: bool
    repeated: bool
    secret: bool
    is_size: bool
    is_path: bool
    is_json: bool
    words: dict[str, int]
    """Words accepted in place of a number, such as ``auto``."""
    choices: tuple[str, ...]

    @property
    def long_name(self) -> str:
        return "--" + self.path[-1].replace("_", "-")

    @property
    def shown(self) -> str:
        """Name of the setting in error messages."""
        return self.key.upper() if self.positional else self.long_name

    @property
    def key(self) -> str:
        """Key of the setting in parsed arguments; also a YAML key."""
        return self.path[-1]

    @property
    def keys(self) -> tuple[str, ...]:
        """Accepted YAML keys of the setting: all long flags, with underscores."""
        others = (name[2:].replace("-", "_") for name in self.names if name.startswith("--"))
        return (self.key, *others)


@functools.cache
def fields_of(config: type[msgspec.Struct]) -> tuple[Field, ...]:
    """All settings of a config, nested structs included; kept, since hints take long to resolve."""
    return tuple(_fields(config, ()))


def _fields(config: type[msgspec.Struct], path: tuple[str, ...]) -> Iterator[Field]:
    hints = typing.get_type_hints(config, include_extras=True)
    group = (config.__doc__ or "").strip().splitlines()[0].rstrip(".")
    for item in msgspec.structs.fields(config):
        hint, metas = _unwrap(hints[item.name])
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from _fields(hint, (*path, item.name))
            continue
        extra: dict[str, Any] = {}
        description = ""
        for meta in metas:
            extra.update(meta.extra or {})
            description = meta.description or description
        kind, many, choices = _value_kind(hint)
        yield Field(
            path=(*path, item.name),
            group=group,
            config=config.__name__,
            names=tuple(extra.get("names", ())),
            help=description,
            positional=bool(extra.get("positional")),
            default=item.default,
            kind=kind,
            many=many,
            repeated=bool(extra.get("repeated")),
            secret=bool(extra.get("secret")),
            is_size=bool(extra.get("size")),
            is_path=bool(extra.get("path")),
            is_json=bool(extra.get("json")),
            words=extra.get("words", {}),
            choices=choices,
        )


def _unwrap(hint: Any) -> tuple[Any, list[Meta]]:
    """The bare type of a hint, and all Metas met on the way.

    Without Annotated and without ``| None``.
    """
    metas: list[Meta] = []
    while True:
        if typing.get_origin(hint) is Annotated:
            metas += [item for item in hint.__metadata__ if isinstance(item, Meta)]
            hint = hint.__origin__
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            (hint,) = [item for item in typing.get_args(hint) if item is not types.NoneType]
        else:
            return hint, metas


def _value_kind(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return str, False, tuple(typing.get_args(hint))
    if origin in (tuple, list):
        return _unwrap(typing.get_args(hint)[0])[0], True, ()
    return hint, False, ()


def parse(
    config: type[Config],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    shares_file: bool = False,
    foreign: ForeignFlags | None = None,
    version: str = "",
) -> Config:
    """Parse a command line into a config.

    Wrong values end the process with exit code 2 and a message. ``shares_file``: a YAML file may hold
    settings of other commands too. ``foreign``: flags that Lockstep does not have; it collects the messages
    about them. ``version``: what --version prints.
    """
    parser = make_parser(config, prog=prog, description=description)
    if version:
        parser.add_argument("--version", action="version", version=version, help="Print the version and end.")
    for other in () if foreign is None else foreign.flags:
        add_foreign(parser, other)
    given = vars(parser.parse_args(list(argv)))
    try:
        for other, value in given.pop(FOREIGN, ()):
            assert foreign is not None
            foreign.take(other, value)
        return from_flat(config, given, shares_file=shares_file, foreign=foreign)
    except (FlagError, ForeignError) as error:
        parser.error(str(error))


def make_parser(config: type[msgspec.Struct], *, prog: str, description: str) -> OneLineParser:
    """Make the parser of a config's flags; its result holds only flags that were given."""
    parser = OneLineParser(
        prog=prog,
        description=description,
        epilog=HINT,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; keys are long flag names.")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in fields_of(config):
        if field.group not in groups:
            groups[field.group] = parser.add_topic(field.config, field.group)
        _add_argument(groups[field.group], field)
        if field.is_json:
            parser.takes_parts(field.long_name, field.names)
    return parser


def _add_argument(group: argparse._ArgumentGroup, field: Field) -> None:
    text = field.help.replace("%", "%%")
    if field.default not in (None, (), ""):
        shown = field.default if field.kind is not bool else "on" if field.default else "off"
        shown = " ".join(map(str, shown)) if field.many else shown
        text += f" (default: {shown})"
    if field.positional:
        number = "*" if field.many else "?"
        group.add_argument(field.key, action=TakeOnce, nargs=number, metavar=field.key.upper(), help=text)
        if not field.many:
            group.add_argument(field.long_name, action=TakeOnce, dest=field.key, help=argparse.SUPPRESS)
    elif field.kind is bool:
        group.add_argument(
            *field.names, field.long_name, dest=field.key, action=argparse.BooleanOptionalAction, help=text
        )
    else:
        group.add_argument(
            *field.names,
            field.long_name,
            dest=field.key,
            help=text,
            choices=field.choices or None,
            nargs="+" if field.many and not field.repeated else None,
            action="append" if field.repeated else "store",
            metavar=None
            if field.choices
            else field.key.upper()
            if field.kind is str
            else field.kind.__name__,
        )


def from_flat(
    config: type[Config],
    given: dict[str, Any],
    *,
    shares_file: bool = False,
    foreign: ForeignFlags | None = None,
) -> Config:
    """Build a config from flat settings, with those of a ``config`` YAML file underneath.

    Raises:
        FlagError: an unknown key, a value of the wrong type or out of bounds, or settings that clash.
        ForeignError: the file has a setting of other systems, with a value that means something.
    """
    given = dict(given)
    file = given.pop("config", None)
    fields = fields_of(config)
    by_key = {field.key: field for field in fields}
    if file is not None:
        # In a file of several commands another name of ours may be a setting of theirs (`model`).
        known = by_key if shares_file else {key: field for field in fields for key in field.keys}
        given = {**_of_file(file, known, shares_file=shares_file, foreign=foreign), **given}
    nested: dict[str, Any] = {}
    for key, value in given.items():
        field = by_key[key]
        _check_text(field, value)
        section = nested
        for part in field.path[:-1]:
            section = section.setdefault(part, {})
        section[key] = _checked(field, value)
    try:
        return msgspec.convert(nested, config, strict=False)
    except msgspec.ValidationError as error:
        raise FlagError(_readable(str(error), by_key)) from error


def _of_file(
    file: str, by_key: dict[str, Field], *, shares_file: bool, foreign: ForeignFlags | None
) -> dict[str, Any]:
    """Settings of a YAML file, by field key."""
    from coordinator.settings.settings_file import read_settings  # takes time, for a file that few have

    def field_of(name: str) -> Field | None:
        return by_key.get(name.replace("-", "_"))

    def is_text(name: str) -> bool:
        field = field_of(name)
        return field is not None and field.kind is str

    shown = [key.replace("_", "-") for key in by_key]
    settings: dict[str, Any] = {}
    for name, value in read_settings(file, is_text).items():
        field = field_of(name)
        if field is not None:
            settings[field.key] = value
        elif foreign is not None and (other := foreign.find(name)) is not None:
            foreign.take(other, value)
        elif not shares_file:
            raise FlagError(f"unknown setting {name!r} in {file}{nearest(name.replace('_', '-'), shown)}")
    return settings


def _check_text(field: Field, value: Any) -> None:
    """Refuse text that is not UTF-8.

    Such bytes of the command line come as lone surrogates, which no message can hold.
    """
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and any("\ud800" <= character <= "\udfff" for character in item):
            raise FlagError(f"{field.shown} must be valid UTF-8, not {item!r}")


def _checked(field: Field, value: Any) -> Any:
    if isinstance(value, str):
        value = field.words.get(value, value)
    if field.is_size and isinstance(value, str):
        value = parse_size(field.shown, value)
    if field.many:
        return _checked_list(field, value)
    if field.is_path and isinstance(value, str):
        return os.path.expanduser(value)
    if field.is_json and isinstance(value, dict):
        return _as_json(field, value)
    if field.kind is str and _is_number(value):
        return str(value)
    if field.choices and value not in field.choices:
        raise FlagError(f"{field.shown} must be one of {', '.join(field.choices)}, not {value!r}")
    if field.kind in (int, float) and isinstance(value, str):
        try:
            value = field.kind(value)
        except ValueError:
            raise FlagError(f"{field.shown} must be a number, not {value!r}") from None
    if _is_number(value) and not -LARGEST <= value <= LARGEST:  # so nan is not, either
        raise FlagError(f"{field.shown} must be a number of at most {LARGEST}, not {value}")
    return value


def _as_json(field: Field, value: dict[Any, Any]) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FlagError(f"{field.shown} must be what JSON can hold: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked_list(field: Field, value: Any) -> Any:
    items = [value] if isinstance(value, str | int | float) else value
    if not isinstance(items, list | tuple):
        return items
    is_word_list = not (field.repeated or field.positional)
    if is_word_list and len(items) == 1 and isinstance(items[0], str) and items[0].startswith("["):
        return _json_list(field, items[0])
    return [str(item) if field.kind is str and _is_number(item) else item for item in items]


def _json_list(field: Field, text: str) -> Any:
    """vLLM writes some lists as one JSON text: ``--allowed-origins '["*"]'``."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise FlagError(f"{field.shown} must be words or a JSON list, not {text!r}") from None


def parse_size(name: str, text: str) -> int:
    """Parse a count with a suffix up to T: 8k is 8000, 8K is 8192.

    Plain numbers as they are.
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in UNITS else (text, "")
    try:
        return int(float(number) * UNITS[unit]) if unit else int(number)
    except (ValueError, OverflowError):
        raise FlagError(f"{name} must be a number like 8192, 8k (8000), 8K or 2G, not {text!r}") from None


def _readable(message: str, by_key: dict[str, Field]) -> str:
    """Validation message of msgspec with the user's flag in place of the field path."""
    text, _, path = message.partition(" - at `$.")
    last = path.rstrip("`").split(".")[-1].split("[")[0]
    about_one_field = text.startswith(("Expected", "Invalid"))
    shown = by_key[last].shown if last in by_key else f"--{last.replace('_', '-')}"
    return f"{shown}: {text}" if last and about_one_field else text


def changed(config: msgspec.Struct) -> Iterator[tuple[Field, Any]]:
    """The settings that differ from their defaults, and their values."""
    for field in fields_of(type(config)):
        value: Any = config
        for part in field.path:
            value = getattr(value, part)
        if value != field.default:
            yield field, value


def to_argv(config: msgspec.Struct) -> list[str]:
    """The flags that make this config again: what differs from the defaults, without the secrets
    (:func:`secrets_of`): everybody on the machine can read a command line."""
    argv: list[str] = []
    for field, value in changed(config):
        if field.secret:
            continue
        if field.kind is bool:
            argv.append(field.long_name if value else field.long_name.replace("--", "--no-", 1))
        elif field.repeated:
            argv += [f"{field.long_name}={item}" for item in value]
        elif field.many:
            argv.append(f"{field.long_name}={msgspec.json.encode(value).decode()}")
        else:
            argv.append(f"{field.long_name}={value}")
    return argv


def secrets_of(config: msgspec.Struct) -> dict[str, Any]:
    """The settings that :func:`to_argv` leaves out, as a file of ``--config`` has them."""
    return {field.key: value for field, value in changed(config) if field.secret}
