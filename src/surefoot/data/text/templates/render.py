"""Messages to text, through the same Jinja environment as ``tokenizer.apply_chat_template``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import cached_property, lru_cache
from inspect import signature
from itertools import repeat
from typing import cast

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from ....errors import TemplateError
from ....log import fell_back
from ...example import JSON, MEDIUM, THOUGHT_KEYS, Dicts, Message, Spans

Words = tuple[str, str]  # before and after a thought
USUAL: Words = ("<think>\n", "\n</think>\n\n")
Probe = Mapping[str, list[dict[str, object]]]  # "messages", "tools"

_SHOWN = 20  # characters of a message that are looked for in its text
_MANY = 40  # messages, of which short ones, that may stand in another one, are not counted
_PLAIN = frozenset((str, int, float, bool, type(None)))
_PARAMETERS = signature(render_jinja_template).parameters  # of which a template may have none
_THOUGHTS = frozenset(THOUGHT_KEYS)  # which transformers gives a template by other names, too
_WORD = re.compile(r"\w+")
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number", "description": "first"}},
            "required": ["a"],
        },
    },
}
_TURNS: list[dict[str, object]] = [
    {"role": "user", "content": "Question one"},
    {"role": "assistant", "content": "Answer one"},
    {"role": "user", "content": "Question two"},
]
_CALL_TURNS: list[dict[str, object]] = [
    _TURNS[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00000",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 1}},
            }
        ],
    },
    {"role": "tool", "content": "1", "tool_call_id": "call00000", "name": "add"},
]
_WITH_TOOLS: Mapping[str, list[dict[str, object]]] = {"messages": _CALL_TURNS, "tools": [_TOOL]}
_SYSTEM: dict[str, object] = {"role": "system", "content": "Instruction"}
# A server keeps what it has tried of the keys of its clients; further ones are taken as read.
_MOST_TRIED, _LONGEST_KEY = 4096, 200
# Conversations that show how a template treats the common cases.
PROBES: Mapping[str, Probe] = {
    "a question": {"messages": _TURNS[:1]},
    "several turns": {"messages": _TURNS},
    "a system message": {"messages": [_SYSTEM, *_TURNS]},
    "tools": {"messages": _TURNS[:1], "tools": [_TOOL]},
}


class Renderer:
    """One template, with the tokenizer's names for the special tokens.

    It runs in Jinja's sandbox as transformers sets that up, which bounds neither time nor memory.
    """

    def __init__(
        self, source: str, tokenizer: PreTrainedTokenizerBase, *, picture: str | None = None
    ) -> None:
        """``picture``: the placeholder of one, where a content has ``MEDIUM``; None if the model
        reads text alone."""
        self.source = source
        self._picture = picture
        self.thoughts_field = field_of(source)
        self.has_marks = _MARK.search(source) is not None
        self._words = frozenset(_WORD.findall(source))
        self._written: dict[tuple[str, str], bool] = {}  # see ``writes``
        names = dict(tokenizer.special_tokens_map)
        self._names: dict[str, object] = {**names}
        self._has_plain_names = _are_plain_names(self._names)
        added = tokenizer.added_tokens_decoder.values()
        self._special = {token.content for token in added if token.special}
        self._added = self._special | {t.content for t in added if _is_markup(t.content)}

    def with_arguments(self, arguments: JSON) -> Renderer:
        """The same template with further arguments."""
        renderer = copy(self)
        renderer._names = {**self._names, **arguments}
        renderer._has_plain_names = _are_plain_names(renderer._names)
        return renderer

    def render(self, messages: Dicts, tools: Dicts | None = None, *, prompt: bool = False) -> str:
        """The text of a conversation; with ``prompt``, up to the beginning of the next response.
        Raises ``TemplateError``: the template rejects the conversation."""
        return self._render(messages, tools, prompt=prompt)[0]

    def render_marked(self, messages: Dicts, tools: Dicts | None = None) -> tuple[str, Spans]:
        """The text of a conversation, and the bounds of its ``{% generation %}`` blocks."""
        return self._render(messages, tools, marks=True)

    def check_written(self, messages: Dicts, tools: Dicts | None, text: str) -> None:
        """Raise ``TemplateError`` if ``text``, the rendered ``messages``, lacks one of them: most
        templates do not write a second system message. Of an assistant's turn with calls, some
        drop what it says, which is a thought there; responses that are trained are compared
        in full where they are located."""
        contents = [answer_in(str(message["content"])).strip() for message in messages]
        at = 0
        for index, (message, content) in enumerate(zip(messages, contents, strict=True)):
            words = content.partition(MEDIUM)[0][:_SHOWN].rstrip() or content[-_SHOWN:]
            if not words or MEDIUM in words or message.get("tool_calls"):
                continue
            start = text.find(words, at)  # behind the one before, where most are
            at, is_there = (at, words in text) if start < 0 else (start, True)
            is_twice = len(messages) < _MANY and contents.count(content) > 1
            if is_twice or (len(content) < _SHOWN and len(messages) < _MANY):
                is_there = text.count(words) >= sum(each.count(words) for each in contents)
            if not is_there and self._leaves_out(messages, tools, index):
                raise TemplateError(
                    f"the chat template does not write a message of the {message['role']} behind "
                    "others; move it, or choose another data.template"
                )

    def _leaves_out(self, messages: Dicts, tools: Dicts | None, index: int) -> bool:
        """Whether the content of a message, which its template may write as JSON, say, changes
        nothing of the text."""
        content = str(messages[index]["content"])
        changed = [*messages]
        changed[index] = {**messages[index], "content": f"{content} {content}."}
        try:
            return self.render(changed, tools) == self.render(messages, tools)
        except TemplateError:
            return False

    def closing_token(self) -> str | None:
        """The token that ends a response, found in a short conversation; None if there is none."""
        probe: Dicts = [*_TURNS[:1], {"role": "assistant", "content": "Answer"}]
        try:
            tail = self.render(probe).rpartition("Answer")[2]
        except TemplateError:
            return None
        inside = [token for token in self._added if token in tail]
        return min(inside, key=lambda token: (tail.find(token), -len(token), token), default=None)

    def reads(self, key: str) -> bool:
        """Whether a message's ``key`` may change the text: the template names it, or writes
        messages with all that they have."""
        return key in self._words or self._reads_all

    def writes(self, key: str, of: str) -> bool:
        """Whether the text shows a ``key`` of the turns of a role, of a ``call``, or of the
        ``arguments`` of a row: a template may name it for others only."""
        if of == "arguments" or len(key) > _LONGEST_KEY or not self.reads(key):
            return key in self._words
        if (key, of) not in self._written and len(self._written) == _MOST_TRIED:
            return True
        if (key, of) not in self._written:
            turns = {"messages": [_SYSTEM, *_TURNS]}, {"messages": _TURNS}, _WITH_TOOLS
            plain = [self._rendered(probe) for probe in turns]
            changed = [self._rendered(_with_key(probe, key, of)) for probe in turns]
            self._written[key, of] = plain != changed or not any(plain)
        return self._written[key, of]

    @cached_property
    def takes_text(self) -> bool:
        """Whether arguments of calls are joined to the text as they are, as OpenAI's JSON text
        (DeepSeek's templates): of an object that writes Python, or fails."""
        texts = []
        for arguments in ({"a": 1}, '{"a": 1}'):
            turns = deepcopy(_CALL_TURNS)
            call = cast(list[dict[str, dict[str, object]]], turns[1]["tool_calls"])[0]
            call["function"]["arguments"] = arguments
            texts.append(self._rendered({"messages": turns}))
        return (not texts[0] or "{'a': 1}" in texts[0]) and '{"a": 1}' in texts[1]

    @cached_property
    def _reads_all(self) -> bool:
        return any(
            self._rendered({"messages": [{**turn, "a key that none names": "1"} for turn in turns]})
            != self._rendered({"messages": turns})
            for turns in (_TURNS, _CALL_TURNS)
        )

    def written_tokens(self) -> frozenset[str]:
        """Tokens that delimit turns: special ones that it writes anywhere, others around turns.

        So DeepSeek's delimiters are included, which are not special tokens (``<｜User｜>``), and
        Qwen's ``<think>`` is not, which responses may contain.
        """
        renderings = [self._rendered(probe, prompt=True) for probe in PROBES.values()]
        everywhere = "\0".join([self.source, *renderings])
        around = self._rendered(PROBES["several turns"])
        special = {token for token in self._special if token in everywhere}
        return frozenset(special | {token for token in self._added if token in around})

    def between_turns(self) -> frozenset[str]:
        """The special tokens that it writes after the words of a message, which end and begin
        turns: not those of a system text, which may name the tags that a response is to have."""
        text = self._rendered(PROBES["several turns"], prompt=True)
        _, _, rest = text.partition(str(_TURNS[0]["content"]))
        return frozenset(token for token in self._special if token in rest)

    def _rendered(self, probe: Probe, *, prompt: bool = False) -> str:
        try:
            return self.render(probe["messages"], probe.get("tools"), prompt=prompt)
        except TemplateError:
            return ""

    def _render(
        self,
        messages: Dicts,
        tools: Dicts | None,
        *,
        prompt: bool = False,
        marks: bool = False,
        in_parts: bool | None = None,
    ) -> tuple[str, Spans]:
        """Run the template; contents are lists (``in_parts``) if it needs that."""
        always = self.needs_parts if in_parts is None else in_parts
        chat = [self._in_parts(message, always=always) for message in messages]
        schemas = list(tools) if tools else None
        is_plain = self._has_plain_names and _is_plain(chat) and _is_plain(schemas)
        has_thoughts = not all(map(_THOUGHTS.isdisjoint, chat))
        compiled = self._compiled if is_plain and not has_thoughts else None
        return self._write(compiled, chat, schemas, prompt=prompt, marks=marks)

    def _write(
        self,
        compiled: jinja2.Template | None,
        chat: Dicts,
        tools: Dicts | None,
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, Spans]:
        """Run the template: as it is compiled, or through ``render_jinja_template``."""
        try:
            if compiled is None:
                texts, spans = render_jinja_template(
                    [chat],
                    tools=tools,
                    chat_template=self.source,
                    add_generation_prompt=prompt,
                    return_assistant_tokens_mask=marks,
                    **self._names,
                )
                return cast(str, texts[0]), list(spans[0]) if spans else []
            given = {"messages": chat, "tools": tools, "documents": None}
            variables = {**self._names, **given, "add_generation_prompt": prompt}
            if not marks:
                return compiled.render(variables), []
            blocks: list[str] = []
            bounds: Spans = []
            with compiled.environment.activate_tracker(blocks, bounds):  # type: ignore[attr-defined]
                for block in compiled.generate(variables):
                    blocks.append(block)  # noqa: PERF402 - the tracker reads them meanwhile
            return "".join(blocks), bounds
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {str(error.message).removesuffix('.')}"
            raise TemplateError(f"the chat template is not valid Jinja, {where}") from error
        except jinja2.TemplateError as error:
            raise TemplateError(
                f"the chat template rejects this conversation: {_said(error)}"
            ) from error
        except Exception as error:  # a template is a program: it may raise whatever Python does
            what = f"{type(error).__name__}: {_said(error)}".removesuffix(": ")
            raise TemplateError(f"the chat template fails on this conversation: {what}") from error

    @cached_property
    def _compiled(self) -> jinja2.Template | None:
        """The template, to be run as it is; None if some probe is not written as it is through
        ``render_jinja_template``, which takes twice the time to copy what is plain data."""
        try:
            compiled = _compile(self.source)
        except jinja2.TemplateError:  # as ``render_jinja_template`` will say
            return None
        cases = [(probe, False) for probe in (*PROBES.values(), _WITH_TOOLS)]
        cases += [(probe, True) for probe, _ in cases if self.has_marks]
        if compiled is not None and all(self._is_same(compiled, *case) for case in cases):
            return compiled
        why = "this transformers does more around a template than copying, or has moved it"
        fell_back("conversations are rendered by its own function", why, "takes twice the time")
        return None

    def _is_same(self, compiled: jinja2.Template, probe: Probe, marks: bool) -> bool:
        """Whether the compiled template writes a probe as ``render_jinja_template`` does."""
        results: list[object] = []
        for each in (compiled, None):
            try:
                results.append(
                    self._write(each, probe["messages"], probe.get("tools"), marks=marks)
                )
            except TemplateError as error:
                results.append(str(error))
        return results[0] == results[1]

    @cached_property
    def needs_parts(self) -> bool:
        """Whether the template writes contents only if they are lists, as those of LLaVA and
        SmolVLM do."""
        question = PROBES["a question"]["messages"]

        def writes_it(in_parts: bool) -> bool:
            try:
                text = self._render(question, None, prompt=True, in_parts=in_parts)[0]
            except TemplateError:
                return False
            return str(question[0]["content"]) in text

        return "type" in self._words and not writes_it(False) and writes_it(True)

    @cached_property
    def _writes_pictures(self) -> bool:
        """Whether the template writes a placeholder for a part that is a picture. One that is made
        for text, such as a bundled one, writes contents as they are."""
        turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}
        try:
            return str(self._picture) in self._render([turn], None, in_parts=False)[0]
        except TemplateError:
            return False

    def _in_parts(self, message: Mapping[str, object], *, always: bool) -> Mapping[str, object]:
        """A message, with a list as its content if it has pictures, or ``always``."""
        content = message["content"]
        if not isinstance(content, str):
            return message
        has_media = self._picture is not None and MEDIUM in content
        if has_media and not self._writes_pictures:
            return {**message, "content": content.replace(MEDIUM, str(self._picture))}
        if not has_media and not always:
            return message
        parts: list[dict[str, object]] = []
        for number, words in enumerate(content.split(MEDIUM) if has_media else [content]):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": words}] if words else []
        return {**message, "content": parts or [{"type": "text", "text": ""}]}


