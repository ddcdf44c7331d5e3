"""One conversation with a model: the messages so far, and the next response as it is generated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ..data.example import Message
from ..errors import RunError, TemplateError
from ..generate.decode import decoder
from ..generate.generation import FinishReason, context_length, room, stream
from ..generate.section import GenerateSection
from .model_loading import LoadedModel, refuse_reward_model


@dataclass(frozen=True)
class Answer:
    """A response, and why it ended: ``stop``: it was complete, ``length``: ``max_new_tokens``,
    ``context``: the context length was reached, ``interrupted``: by Ctrl-C."""

    text: str
    finish_reason: FinishReason | Literal["interrupted"]


def finish_reason(length: int, left: int | None, section: GenerateSection) -> FinishReason:
    """Why a response of ``length`` tokens ended; ``left``: tokens of context (None: no limit)."""
    if left is not None and length >= left:
        return "context"
    return "length" if length >= section.max_new_tokens else "stop"


@dataclass
class Conversation:
    """Messages so far. None is ever dropped, and nothing is added. Without a chat template there is
    no conversation: every text is continued by itself."""

    opened: LoadedModel
    section: GenerateSection
    system: str | None = None
    seed: int | None = None  # makes sampling repeatable
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        refuse_reward_model(self.opened)
        self.set_system(self.system)

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

    def ask(self, text: str, on_text: Callable[[str], None] | None = None) -> Answer:
        """The response to ``text``, passed piece by piece to ``on_text``. Raises ``RunError`` if
        there is no room for one, and ``text`` is not added; ``TemplateError`` if the template
        rejects it."""
        said = Message("user", text)
        ids = self._ids(said)
        left = room(self.opened.model, ids)
        if left == 0:
            raise RunError(
                f"no room for a response: with this message the prompt has {len(ids):,} tokens, "
                f"the model's context length is {context_length(self.opened.model):,}"
            )
        answer = self._answer(ids, left, on_text)
        self.messages += [said, Message("assistant", answer.text)]
        return answer

    def retry(self, on_text: Callable[[str], None] | None = None) -> Answer:
        """Another response to the last message, in place of the last one. Raises ``RunError`` if
        there is none yet."""
        if not self.messages:
            raise RunError("there is no response yet to generate again")
        asked, before = self.messages[-2], self.messages[-2:]
        del self.messages[-2:]
        try:
            return self.ask(asked.content, on_text)
        except RunError:
            self.messages += before
            raise

    def _ids(self, said: Message) -> list[int]:
        if not self.has_template:
            ids = self.opened.continuation(said.content)
            if not ids:
                raise RunError("there is no text to continue")
            return ids
        first = [Message("system", self.system)] if self.system else []
        return self.opened.prompt([*first, *self.messages, said])

    def _answer(
        self, ids: list[int], left: int | None, on_text: Callable[[str], None] | None
    ) -> Answer:
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

        try:
            found = stream(
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
        return Answer("".join(pieces), finish_reason(len(found), left, self.section))
