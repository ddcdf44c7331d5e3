"""Multiple choice: of each question, the choice that the model finds most probable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...data.text.answers import write_rows
from ...generate.likelihoods.likelihood import Likelihood
from ..answer_journal import Output
from ..model_loading import LoadedModel, refuse_reward_model
from .choice_prompts import AskedQuestion, PromptSettings, ask
from .journal import Likelihoods, open_results
from .questions import LETTERS, Benchmark
from .replicas import network_likelihoods


@dataclass(frozen=True)
class ChoiceResult:
    """What a model has chosen."""

    asked: AskedQuestion
    logps: tuple[float, ...] = ()  # of each choice
    chosen: int | None = None  # the most probable choice; None: the question was too long
    chosen_by_byte: int | None = None  # the one with the highest log-probability of a byte

    @property
    def is_right(self) -> bool:
        """Whether the most probable choice is the right one."""
        return self.chosen == self.asked.asked.answer

    def as_row(self) -> dict[str, object]:
        """A line of the file of results."""
        one = self.asked.asked
        return {
            "origin": one.origin,
            "subject": one.subject,
            "question": one.question,
            "choices": list(one.choices),
            "answer": one.letter,
            "predicted": None if self.chosen is None else LETTERS[self.chosen],
            "match": None if one.answer is None else self.is_right,
            "logps": list(self.logps),
            "num_shots": self.asked.num_shots,
        }


@dataclass(frozen=True)
class ChoiceReport:
    """The results of a benchmark."""

    benchmark: Benchmark
    settings: PromptSettings
    results: Sequence[ChoiceResult]

    @property
    def num_short(self) -> int:
        """Questions for which some of the examples did not fit."""
        most = self.settings.shots
        given = self.benchmark.examples
        return sum(
            one.asked.num_shots < min(most, len(given.get(one.asked.asked.subject, ())))
            for one in self.results
        )

    @property
    def num_too_long(self) -> int:
        """Questions that exceed the model's context; they count as wrong."""
        return sum(one.chosen is None for one in self.results)

    def groups(self, name: Callable[[ChoiceResult], str]) -> dict[str, list[ChoiceResult]]:
        """The results whose answers are known, by ``name``."""
        found: dict[str, list[ChoiceResult]] = {}
        for one in self.results:
            if one.asked.asked.answer is not None:
                found.setdefault(name(one), []).append(one)
        return found

    @property
    def by_subject(self) -> dict[str, list[ChoiceResult]]:
        """The results of each subject."""
        return self.groups(lambda one: one.asked.asked.subject)

    @property
    def by_category(self) -> dict[str, list[ChoiceResult]]:
        """The results of each category; none if there are no categories."""
        known = self.benchmark.categories
        if not known:
            return {}
        return self.groups(lambda one: known.get(one.asked.asked.subject, ""))

    def as_data(self, written: Path) -> dict[str, object]:
        """The accuracies as plain data."""
        scored = [one for group in self.by_subject.values() for one in group]
        return {
            "benchmark": self.benchmark.name,
            "questions": len(self.results),
            "unanswered": len(self.results) - len(scored),
            **metrics(scored, self.settings),
            "categories": _each(self.by_category, self.settings),
            "subjects": _each(self.by_subject, self.settings),
            "shots": self.settings.shots,
            "fewer_shots": self.num_short,
            "too_long": self.num_too_long,
            "results": str(written),
        }


def metrics(results: Sequence[ChoiceResult], settings: PromptSettings) -> dict[str, object]:
    """The accuracy; with choices by text, also that of the log-probability of a byte. None without
    a known answer."""
    if not results:
        return {"accuracy": None}
    found: dict[str, object] = {"accuracy": sum(one.is_right for one in results) / len(results)}
    if settings.by_text:
        right = sum(one.chosen_by_byte == one.asked.asked.answer for one in results)
        found["accuracy_by_byte"] = right / len(results)
    return found


def _each(
    groups: Mapping[str, Sequence[ChoiceResult]], settings: PromptSettings
) -> dict[str, object]:
    return {
        name: {"questions": len(group), **metrics(group, settings)}
        for name, group in groups.items()
    }


def answer_questions(
    opened: LoadedModel,
    benchmark: Benchmark,
    settings: PromptSettings,
    *,
    output: Output,
    batch_size: int,
    on_scored: Callable[[int], None] = lambda _: None,
) -> ChoiceReport:
    """The choice of each question, on every rank. Results are stored beside ``output`` as they are
    computed, and those of an earlier attempt are taken from there. Raises as ``ask`` and
    ``open_results``."""
    refuse_reward_model(opened)
    asked = list(ask(opened, benchmark, settings))
    fitting = [one for one in asked if one.question is not None]
    questions = [one.question for one in asked if one.question is not None]
    on_scored(len(asked) - len(fitting))
    plain = [[one.prompt, one.continuations] for one in questions]
    journal = open_results(output, opened, [plain, asdict(settings)])
    found = network_likelihoods(
        opened.network,
        questions,
        batch_size=batch_size,
        on_scored=on_scored,
        store=Likelihoods(journal, [str(i) for i in range(len(questions))]),
    )
    pairs = iter(zip(fitting, found, strict=True))
    results = [ChoiceResult(a) if a.question is None else _result(*next(pairs)) for a in asked]
    return ChoiceReport(benchmark, settings, results)


def _result(asked: AskedQuestion, found: Sequence[Likelihood]) -> ChoiceResult:
    """Of equally probable choices, the first one."""
    logps = [one.logp for one in found]
    by_byte = [x / max(1, length) for x, length in zip(logps, asked.lengths, strict=True)]
    chosen, chosen_by_byte = logps.index(max(logps)), by_byte.index(max(by_byte))
    return ChoiceResult(asked, tuple(logps), chosen, chosen_by_byte)


def write_results(report: ChoiceReport, output: Output) -> None:
    """One JSON object for each question. Raises ``RunError``."""
    write_rows(output.path, [one.as_row() for one in report.results], doing=output.on_failure)
