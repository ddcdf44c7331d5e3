"""Where the answers of a conversation lie in its rendered text.

``{% generation %}`` marks say it. Without them, each answer is what follows its own prompt: the
rendering of the messages before it, with the generation prompt, must be the beginning of the
rendering with it. A template that writes an answer otherwise once it is history (drops its
reasoning, moves the system message) is met turn by turn: such an answer is found in the
conversation that ends with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import TemplateError
from .render import PROBES, Dicts, Renderer


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: the text it is learnt in, and its bounds there, end-of-turn token included."""

    index: int  # of its message
    text: str
    start: int
    end: int


class Locator:
    """Finds answers in what a template renders; decides once how, on a short conversation.

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

    def locate(
        self, messages: Dicts, tools: Dicts | None, wanted: Sequence[int]
    ) -> tuple[str, list[Turn]]:
        """The conversation's text, and the ``wanted`` messages' answers, in it or on their own.

        Raises:
            TemplateError: the template refuses the conversation, or it cannot be masked.
        """
        if not self._marks_hold:
            text = self._renderer.render(messages, tools)
            return text, [self._by_prefix(messages, tools, i, text) for i in wanted]
        text, spans = self._renderer.render_marked(messages, tools)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(answers):
            raise TemplateError(
                f"the template marks {len(spans)} generations in a conversation of {len(answers)} "
                "answers; each answer needs exactly one {% generation %} block"
            )
        turns = [self._by_mark(text, i, span) for i, span in zip(answers, spans, strict=True)]
        return text, [turn for turn in turns if turn.index in set(wanted)]

    def content(self, messages: Dicts, tools: Dicts | None, index: int, whole: str) -> Turn:
        """Where the content of any message stands in the conversation's text.

        Raises:
            TemplateError: the template moves or rewrites it.
        """
        before = self._renderer.render(messages[:index], tools) if index else ""
        after = self._renderer.render(messages[: index + 1], tools)
        content = str(messages[index]["content"])
        start = after.find(content, len(before))
        if not whole.startswith(after[: start + len(content)]) or start < 0:
            raise TemplateError(
                f"message {index + 1} has `learn` set, but the template does not keep it in place"
            )
        return Turn(index, whole, start, start + len(content))

    def _by_mark(self, text: str, index: int, span: tuple[int, int]) -> Turn:
        start, end = span
        if self._lead and text.startswith(self._lead, start):
            start += len(self._lead)
        end = self._trimmed(text, start, end)
        if end <= start:
            raise TemplateError(f"message {index + 1}: its {{% generation %}} block is empty")
        return Turn(index, text, start, end)

    def _by_prefix(self, messages: Dicts, tools: Dicts | None, index: int, whole: str) -> Turn:
        prompt = self._renderer.render(messages[:index], tools, prompt=True)
        last = index + 1 == len(messages)
        own = whole if last else self._renderer.render(messages[: index + 1], tools)
        if not own.startswith(prompt):
            raise TemplateError(
                f"message {index + 1}: the prompt of this answer ends in {prompt[-40:]!r}, but the "
                "conversation with the answer does not begin with the prompt, so the answer cannot "
                f"be told from it; name another data.template, or put {{% generation %}} marks "
                "around the answers of this one"
            )
        end = self._trimmed(own, len(prompt), len(own))
        if end <= len(prompt):
            raise TemplateError(f"message {index + 1}: the template renders nothing of this answer")
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
        messages = _answered(PROBES["several turns"]["messages"])
        try:
            text, spans = self._renderer.render_marked(messages)
            prompts = [self._renderer.render(messages[:i], prompt=True) for i in (1, 3)]
        except TemplateError:
            return False
        answers = [str(messages[i]["content"]) for i in (1, 3)]
        if len(spans) != 2 or any(
            a not in text[slice(*s)] for a, s in zip(answers, spans, strict=True)
        ):
            return False  # in a macro or a set block, where their place is not known
        heads = {prompt[start:] for prompt, (start, _) in zip(prompts, spans, strict=True)}
        self._lead = heads.pop() if len(heads) == 1 else ""
        return True

    def _probe_prefixes(self) -> None:
        for case in ("a question", "several turns"):
            messages = _answered(PROBES[case]["messages"])
            whole = self._renderer.render(messages)
            for i in range(1, len(messages), 2):
                turn = self._by_prefix(messages, None, i, whole)
                if str(messages[i]["content"]) not in turn.text[turn.start : turn.end]:
                    raise TemplateError("the template does not write the answers of a conversation")


def _answered(messages: Dicts) -> list[Mapping[str, object]]:
    return [*messages, {"role": "assistant", "content": "The answer to it"}]