@lru_cache
def _compile(source: str) -> jinja2.Template | None:
    """A template as transformers compiles it, with its globals in one dict: Jinja has them in a
    chain, which it walks for every row. None if it is compiled elsewhere."""
    compile_source = getattr(chat_template_utils, "_compile_jinja_template", lambda _: None)
    if (compiled := compile_source(source)) is None:
        return None
    template: jinja2.Template = object.__new__(jinja2.Template)  # its class makes no copies
    vars(template).update({**vars(compiled), "globals": dict(compiled.globals)})
    return template


def _is_plain(value: object, depth: int = 50) -> bool:
    """Whether a value is of JSON's types, and none of their subclasses, whose code a template could
    run; and no deeper than that a copy is sure to be made."""
    kind = type(value)
    if kind is dict:
        members = cast(dict[object, object], value)
        is_named = {*map(type, members)} <= {str}
        return is_named and depth > 0 and all(map(_is_plain, members.values(), repeat(depth - 1)))
    if kind is list:
        return depth > 0 and all(map(_is_plain, cast(list[object], value), repeat(depth - 1)))
    return kind in _PLAIN


def _are_plain_names(names: Mapping[str, object]) -> bool:
    """Whether a template gets ``names`` as they are through ``render_jinja_template``, too."""
    return _is_plain(names) and names.keys().isdisjoint((*_PARAMETERS, "messages"))


