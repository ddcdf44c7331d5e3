"""One conversation with a model: the messages so far, and the next response as it is generated."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..data.example import JSON, MEDIUM, Message, Role
from ..data.rows.formats.fields import tools
from ..data.text.templates import with_arguments
from ..data.text.tool_calls import parse_tool_calls, syntax_of
from ..errors import DataError, RecipeError, RunError, SurefootError, TemplateError
from ..generate.generation import FinishReason, Ids, Sample, context_length, room, stream
from ..generate.responses import TextStream, decoder
from ..generate.section import GenerateSection, with_options
from .model_loading import LoadedModel, refuse_scorer

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_TYPED = re.compile(r"""'([^']+)'|"([^"]+)"|((?:\\.|[^\s\\])+)""")


@dataclass(frozen=True)
class Answer:
    """A response, and why it ended: ``stop``: it was complete, or a stop text ended it, ``length``:
    ``max_new_tokens``, ``context``: the context length was reached, ``interrupted``: by Ctrl-C."""

    text: str
    finish_reason: FinishReason | Literal["interrupted"]
    tool_calls: tuple[JSON, ...] = ()  # that the text contains, if the prompt has tools
    broken_calls: tuple[str, ...] = ()  # those that cannot be read
    prompt_ids: Sequence[int] = field(default=(), compare=False)
    # of the response, with those of the stop text that ended it; none if it was interrupted
    ids: Sequence[int] = field(default=(), compare=False)


def answer_of(
    opened: LoadedModel, text: str, reason: FinishReason, tools: Sequence[JSON]
) -> Answer:
    """A response with its calls of ``tools``, read in the syntax of the model's template."""
    syntax = syntax_of(opened.template.source) if opened.template and tools else None
    if syntax is None:
        return Answer(text, reason)
    parsed = parse_tool_calls(text, syntax, tools)
    return Answer(text, reason, parsed.calls, parsed.broken)


def with_thinking(opened: LoadedModel, thinks: bool | None) -> LoadedModel:
    """``opened`` with ``enable_thinking`` as its template's argument; None changes nothing. Raises
    ``TemplateError``: its template has no such argument."""
    if thinks is None:
        return opened
    if opened.template is None:
        raise TemplateError("--thinking: this model has no chat template, so nothing to switch")
    option = "--thinking" if thinks else "--no-thinking"
    if "enable_thinking" not in opened.template.source:
        raise TemplateError(f"{option}: this model's chat template has no argument enable_thinking")
    arguments = {"enable_thinking": thinks}
    source = with_arguments(opened.template.source, arguments, opened.template.name)
    return replace(opened, template=replace(opened.template, source=source))


def finish_reason(sample: Sample, left: int | None) -> FinishReason:
    """Why a response ended; ``left``: tokens of context (None: no limit)."""
    if sample.finish_reason == "stop":
        return "stop"
    return "context" if left is not None and len(sample.ids) >= left else "length"


