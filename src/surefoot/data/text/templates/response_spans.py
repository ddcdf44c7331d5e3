"""Where the answers of a conversation lie in its rendered text.

``{% generation %}`` marks say it. Without them, each answer is what follows its own prompt: the
rendering of the messages before it, with the generation prompt, must be the beginning of the
rendering with it. A template that writes an answer otherwise once it is history (drops its
reasoning, moves the system message) is met turn by turn: such an answer is found in the
conversation that ends with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from ....errors import TemplateError
from .fast_render import Dicts
from .render import PROBES, Renderer

logger = logging.getLogger(__name__)

PLAIN, THINKING = "An answer to it", "<think>\nIt is easy.\n</think>\n\nAn answer to it"
ENDLESS = "nothing teaches the model to stop"


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: the text it is learnt in, and its bounds there, end-of-turn token included."""

    index: int  # of its message
    text: str
    start: int
    end: int


class ResponseLocator:
    """Finds answers in what a template renders; decides once how, on short conversations.

    Raises:
        TemplateError: answers cannot be told from prompts.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._closing = renderer.closing_token()
        self._lead = ""  # what marks cover of the generation prompt
        self._marks_hold = renderer.has_marks and self._probe_marks()
        if not self._marks_hold:
            self._probe_prefixes()
        if self._closing is None:
            logger.warning("this chat template ends an answer with no special token: %s", ENDLESS)

    def locate(
        self, messages: Dicts, tools: Dicts | None, wanted: Sequence[int]
    ) -> tuple[str, list[Turn]]:
        """The conversation's text, and the ``wanted`` messages' answers, in it or on their own.

        Raises:
            TemplateError: the template refuses the conversation, or it cannot be masked.
        """
        if self._marks_hold:
            text, turns = self._by_marks(messages, tools)
            turns = [turn for turn in turns if turn.index in wanted]
        else:
            text = self._renderer.render(messages, tools)
            turns = [self._by_prefix(messages, tools, i, text) for i in wanted]
        for turn in turns:
            _check_written(messages[turn.index], turn)
        if any(_name_of(tool) not in text for tool in tools or ()):
            raise TemplateError("the chat template does not write the tools of a conversation")
        return text, turns

    def content(self, messages: Dicts, tools: Dicts | None, index: int, whole: str) -> Turn:
        """Where the content of any message stands in the conversation's text.

        Raises:
            TemplateError: the template moves or rewrites it.
        """
        before = self._renderer.render(messages[:index], tools) if index else ""
        after = self._renderer.render(messages[: index + 1], tools)
        content = str(messages[index]["content"])
        start = after.find(content, len(before))
        if start < 0 or not whole.startswith(after[: start + len(content)]):
            raise TemplateError(
                f"message {index + 1} has `learn` set, but the chat template moves or rewrites it"
            )
        return Turn(index, whole, start, start + len(content))

    def _by_marks(self, messages: Dicts, tools: Dicts | None) -> tuple[str, list[Turn]]:
        """Every answer, as its ``{% generation %}`` block has it."""
        text, spans = self._renderer.render_marked(messages, tools)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(answers):
            raise TemplateError(
                f"the chat template has {len(spans)} {{% generation %}} blocks for {len(answers)} "
                "answers; each needs exactly one"
            )
        turns = []
        for index, (start, end) in zip(answers, spans, strict=True):
            skip = len(self._lead) if text.startswith(self._lead, start) else 0
            turns.append(Turn(index, text, start + skip, self._trimmed(text, start + skip, end)))
        return text, turns

    def _by_prefix(self, messages: Dicts, tools: Dicts | None, index: int, whole: str) -> Turn:
        """One answer: what its conversation has behind its prompt."""
        prompt = self._renderer.render(messages[:index], tools, prompt=True)
        is_last = index + 1 == len(messages)
        own = whole if is_last else self._renderer.render(messages[: index + 1], tools)
        if not own.startswith(prompt):
            raise TemplateError(
                f"the prompt of message {index + 1} ends in {prompt[-30:]!r}, but the conversation "
                "with that answer does not begin with its prompt, so they cannot be told apart"
            )
        end = self._trimmed(own, len(prompt), len(own))
        text = whole if whole.startswith(own[:end]) else own
        return Turn(index, text, len(prompt), end)

    def _trimmed(self, text: str, start: int, end: int) -> int:
        """The end without white space after the closing token: an answer is over before that."""
        short = len(text[start:end].rstrip()) + start
        if self._closing and text.endswith(self._closing, start, short):
            return short
        return end

    def _probe_marks(self) -> bool:
        """Whether marks lie around the answers; notes what they cover of the generation prompt."""
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
                "this chat template's generation prompt is not what its answers stand behind, so "
                "chat differs from training: its prompt ends in %r",
                prompts[-1][-30:],
            )
        return True

    def _probe_prefixes(self) -> None:
        """Refuse a template under which neither plain nor thinking answers can be found."""
        errors: list[TemplateError] = []
        for answer in (PLAIN, THINKING):
            try:
                self._probe_prefix(answer)
            except TemplateError as error:
                errors.append(error)
        if len(errors) == 2:
            raise TemplateError(
                f"this chat template cannot be masked: {errors[0]}. Name another data.template, "
                "or put {% generation %} marks around the answers of this one"
            )

    def _probe_prefix(self, answer: str) -> None:
        for case in ("a question", "several turns"):
            messages = _answered(PROBES[case]["messages"], answer)
            indices = range(1, len(messages), 2)
            whole = self._renderer.render(messages)
            for turn in (self._by_prefix(messages, None, i, whole) for i in indices):
                _check_written(messages[turn.index], turn)


def _check_written(message: Mapping[str, object], turn: Turn) -> None:
    """Refuse an answer of which the template leaves something out."""
    text = turn.text[turn.start : turn.end]
    if not text:
        raise TemplateError("the chat template writes nothing of an answer")
    words = str(message["content"]).rpartition("</think>")[2]  # templates write thoughts anew
    if words.strip()[-20:] not in text:
        raise TemplateError("the chat template does not write an answer as it is")
    calls = cast(Dicts, message.get("tool_calls", ()))
    if any(_name_of(call) not in text for call in calls):
        raise TemplateError("the chat template does not write the tool calls of an answer")


def _name_of(tool: Mapping[str, object]) -> str:
    function = cast(Mapping[str, object], tool["function"])
    return str(function.get("name", ""))


def _answered(messages: Dicts, answer: str) -> list[Mapping[str, object]]:
    """A probe in which every answer, the last one included, is ``answer``."""
    reply: Mapping[str, object] = {"role": "assistant", "content": answer}
    return [*(reply if m["role"] == "assistant" else m for m in messages), reply]