def _said(error: Exception) -> str:
    """The words of an error, to be followed by others."""
    return str(error).removesuffix(".")


def _is_markup(token: str) -> bool:
    """Whether an added token can delimit turns, rather than being a word or white space."""
    return len(token) > 2 and not token.isalnum() and not token.isspace()


def message_dicts(
    messages: Sequence[Message], renderer: Renderer, words: Words = USUAL
) -> list[dict[str, object]]:
    """Messages in the form that chat templates expect, with the keys that the template reads;
    thoughts are in the field that it reads, or between ``words`` in the content."""
    return [_message_dict(message, renderer, words) for message in messages]


def tool_dicts(tools: Sequence[JSON]) -> list[dict[str, object]]:
    """Tool schemas in the form that chat templates expect: under ``function``."""
    return [
        dict(tool) if "function" in tool else {"type": "function", "function": tool}
        for tool in tools
    ]


def _with_key(probe: Probe, key: str, of: str) -> Probe:
    """A conversation with another value of a key in all turns of a role, or in all calls."""
    turns = deepcopy(probe["messages"])
    calls = [
        call for turn in turns for call in cast(list[dict[str, object]], turn.get("tool_calls", []))
    ]
    for each in calls if of == "call" else [turn for turn in turns if turn["role"] == of]:
        each[key] = "call00001"  # Mistral's templates refuse ids that are no nine letters
    return {**probe, "messages": turns}