@dataclass
class Conversation:
    """Messages so far. None is ever dropped, and nothing is added. Without a chat template there is
    no conversation: every text is continued by itself."""

    opened: LoadedModel
    section: GenerateSection
    system: str | None = None
    seed: int | None = None  # makes sampling repeatable
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[JSON] = ()  # schemas of functions that the model may call

    def __post_init__(self) -> None:
        refuse_scorer(self.opened)
        self.set_system(self.system)
        if self.tools and not self.has_template:
            raise TemplateError("this model has no chat template, so it supports no tools")

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self.opened.template is not None

    def clear(self) -> None:
        """Start a new conversation; the system message stays."""
        self.messages.clear()

    def set_system(self, text: str | None) -> None:
        """Set or remove the system message. Raises ``TemplateError`` without a chat template."""
        if text and not self.has_template:
            raise TemplateError("this model has no chat template, so it supports no system message")
        self.system = text or None

    def ask(
        self,
        text: str,
        on_text: Callable[[str], None] | None = None,
        *,
        role: Role = "user",
        media: Sequence[str | bytes | None] = (),
    ) -> Answer:
        """The response to ``text``, passed piece by piece to ``on_text``; of role ``tool``, it is
        the result of a call. ``media`` are the pictures at its marks. Raises ``RunError`` if there
        is no room for a response, and ``text`` is not added; ``TemplateError`` if the template
        rejects it, ``DataError`` if a picture cannot be read."""
        message = replace(self.new_message(role, text), media=tuple(media))
        ids = self._ids(message)
        left = room(self.opened.model, ids)
        if left == 0:
            raise RunError(
                f"no room for a response: with this message the prompt has {len(ids):,} tokens, "
                f"the model's context length is {context_length(self.opened.model):,}"
            )
        answer = self._answer(ids, left, on_text)
        self.messages += [message, self.as_message(answer)]
        return answer

    def retry(self, on_text: Callable[[str], None] | None = None) -> Answer:
        """Another response to the last message, in place of the last one. Raises ``RunError`` if
        there is none yet."""
        if not self.messages:
            raise RunError("there is no response yet to generate again")
        question, before = self.messages[-2], self.messages[-2:]
        del self.messages[-2:]
        try:
            content, role, media = question.content, question.role, question.media
            return self.ask(content, on_text, role=role, media=media)
        except RunError:
            self.messages += before
            raise

    def _ids(self, message: Message) -> Ids:
        if not self.has_template and message.media:
            raise RunError("this model has no chat template, so it supports no pictures")
        if not self.has_template:
            ids = self.opened.continuation(message.content)
            if not ids:
                raise RunError("there is no text to continue")
            return ids
        first = [Message("system", self.system)] if self.system else []
        return self.opened.prompt([*first, *self.messages, message], self.tools)

    def as_message(self, answer: Answer) -> Message:
        """What later prompts contain of a response: its calls as the template writes them."""
        if not answer.tool_calls or self.opened.template is None:
            return Message("assistant", answer.text)
        syntax = syntax_of(self.opened.template.source)
        parsed = parse_tool_calls(answer.text, syntax, self.tools)
        first = sum(len(message.tool_calls) for message in self.messages)
        calls = [{"id": _call_id(i), **call} for i, call in enumerate(parsed.calls, first)]
        return Message("assistant", parsed.text, tuple(calls))

    def new_message(self, role: Role, text: str) -> Message:
        """A message to the model; a tool's result has the id and name of the first call."""
        if role != "tool" or not (self.messages and self.messages[-1].tool_calls):
            return Message(role, text)
        call = self.messages[-1].tool_calls[0]
        return Message(role, text, fields={"tool_call_id": call.get("id"), "name": call["name"]})

    def _answer(self, ids: Ids, left: int | None, on_text: Callable[[str], None] | None) -> Answer:
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

        try:
            sample = stream(
                self.opened.model,
                ids,
                self.section,
                stop_token_ids=self.opened.stop_token_ids,
                decode=decoder(self.opened.tokenizer),
                on_text=show,
                seed=None if self.seed is None else self.seed + len(self.messages),
            )
        except KeyboardInterrupt:
            return Answer("".join(pieces), "interrupted")
        reason = finish_reason(sample, left)
        answer = answer_of(self.opened, "".join(pieces), reason, self.tools)
        return replace(answer, prompt_ids=ids, ids=sample.text_ids)


def with_typed_pictures(text: str) -> tuple[str, list[Path]]:
    """A question with a mark in place of each path in it of a picture that exists, and these paths.
    A path may be quoted, or have its spaces escaped, as terminals write a file that is dropped."""
    found: list[Path] = []

    def marked(match: re.Match[str]) -> str:
        typed = match[1] or match[2] or re.sub(r"\\(.)", r"\1", match[3])
        for name in dict.fromkeys([typed, typed.rstrip(".,;:!?)")]):
            path = Path(name).expanduser()
            if path.suffix.lower() in _PICTURES and path.is_file():
                found.append(path)
                return MEDIUM + typed[len(name) :]
        return match[0]

    return _TYPED.sub(marked, text), found


def _call_id(number: int) -> str:
    """The id of a call: nine letters and digits, as Mistral's templates demand."""
    return f"call{number:05d}"


Event = Mapping[str, object]
NUM_ALTERNATIVES = 5
_ROLES = (("user", "tool"), ("assistant",))  # in turn; a tool gives the result of a call


class _RequestMessage(BaseModel):
    role: Literal["user", "assistant", "tool"]
    content: str


