"""A conversation as a list of turns: each an object with a role and a content.

Function calls are read in two forms: a turn of its own whose content is the call as JSON
(ShareGPT), and ``tool_calls`` beside the content of an assistant turn (OpenAI).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ....errors import DataError, did_you_mean
from ...example import JSON, MEDIUM, THOUGHT_KEYS, Example, Message, Role
from ._picture_sources import refuse_sizes, source_of, with_pictures
from .fields import (
    EMPTY,
    Row,
    as_text,
    from_json,
    label,
    mark_unread,
    missing,
    shown,
    structure,
    text,
    tools,
    truth,
)

THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
WRAPPED_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OF_SHAREGPT = ("human", "gpt", "function_call", "observation")
_CURE = 'write "weight": 0 to mask a turn, "weight": 1 to train on it'
MEDIA = ("images", "videos", "audios", "image", "video", "audio")
PICTURE_PARTS = ("image", "image_url", "input_image")  # types of OpenAI's parts and transformers'
_SOURCES = ("image_url", "image", "url", "path", "base64")
# Keys of a turn that have a place of their own in a message.
_READ = ("role", "content", "tool_calls", "function_call", *MEDIA, *THOUGHT_KEYS)
# Names that speak of what is trained on, as isTrainable does; "constrain", "glossary" and "learner"
# do not.
LEARNING = re.compile(
    r"(?<![sS])train|Train|TRAIN|(?<![bBgGfF])loss|Loss|LOSS|[mM]ask|MASK|[wW]eight|WEIGHT|"
    r"[lL]earn(?!er|ing)|LEARN"
)
# Of these, without "_" and capitals, the ones that other trainers read: 1 trains on a turn ...
_TRAINS = re.compile(
    r"(?:is|step|turn)?(?:weight|loss|(?:loss|train|training)(?:mask|weight|scale)|"
    r"train|training|trainable|learn|learnable)s?"
)
_MASKS = re.compile(r"(?:is)?mask(?:ed)?")  # ... or masks it


def trains(key: str, value: object) -> bool | None:
    """Whether a flag says to train on a turn; None if it is no flag, or has no obvious meaning."""
    name, flag = re.sub(r"[^a-z]", "", key.lower()), truth(value)
    if flag is None or _TRAINS.fullmatch(name):
        return flag
    # A mask of 0 and 1 means one thing to one trainer, and the opposite to another.
    is_clear = name != "mask" or str(value).lower() in ("true", "false")
    return not flag if _MASKS.fullmatch(name) and is_clear else None


@dataclass(frozen=True, slots=True)
class Turns:
    """A dataset's keys of role and content, and its names of the roles."""

    role: str
    content: str
    roles: Mapping[str, Role]
    function: str  # the role of a turn that is a function call

    def of(self, row: Row, column: str | None) -> tuple[Message, ...]:
        """The conversation in a column."""
        value = structure(row, column)
        if value is None:
            raise missing(row, column)
        if not isinstance(value, list) or not value:
            raise DataError(f"column {column!r}: expected a list of turns, got {shown(value)}")
        return tuple(self.message(turn, f"turn {i}", row) for i, turn in enumerate(value, 1))

    def answer(self, row: Row, column: str | None) -> Message:
        """The chosen or rejected response in a column: a turn, a list of one turn, or its text."""
        value = row.get(column) if column else None
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if value is None:
            raise missing(row, column)
        where = f"column {column!r}"
        if isinstance(value, str):
            return Message("assistant", as_text(value, where))
        message = self.message(value, where, row)
        if message.role != "assistant":
            raise DataError(f"{where}: expected a response, got a turn of the {message.role}")
        return message

    def message(self, turn: object, where: str, row: Row) -> Message:
        """One turn of ``row``; as an object, or as the JSON text of one."""
        if isinstance(turn, str) and turn.lstrip().startswith("{"):
            turn = from_json(turn, where)
        if not isinstance(turn, Mapping):
            raise DataError(f"{where}: expected an object, got {shown(turn)}")
        role, content = turn.get(self.role), turn.get(self.content)
        learn = _learn(turn, where, (self.role, self.content))
        for key in MEDIA:
            if turn.get(key) not in EMPTY:
                raise DataError(
                    f"{where}: {key!r} is not read; pictures are parts of the content, or in a "
                    "column 'images' of the row"
                )
        if role == self.function:
            words, calls = _written_calls(as_text(content, where), where, row)
            return Message("assistant", words, calls, learn, fields=self._fields(turn))
        standard_role = self.roles.get(role) if isinstance(role, str) else None
        if standard_role is None:
            raise self._unknown_role(turn, where)
        calls = _listed_calls(turn.get("tool_calls") or turn.get("function_call"), where, row)
        thought = _thought(turn, standard_role, where)
        if calls and standard_role != "assistant":
            raise DataError(f"{where}: 'tool_calls' in a turn of the {standard_role}")
        if content is None and calls:
            return Message(standard_role, "", calls, learn, thought, self._fields(turn))
        if self.content not in turn:
            raise DataError(f"{where}: no key {self.content!r} (keys found: {', '.join(turn)})")
        words, media = _content(content, f"{where}: {self.content!r}", row)
        if media and standard_role == "assistant":
            raise DataError(f"{where}: a picture in an answer, which no model writes here")
        return Message(standard_role, words, calls, learn, thought, self._fields(turn), media)

    def _fields(self, turn: Row) -> JSON:
        """Keys that a chat template may read, such as ``name`` and ``tool_call_id``."""
        read = {self.role, self.content, *_READ}
        others = {key: value for key, value in turn.items() if key not in read}
        return {k: v for k, v in others.items() if v is not None and not LEARNING.search(k)}

    def _unknown_role(self, turn: Row, where: str) -> DataError:
        if self.role not in turn:
            return DataError(f"{where}: no key {self.role!r} (keys found: {', '.join(turn)})")
        role_names = dict.fromkeys([*self.roles, self.function])
        role = turn[self.role]
        if role in _OF_SHAREGPT:
            tags = f"tags: {{role_tag: {self.role}, content_tag: {self.content}}}"
            raise DataError(
                f"{where}: unknown role {role!r}, which is ShareGPT's; write into the entry of the "
                f"dataset: formatting: sharegpt, columns: {{messages: COLUMN}}, {tags}"
            )
        hint = did_you_mean(str(role), role_names) or f" (expected one of {', '.join(role_names)})"
        cure = f'; name one of yours in the entry: "tags": {{"user_tag": "{role}"}}'
        return DataError(f"{where}: unknown role {role!r}{hint}{cure}")