def _call_dict(call: JSON, renderer: Renderer) -> dict[str, object]:
    """A call in the form that chat templates expect: its id beside ``function``."""
    function = {key: call[key] for key in ("name", "arguments")}
    if renderer.takes_text:
        written = getattr(call["arguments"], "text", None)
        function["arguments"] = written or json.dumps(call["arguments"], ensure_ascii=False)
    more = {key: value for key, value in call.items() if key not in function}
    return {**more, "type": more.get("type", "function"), "function": function}


def _message_dict(message: Message, renderer: Renderer, words: Words) -> dict[str, object]:
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    fields |= {key: value for key, value in message.fields.items() if renderer.reads(key)}
    thoughts_field = renderer.thoughts_field
    if message.reasoning and thoughts_field is not None:
        fields[thoughts_field] = message.reasoning
    elif message.reasoning:
        fields["content"] = with_thought(message, words)
    if message.tool_calls:
        fields["tool_calls"] = [_call_dict(call, renderer) for call in message.tool_calls]
    return fields


def split_thought(message: Message, words: Words) -> Message:
    """A thought that begins a response, with exactly these words around it, in its own field."""
    first, last = words
    if message.role != "assistant" or message.reasoning or not message.content.startswith(first):
        return message
    thought, closing, content = message.content[len(first) :].partition(last)
    return replace(message, reasoning=thought, content=content) if closing else message


