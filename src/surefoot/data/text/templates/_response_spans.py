"""Find the response spans of a conversation in its rendered text.

``{% generation %}`` marks give them. Without marks, a response is the text after its own prompt:
the rendering of the messages before it, with the generation prompt, must be a prefix of the
rendering with it. Some templates render a response differently once later turns follow (they drop
its reasoning, or move the system message). Such a response is located in the conversation that ends
with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jinja2

from ....errors import TemplateError, counted
from ...example import THOUGHT_KEYS, Dicts
from .render import PROBES, Renderer, answer_in, thought_of

logger = logging.getLogger(__name__)

PLAIN, THINKING = "An answer to it", "<think>\nIt is easy.\n</think>\n\nAn answer to it"
ENDLESS = "a model cannot learn to stop"


@dataclass(frozen=True, slots=True)
class ResponseSpan:
    """One response: the text in which it is trained, and its bounds there, closing token
    included."""

    index: int  # of its message
    text: str
    start: int
    end: int


class ResponseLocator:
    """Locates responses in rendered text; chooses the way once, on short probe conversations.
    Raises ``TemplateError``: responses cannot be distinguished from prompts."""

    def __init__(self, renderer: Renderer, last_ends: tuple[str, ...] = ()) -> None:
        """``last_ends`` are what the template writes after the last response only."""
        self._renderer = renderer
        self._last_ends = last_ends
        self._closing = renderer.closing_token()
        self._lead = ""  # what marks cover of the generation prompt
        self._marks_hold = renderer.has_marks and self._probe_marks()
        if not self._marks_hold:
            self._probe_prefixes()
        if self._closing is None:
            logger.warning(
                "this chat template ends a response without a special token: %s", ENDLESS
            )

    def locate(
        self, messages: Dicts, tools: Dicts | None, wanted: Sequence[int]
    ) -> tuple[str, list[ResponseSpan]]:
        """The conversation's text, and the ``wanted`` messages' responses, in it or in texts of
        their own. Raises ``TemplateError``: the template rejects the conversation, or gives no
        reliable mask."""
        if self._marks_hold:
            text, turns = self._by_marks(messages, tools)
            turns = [
                self._with_thought(messages, tools, turn) for turn in turns if turn.index in wanted
            ]
        else:
            text = self._renderer.render(messages, tools)
            turns = [self._by_prefix(messages, tools, i, text) for i in wanted]
        for turn in turns:
            _check_written(messages[turn.index], turn)
        check_tools(tools, text)
        self._renderer.check_written(messages, tools, text)
        return text, turns

    def content(self, messages: Dicts, tools: Dicts | None, index: int, whole: str) -> ResponseSpan:
        """The position of the content of any message in the conversation's text. Raises
        ``TemplateError``: the template moves or changes it."""
        before = self._renderer.render(messages[:index], tools) if index else ""
        after = self._renderer.render(messages[: index + 1], tools)
        content = str(messages[index]["content"])
        start = after.find(content, len(before))
        if start < 0 or not whole.startswith(after[: start + len(content)]):
            raise TemplateError(
                f"message {index + 1} has `learn` set, but the chat template moves or changes it"
            )
        return ResponseSpan(index, whole, start, start + len(content))

    def _by_marks(self, messages: Dicts, tools: Dicts | None) -> tuple[str, list[ResponseSpan]]:
        """Every response, as its ``{% generation %}`` block marks it."""
        text, spans = self._renderer.render_marked(messages, tools)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(answers):
            raise TemplateError(
                f"the chat template has {len(spans)} {{% generation %}} blocks for "
                f"{counted(len(answers), 'response')}; each needs exactly one"
            )
        turns = []
        for index, (start, end) in zip(answers, spans, strict=True):
            skip = len(self._lead) if text.startswith(self._lead, start) else 0
            turns.append(
                ResponseSpan(index, text, start + skip, self._trimmed(text, start + skip, end))
            )
        return text, turns

    def _with_thought(
        self, messages: Dicts, tools: Dicts | None, turn: ResponseSpan
    ) -> ResponseSpan:
        """A response with its thought: in a text of its own, if later turns remove it."""
        is_last = turn.index + 1 == len(messages)
        if is_last or _thought(messages[turn.index]) in turn.text[turn.start : turn.end]:
            return turn
        return self._by_marks(messages[: turn.index + 1], tools)[1][-1]

    def _by_prefix(
        self, messages: Dicts, tools: Dicts | None, index: int, whole: str
    ) -> ResponseSpan:
        """One response: the text that follows its prompt."""
        prompt = self._renderer.render(messages[:index], tools, prompt=True)
        is_last = index + 1 == len(messages)
        conversation = whole if is_last else self._renderer.render(messages[: index + 1], tools)
        if not conversation.startswith(prompt):
            raise TemplateError(
                f"the prompt of message {index + 1} ends in {prompt[-30:]!r}, but the "
                "conversation with that response does not begin with its prompt, so the "
                "response cannot be located"
            )
        end = self._trimmed(conversation, len(prompt), len(conversation))
        text = whole if whole.startswith(conversation[:end]) else conversation
        if text is conversation and not is_last and conversation.endswith(self._last_ends):
            short = len(conversation) - max(
                len(e) for e in self._last_ends if conversation.endswith(e)
            )
            if whole.startswith(conversation[:short]):
                return ResponseSpan(index, whole, len(prompt), short)
        return ResponseSpan(index, text, len(prompt), end)

    def _trimmed(self, text: str, start: int, end: int) -> int:
        """The end without white space after the closing token: the response ends before that."""
        short = len(text[start:end].rstrip()) + start
        if self._closing and text.endswith(self._closing, start, short):
            return short
        return end

    def _probe_marks(self) -> bool:
        """Whether marks are around the responses; ``_lead`` is what they cover of the prompt."""
        messages = _answered(PROBES["several turns"]["messages"], PLAIN)
        try:
            text, turns = self._by_marks(messages, None)
            for turn in turns:
                _check_written(messages[turn.index], turn)
            prompts = [self._renderer.render(messages[: t.index], prompt=True) for t in turns]
        except TemplateError:
            return False  # such as marks in a macro, whose place is not known
        heads = {prompt[t.start :] for prompt, t in zip(prompts, turns, strict=True)}
        self._lead = heads.pop() if len(heads) == 1 else ""
        if not all(text.startswith(prompt) for prompt in prompts):
            logger.warning(
                "the generation prompt of this chat template differs from the text before its "
                "responses, so chat differs from training: the generation prompt ends in %r",
                prompts[-1][-30:],
            )
        return True

    def _probe_prefixes(self) -> None:
        """Reject a template in which neither plain nor thinking responses can be located."""
        errors: list[TemplateError] = []
        for answer in (PLAIN, THINKING):
            try:
                for case in ("a question", "several turns"):
                    messages = _answered(PROBES[case]["messages"], answer)
                    whole = self._renderer.render(messages)
                    for index in range(1, len(messages), 2):
                        turn = self._by_prefix(messages, None, index, whole)
                        _check_written(messages[index], turn)
            except TemplateError as error:
                errors.append(error)
        if len(errors) == 2:
            if isinstance(errors[0].__cause__, jinja2.TemplateSyntaxError):
                raise errors[0]
            raise TemplateError(
                f"this chat template cannot be masked: {errors[0]}. Choose another "
                "data.template, or put {% generation %} marks around the responses in this "
                "one"
            )


def check_tools(tools: Dicts | None, text: str) -> None:
    """Raises ``TemplateError``: a rendered ``text`` lacks one of ``tools``."""
    if any(_name_of(tool) not in text for tool in tools or ()):
        raise TemplateError("the chat template does not write the tools of a conversation")


def _check_written(message: Mapping[str, object], turn: ResponseSpan) -> None:
    """Reject a response that the template does not write completely."""
    text = turn.text[turn.start : turn.end]
    if not text:
        raise TemplateError("the chat template writes nothing of a response")
    words = answer_in(str(message["content"])).strip()  # templates write thoughts anew
    middle = words.partition("</think>")[0][-5:] + "</think>" if "</think>" in words else ""
    if any(part not in text for part in (words[:20], middle, words[-20:])):
        raise TemplateError("the chat template changes a response")
    if _thought(message)[-20:] not in text:
        raise TemplateError(
            "the chat template does not write the thought of a response; choose a data.template "
            "that does, or set data.enable_thinking: false to train without thoughts"
        )
    calls = cast(Dicts, message.get("tool_calls", ()))
    if any(_name_of(call) not in text for call in calls):
        raise TemplateError("the chat template does not write the tool calls of a response")


def _thought(message: Mapping[str, object]) -> str:
    return thought_of([message.get(name) for name in THOUGHT_KEYS], str(message["content"]))


def _name_of(tool: Mapping[str, object]) -> str:
    function = cast(Mapping[str, object], tool["function"])
    return str(function.get("name", ""))


def _answered(messages: Dicts, answer: str) -> list[Mapping[str, object]]:
    """A probe in which every response, including the last one, is ``answer``."""
    reply: Mapping[str, object] = {"role": "assistant", "content": answer}
    return [*(reply if m["role"] == "assistant" else m for m in messages), reply]