@dataclass(frozen=True, kw_only=True)
class TurnFormat:
    """The columns of a format whose rows contain turns, and the keys and roles in a turn."""

    main: ClassVar[str] = "messages"
    more_roles: ClassVar[Mapping[str, Role]] = {}  # further names of roles

    messages: str | None = "messages"
    """The turns."""
    system: str | None = "system"
    """The system message, if it is not the first turn."""
    tools: str | None = "tools"
    """Functions the model may call: a list of schemas, or the same as a JSON string."""
    images: str | None = "images"
    """Pictures, in the order of the marks ``<image>`` in the turns: paths, data URLs or bytes."""
    chosen: str | None = "chosen"
    """The chosen response, with ``ranking``: a turn or its text."""
    rejected: str | None = "rejected"
    """The rejected response, with ``ranking``: a turn or its text."""
    kto_tag: str | None = None
    """Whether the last response is desirable, true or false."""
    role_tag: str = "role"
    """Key of a turn's role."""
    content_tag: str = "content"
    """Key of a turn's content."""
    user_tag: str = "user"
    """Role of the user."""
    assistant_tag: str = "assistant"
    """Role of the model."""
    observation_tag: str = "tool"
    """Role of a function's result."""
    function_tag: str = "function_call"
    """Role of a function call as a turn of its own: JSON with name and arguments, or a list."""
    system_tag: str = "system"
    """Role of the system message."""
    ranking: bool = False
    """Each row has a chosen and a rejected last response."""

    def read(self, row: Row) -> Example:
        """The row's conversation; raises DataError with the reason if it has none."""
        roles: dict[str, Role] = {
            self.user_tag: "user",
            self.assistant_tag: "assistant",
            self.observation_tag: "tool",
            self.system_tag: "system",
        }
        roles |= {name: role for name, role in self.more_roles.items() if name not in roles}
        turns = Turns(self.role_tag, self.content_tag, roles, self.function_tag)
        return Example(
            with_pictures(
                with_system(text(row, self.system), turns.of(row, self.messages)), row, self.images
            ),
            tools(row, self.tools),
            chosen=turns.answer(row, self.chosen) if self.ranking else None,
            rejected=turns.answer(row, self.rejected) if self.ranking else None,
            label=label(row, self.kto_tag),
        )


