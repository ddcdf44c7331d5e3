"""Prompts of questions with choices, in the words of LLaMA-Factory, and their continuations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ...data.example import Message
from ...errors import DataError
from ...generate.generation import context_length
from ...generate.likelihoods.likelihood import Question
from ..model_loading import LoadedModel
from .questions import LETTERS, Benchmark, ChoiceQuestion

Language = Literal["en", "zh"]
_HEADS = {
    "en": "The following are multiple choice questions (with answers) about {}.\n\n",
    "zh": "以下是中国关于{}考试的单项选择题，请选出其中的正确答案。\n\n",
}
_ENDS = {"en": "\nAnswer:", "zh": "\n答案："}


@dataclass(frozen=True)
class PromptSettings:
    """How questions are written."""

    shots: int = 5  # examples before each question
    language: Language = "en"
    is_chat: bool = True  # the examples are turns of a conversation, in the model's template
    by_text: bool = False  # choices are compared by their text, not by their letter


@dataclass(frozen=True)
class AskedQuestion:
    """A question as the model reads it."""

    asked: ChoiceQuestion
    question: Question | None  # None: it exceeds the model's context
    num_shots: int
    lengths: tuple[int, ...]  # of the choices, in bytes


def ask(
    opened: LoadedModel, benchmark: Benchmark, settings: PromptSettings
) -> Iterator[AskedQuestion]:
    """Each question after its examples. If they do not fit in the model's context, the last of them
    are dropped; a question that does not fit alone is skipped. Raises ``DataError``: a choice
    is empty, or has the tokens of another one."""
    limit = context_length(opened.model)
    for asked in benchmark.questions:
        shots = list(benchmark.examples.get(asked.subject, ()))[: settings.shots]
        lengths = tuple(len(one.encode()) for one in asked.choices)
        question: Question | None = _question(opened, benchmark, asked, shots, settings)
        while question is not None and limit is not None and question.longest - 1 > limit:
            question = None
            if shots:
                shots.pop()
                question = _question(opened, benchmark, asked, shots, settings)
        if question is not None:
            _check(asked, question)
        yield AskedQuestion(asked, question, len(shots), lengths)


def _check(asked: ChoiceQuestion, question: Question) -> None:
    found = question.continuations
    if not all(found):
        raise DataError(f"{asked.origin}: a choice is empty, and has no probability")
    if len(set(found)) < len(found):
        raise DataError(
            f"{asked.origin}: two choices have the same tokens, so nothing tells them apart; "
            "correct the row"
        )


def _question(
    opened: LoadedModel,
    benchmark: Benchmark,
    asked: ChoiceQuestion,
    shots: Sequence[ChoiceQuestion],
    settings: PromptSettings,
) -> Question:
    head = ""
    if asked.subject:
        head = _HEADS[settings.language].format(benchmark.title(asked.subject))
    write = _in_turns if settings.is_chat else _as_text
    return write(opened, head, asked, shots, settings)


def _shown(asked: ChoiceQuestion, settings: PromptSettings) -> str:
    """The question with its choices, if they have letters."""
    if settings.by_text:
        return asked.question + _ENDS[settings.language]
    listed = (f"\n{letter}. {one}" for letter, one in zip(LETTERS, asked.choices, strict=False))
    return asked.question + "".join(listed) + _ENDS[settings.language]


def _right(asked: ChoiceQuestion, settings: PromptSettings) -> str:
    assert asked.answer is not None
    return asked.choices[asked.answer] if settings.by_text else asked.letter


def _possible(asked: ChoiceQuestion, settings: PromptSettings) -> list[str]:
    return list(asked.choices if settings.by_text else LETTERS[: len(asked.choices)])


def _in_turns(
    opened: LoadedModel,
    head: str,
    asked: ChoiceQuestion,
    shots: Sequence[ChoiceQuestion],
    settings: PromptSettings,
) -> Question:
    """A conversation, whose next response is a choice."""
    messages: list[Message] = []
    for one in shots:
        messages.append(Message("user", _shown(one, settings)))
        messages.append(Message("assistant", _right(one, settings)))
    messages.append(Message("user", _shown(asked, settings)))
    messages[0] = replace(messages[0], content=head + messages[0].content)
    prompt = opened.prompt(messages)
    encode: Callable[..., list[int]] = opened.tokenizer.encode
    found = [encode(text, add_special_tokens=False) for text in _possible(asked, settings)]
    if not settings.by_text:
        found = [ids[-1:] for ids in found]  # without a mark of the beginning of a word
    return Question(tuple(prompt), tuple(map(tuple, found)))


def _as_text(
    opened: LoadedModel,
    head: str,
    asked: ChoiceQuestion,
    shots: Sequence[ChoiceQuestion],
    settings: PromptSettings,
) -> Question:
    """One text, which a choice continues."""
    space = " " if settings.language == "en" else ""
    before = (f"{_shown(one, settings)}{space}{_right(one, settings)}\n\n" for one in shots)
    text = head + "".join(before) + _shown(asked, settings)
    ends = [f"{space}{one}" for one in _possible(asked, settings)]
    return split_pair(opened, text, ends)


def split_pair(opened: LoadedModel, text: str, ends: Sequence[str]) -> Question:
    """``text`` and what may follow it, encoded together, as words may share a token with the space
    before them. Where that changes the prompt, both are encoded apart."""
    prompt = opened.continuation(text)
    found: list[tuple[int, ...]] = []
    for end in ends:
        whole = opened.continuation(text + end)
        if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
            own: list[int] = opened.tokenizer.encode(end, add_special_tokens=False)
            found.append(tuple(own))
        else:
            found.append(tuple(whole[len(prompt) :]))
    return Question(tuple(prompt), tuple(found))