class _Request(BaseModel):
    """A complete conversation, and the settings of its next response that differ."""

    model_config = ConfigDict(strict=True)

    messages: list[_RequestMessage] = Field(min_length=1)
    system: str | None = None
    seed: int | None = None
    tools: Any = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    greedy: bool | None = None
    stop: tuple[str, ...] | None = None


def events(
    conversation: Conversation, line: str, on_event: Callable[[Event], None]
) -> Iterator[Event]:
    """Answer the request in ``line``: pieces go to ``on_event`` as they are generated, the end of
    the answer, or what is wrong, is returned."""
    try:
        request = _parsed(line)
        chat, last = _prepared(conversation, request), request.messages[-1]
        answer = chat.ask(
            last.content, lambda piece: on_event({"event": "piece", "text": piece}), role=last.role
        )
        tokens = token_probabilities(chat.opened, answer)
    except SurefootError as error:
        yield {"event": "error", "message": str(error)}
        return
    yield {
        "event": "answer",
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "tool_calls": list(answer.tool_calls),
        "broken_calls": list(answer.broken_calls),
        "prompt_tokens": len(answer.prompt_ids),
        "tokens": tokens,
    }


@torch.no_grad()
def token_probabilities(opened: LoadedModel, answer: Answer) -> list[dict[str, object]]:
    """Pieces of the response's text, each with the probability of its tokens given all before, and
    the most probable tokens instead of its last one. Sampling settings have no part in it. A stop
    text is not shown."""
    if not answer.ids:
        return []
    device = next(opened.model.parameters()).device
    ids = torch.tensor([[*answer.prompt_ids, *answer.ids]], device=device)
    count = len(answer.ids)
    logits_TV = opened.model(input_ids=ids).logits[0, -count - 1 : -1].float()
    logps_TV = logits_TV.log_softmax(-1)
    top = logps_TV.topk(min(NUM_ALTERNATIVES, logps_TV.shape[-1]))
    decode = decoder(opened.tokenizer)
    text, logp, left = TextStream(decode), 0.0, len(answer.text)
    pieces: list[dict[str, object]] = []
    for place, token in enumerate(answer.ids):
        logp += float(logps_TV[place, token])
        piece = text.push(token) or (text.end() if place == count - 1 else "")
        piece, left = piece[:left], left - len(piece[:left])
        if piece:
            pairs = zip(top.indices[place].tolist(), top.values[place].tolist(), strict=True)
            instead = [[decode([other]), _share(value)] for other, value in pairs]
            pieces.append({"text": piece, "probability": _share(logp), "instead": instead})
            logp = 0.0
    return pieces


def _share(logp: float) -> float | None:
    return round(math.exp(logp), 6) if math.isfinite(logp) else None


def _parsed(line: str) -> _Request:
    """The request. Raises ``RunError``."""
    try:
        request = _Request.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise RunError(f"{where}: {first['msg']}") from None
    for number, message in enumerate(request.messages):
        roles = _ROLES[number % 2]
        if message.role not in roles:
            raise RunError(f"messages.{number}: expected the role {' or '.join(roles)}")
    if request.messages[-1].role == "assistant":
        raise RunError("the last message is not of the user or a tool")
    return request


def _prepared(conversation: Conversation, request: _Request) -> Conversation:
    """The conversation as it is before its last message."""
    try:
        section = with_options(conversation.section, vars(request))
    except ValueError as error:
        raise RecipeError(str(error)) from None
    try:  # a list of schemas, or its text
        schemas = tools({"tools": request.tools}, "tools")
    except DataError as error:
        raise RunError(str(error).replace("column 'tools'", "tools")) from None
    chat = replace(
        conversation,
        section=section,
        system=request.system or None,
        seed=request.seed,
        messages=[],
        tools=schemas or conversation.tools,
    )
    for number, message in enumerate(request.messages):
        if message.role == "tool" and not (chat.messages and chat.messages[-1].tool_calls):
            raise RunError(f"messages.{number}: the response before it calls no tool")
        if message.role == "assistant":  # with the calls of tools that its text has
            earlier = answer_of(chat.opened, message.content, "stop", chat.tools)
            chat.messages.append(chat.as_message(earlier))
        else:
            chat.messages.append(chat.new_message(message.role, message.content))
    del chat.messages[-1]
    return chat