def with_system(system: str | None, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation with the system message of its own column in front."""
    if not system:
        return messages
    if messages[0].role != "system":
        return (Message("system", system), *messages)
    if messages[0].content != system:
        raise DataError(
            "the system column and the first turn contain two different system messages; "
            'switch the column off with "columns": {"system": null}'
        )
    return messages


def _learn(turn: Row, where: str, read: Collection[str] = ()) -> bool | None:
    """Whether to train on this turn, by its keys that say so, such as ``weight`` of OpenAI's files.
    Raises ``DataError``: one has no obvious meaning, or two have different ones."""
    flags = {
        key: value
        for key, value in turn.items()
        if key not in read and value not in EMPTY and LEARNING.search(key)
    }
    for key, value in flags.items():
        if trains(key, value) is None:
            raise DataError(f"{where}: {key!r}: {shown(value)} is not read; {_CURE}")
    decisions = {trains(key, value) for key, value in flags.items()}
    if len(decisions) > 1:
        raise DataError(f"{where}: {' and '.join(map(repr, flags))} contradict each other; {_CURE}")
    return decisions.pop() if decisions else None


def _thought(turn: Row, role: Role, where: str) -> str:
    """The thought of a response, under one of its usual keys."""
    keys = [key for key in THOUGHT_KEYS if turn.get(key) not in (None, "")]
    if not keys:
        return ""
    if role != "assistant":
        raise DataError(f"{where}: {keys[0]!r} in a turn of the {role}")
    texts = {as_text(turn[key], f"{where}: {key!r}") for key in keys}
    if len(texts) > 1:
        raise DataError(f"{where}: {keys[0]!r} and {keys[1]!r} are different thoughts")
    return texts.pop()


def _content(value: object, where: str, row: Row) -> tuple[str, tuple[str | bytes | None, ...]]:
    """Text, or a list of parts, concatenated, and the pictures that stand in it."""
    if not isinstance(value, list):
        return as_text(value, where), ()
    words, media = list[str](), list[str | bytes | None]()
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", *PICTURE_PARTS):
            raise DataError(
                f"{where}: only parts with text or a picture are supported, got {shown(part)}"
            )
        if _learn(part, where) is not None:
            raise DataError(f"{where}: a turn is trained on as a whole, got {shown(part)}; {_CURE}")
        if kind == "text":
            keys = [key for key in ("text", "value") if part.get(key) is not None]
            if not keys:
                raise DataError(f"{where}: a text part without 'text', got {shown(part)}")
            words.append(as_text(part[keys[0]], where))
        else:
            keys = [key for key in _SOURCES if part.get(key) is not None]
            if len(keys) > 1 and part[keys[0]] != part[keys[1]]:
                raise DataError(f"{where}: {keys[0]!r} and {keys[1]!r} are two pictures in a part")
            media.append(source_of(part[keys[0]], where, row) if keys else None)
            words.append(MEDIUM)
            refuse_sizes(part, where)
        mark_unread(row, part, ("type", *keys), "a part")
    return "".join(words), tuple(media)


def _written_calls(content: str, where: str, row: Row) -> tuple[str, tuple[JSON, ...]]:
    """The calls written as JSON in a turn of their own, and the thought before them, if any."""
    thought = THOUGHT.match(content)
    words = thought[0] if thought else ""
    body = content[len(words) :]
    bodies = WRAPPED_CALL.findall(body) or [body]
    calls = [call for text in bodies for call in _as_list(from_json(text, where))]
    if not calls:
        raise DataError(f"{where}: expected a function call, got {shown(content)}")
    return words, tuple(_call(call, where, row) for call in calls)


def _listed_calls(value: object, where: str, row: Row) -> tuple[JSON, ...]:
    """The calls of an OpenAI message."""
    value = from_json(value, where) if isinstance(value, str) and value else value
    return tuple(_call(call, where, row) for call in _as_list(value or []))


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


class WrittenArguments(dict[str, object]):
    """Arguments of a call that the row has as JSON text, and that text."""

    text: str


def _call(value: object, where: str, row: Row) -> JSON:
    """``{"name", "arguments"}`` with the arguments as an object, however they were given."""
    call = value.get("function") or value if isinstance(value, Mapping) else value
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise DataError(f"{where}: expected a call with name and arguments, got {shown(value)}")
    arguments = written = call.get("arguments")
    if isinstance(arguments, str):
        arguments = from_json(arguments, f"{where}: arguments") if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: expected arguments as an object, got {shown(arguments)}")
    if isinstance(written, str):
        arguments = WrittenArguments(arguments)
        arguments.text = written
    if _learn(call, where) is not None:
        raise DataError(f"{where}: a turn is trained on as a whole, got {shown(call)}; {_CURE}")
    more = dict(value) if isinstance(value, Mapping) else {}  # such as the call's id
    if call is not value:
        mark_unread(row, call, ("name", "arguments"), "a function")
    if more.get("type") == "function":
        del more["type"]
    extras = {key: extra for key, extra in more.items() if key != "function" and extra is not None}
    return {**extras, "name": call["name"], "arguments": arguments}


@dataclass(frozen=True, kw_only=True)
class OpenAI(TurnFormat):
    """``{"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}], "tools"}``."""

    more_roles: ClassVar[Mapping[str, Role]] = {"developer": "system", "function": "tool"}

    observation_tag: str = "tool"
    """Role of a function's result; ``function``, its older name, is read too."""
    system_tag: str = "system"
    """Role of the system message; ``developer``, its newer name, is read too."""


@dataclass(frozen=True, kw_only=True)
class ShareGPT(TurnFormat):
    """``{"conversations": [{"from": "human", "value": ...}, ...], "system", "tools"}``."""

    more_roles: ClassVar[Mapping[str, Role]] = {
        "user": "user",
        "assistant": "assistant",
        "tool": "tool",
    }

    messages: str | None = "conversations"
    """The turns."""
    role_tag: str = "from"
    """Key of a turn's role."""
    content_tag: str = "value"
    """Key of a turn's content."""
    user_tag: str = "human"
    """Role of the user."""
    assistant_tag: str = "gpt"
    """Role of the model."""
    observation_tag: str = "observation"
    """Role of a function's result; OpenAI's names of the roles are read too."""