def lone_close(message: Message, words: Words) -> re.Match[str] | None:
    """The closing word of a response's thought that has no opening word; None if there is none, or
    if it is quoted."""
    if message.role != "assistant" or message.reasoning:
        return None
    first, last = words[0].strip(), words[1].strip()
    if last not in message.content:
        return None
    closing = re.search(rf"(?<![`'\"“‘(]){re.escape(last)}", message.content)
    return None if closing is None or first in message.content[: closing.start()] else closing


def is_unclear(message: Message, words: Words) -> bool:
    """Whether a lone closing word may end a thought or be text: it has blanks around it."""
    closing = lone_close(message, words)
    if closing is None:
        return False
    around = message.content[max(0, closing.start() - 1) : closing.end() + 1]
    return around == f" {closing[0]} "


def with_opening(message: Message, words: Words) -> Message:
    """A response whose thought the prompt had opened (servers log it so), with both words."""
    closing = lone_close(message, words)
    if closing is None or is_unclear(message, words):
        return message
    if not message.content[: closing.start()].strip():  # an empty thought, which is none
        return replace(message, content=message.content[closing.end() :].lstrip("\n"))
    return replace(message, content=words[0] + message.content.lstrip("\n"))


def answer_in(content: str) -> str:
    """What a response says after its thought, if the thought is in the content."""
    before, closed, after = content.partition("</think>")
    return after if closed and "<think>" in before else content


def without_thought(message: Message, words: Words) -> Message:
    """A response without its thought."""
    if message.role != "assistant":
        return message
    first, last = (re.escape(word.strip()) for word in words)
    content = re.sub(rf"\A\s*{first}.*?{last}\s*", "", message.content, flags=re.DOTALL)
    return replace(message, reasoning="", content=content)


def with_thought(message: Message, words: Words = USUAL) -> str:
    """What a response says, its thought in front."""
    if not message.reasoning:
        return message.content
    return words[0] + message.reasoning + words[1] + message.content


def field_of(source: str) -> str | None:
    """The field of a message that a template reads thoughts from."""
    fields = (name for name in THOUGHT_KEYS if re.search(rf"[.'\"]{name}\b", source))
    return next(fields, None)


def end_of_thought(text: str, start: int, end: int, words: Words, *, only_empty: bool) -> int:
    """Where a response's answer begins in ``text[start:end]``; ``start`` if it has no thought, or
    has one and ``only_empty``."""
    first, last = words
    for close in (last, last.strip()):
        place = text.find(close, start, end)
        if place >= 0:
            thought = text[start:place].replace(first.strip(), "", 1)
            return start if only_empty and thought.strip() else place + len(close)
    return start


def thought_of(fields: Sequence[object], content: str) -> str:
    """The thought of a message as a template sees it, without white space around it."""
    thought = next((str(each) for each in fields if each), "")
    if not thought:
        before, closed, _ = content.partition("</think>")
        thought = before.partition("<think>")[2] if closed else ""
    return thought.strip()
