"""Responses to a list of prompts, on any number of ranks, with the same result.

Results are on the disk as they are computed, in files beside the output, from which the same
command continues after a full disk, a kill or Ctrl-C; those of tasks of lm-eval, too.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..batch import SCORES, Features
from ..data.example import (
    BrokenRow,
    Dropped,
    Example,
    Truncated,
    items_of,
    unread_in,
    unread_line,
)
from ..data.rows.catalog import Catalog
from ..data.rows.rows import Reading, form_of, read_examples
from ..data.section import DataSection
from ..data.text.classification import encode_inputs
from ..data.text.codec import Codec
from ..data.text.collation import collate
from ..data.text.prompts import Prompt, unread_line_of
from ..data.text.ranking import answered, up_to_last_label
from ..errors import DataError, ModelError, RunError, TemplateError, counted
from ..generate.generation import Ids, Sample, context_length, room
from ..generate.responses import Decode, decoder, pictures_of
from ..generate.section import GenerateSection
from ..model.loading import device
from ..parallel.world import World
from ..recipe.prediction import Prediction, load
from ..schema.locations import DatasetReference
from ..storage import files
from .conversation import Answer, answer_of, finish_reason, with_thinking
from .model_loading import LoadedModel, open_predicted, refuse_scorer

# A bar for work of a title and a length: entered, it gives what is called with each advance.
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class AnswerOptions:
    """How to answer, beside the generation settings."""

    seed: int = 42
    thinks: bool | None = None  # switches the thinking of the template; None changes nothing
    media_folder: Path | None = None  # of the pictures of prompts; None: as the recipe says


DEFAULTS = AnswerOptions()


def answer_prompts(
    prediction: Prediction,
    path: str,
    overrides: Sequence[str],
    prompts: Sequence[Prompt],
    world: World,
    *,
    output: Output | None = None,
    options: AnswerOptions = DEFAULTS,
    progress: Progress,
) -> list[Answer]:
    """The answer to every prompt, in order, in every process of ``world``. ``prediction`` is what
    ``path`` and ``overrides`` say; what they leave open of generation, the model's run says.
    Answers are stored beside ``output``, if any, as they are made. Raises as ``open_model`` and
    ``predict`` do."""
    opened = open_predicted(prediction.model, world, prediction.parallel)
    opened = with_thinking(opened, options.thinks).reading_from(options.media_folder)
    section = load(path, overrides, generate=opened.generate).generate
    with progress("answers", len(prompts)) as advance:
        seed = options.seed
        return predict(opened, prompts, section, seed=seed, on_answered=advance, output=output)


def predict(
    opened: LoadedModel,
    prompts: Sequence[Prompt],
    section: GenerateSection,
    *,
    system: str | None = None,
    seed: int = 42,
    on_answered: Callable[[int], None] | None = None,
    output: Output | None = None,
) -> list[Answer]:
    """The response to every prompt, in order, on every rank of ``opened.world``. The prompts are
    divided among the replicas of the model. Without a chat template, texts are continued.

    Args:
        opened: the model.
        prompts: conversations that end in a user turn.
        section: generation settings, and ``batch_size``.
        system: a system message for prompts without one.
        seed: a sample depends only on it, the prompt and the settings.
        on_answered: called with numbers of responses as they end.
        output: beside which the responses are stored as they are made, and from which those of an
            earlier attempt are taken; the caller writes it, and then removes them.

    Raises ``DataError`` if a prompt leaves no room, or the model supports no conversations.
    """
    refuse_scorer(opened)
    codec = opened.codec
    if line := unread_line_of(prompts, Reading(codec.reads, sees=codec.media is not None)):
        logger.warning("prompts: %s", line)
    prompt_ids = [_ids(opened, prompt.with_system(system)) for prompt in prompts]
    left = [room(opened.model, ids) for ids in prompt_ids]
    _refuse_full(opened, prompts, prompt_ids, left)
    samples = respond(opened, prompt_ids, section, seed, on_answered, output)
    decode = decoder(opened.tokenizer)
    return [
        answer_of(opened, sample.text(decode), finish_reason(sample, space), prompt.tools)
        for sample, space, prompt in zip(samples, left, prompts, strict=True)
    ]


def respond(
    opened: LoadedModel,
    prompts: Sequence[Ids],
    section: GenerateSection,
    seed: int,
    on_answered: Callable[[int], None] | None,
    output: Output | None,
) -> Sequence[Sample]:
    """The responses to ``prompts``; see ``predict``."""
    return opened.network.generate(
        prompts,
        section,
        seed=seed,
        stop_token_ids=opened.stop_token_ids,
        decode=decoder(opened.tokenizer),
        on_answered=on_answered,
        store=None if output is None else open_journal(output, opened, prompts, section, seed),
    )


def _ids(opened: LoadedModel, prompt: Prompt) -> Ids:
    if opened.template is not None:
        try:
            return opened.prompt(prompt.messages, prompt.tools, prompt.template_arguments)
        except (TemplateError, DataError) as error:
            raise type(error)(f"{prompt.origin}: {error}") from None
    if (
        prompt.messages[0].media
        or [message.role for message in prompt.messages] != ["user"]
        or prompt.tools
    ):
        raise TemplateError(
            f"{prompt.origin}: this model has no chat template, so it supports plain texts "
            "only, without a system message or a picture"
        )
    return opened.continuation(prompt.messages[0].content)


def _refuse_full(
    opened: LoadedModel,
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[Sequence[int]],
    left: Sequence[int | None],
) -> None:
    """Check all prompts before the first response: an error afterwards would come too late."""
    full = [i for i, space in enumerate(left) if space == 0]
    if full:
        first, more = full[0], len(full) - 1
        also = f" ({more:,} more of {len(prompts):,} prompts are too long)" if more else ""
        raise DataError(
            f"{prompts[first].origin}: no room for a response: the prompt has "
            f"{len(prompt_ids[first]):,} tokens, the model's context length is "
            f"{context_length(opened.model):,}{also}"
        )


# reward, or reward_chosen and reward_rejected; of a classifier predicted and probabilities
Scores = dict[str, object]


def read_responses(path: Path, section: DataSection | None = None) -> list[Example]:
    """All rows of a file, as a dataset's; each ends in a response, or has two. Raises ``DataError``
    as ``read_rows_of``, or if a row has no response."""
    examples = read_rows_of(path, section)
    for number, example in enumerate(examples):
        if not has_response(example):
            raise DataError(
                f"{path}: row {number} (the first is 0) has no response; a reward model scores "
                "conversations that end in one, or pairs of chosen and rejected"
            )
    return examples


def has_response(example: Example) -> bool:
    """Whether it ends in a response, or has two."""
    is_pair = example.chosen is not None and example.rejected is not None
    return is_pair or bool(example.messages and example.messages[-1].role == "assistant")


def read_rows_of(path: Path, section: DataSection | None = None) -> list[Example]:
    """All rows of a file, as a dataset's. Rows with the columns of an entry of ``section``, which
    the model was trained by, are read as that says. Raises ``DataError``: the file is missing, or a
    row cannot be read."""
    reference = DatasetReference.of(str(path.expanduser().absolute()))
    entry = Catalog(DataSection(datasets=(reference,))).entry(str(reference))
    row = next((row for row in entry.source.rows() if not isinstance(row, BrokenRow)), {})
    if section and (form := form_of(row, Catalog(section).forms())) is not None:
        entry = replace(entry, format=form, columns=(str(getattr(form, form.main)),))
    return [e for e in read_examples(entry) if isinstance(e, Example)]


def score_rows(
    prediction: Prediction,
    path: str,
    overrides: Sequence[str],
    examples: Sequence[Example],
    world: World,
    *,
    media_folder: Path | None = None,
    progress: Progress,
) -> tuple[list[dict[str, object]], list[Scores]]:
    """The rows of ``examples``, whose pictures are in ``media_folder``, with their scores, and
    these (see ``score``), by the model that ``path`` and ``overrides``, of which ``prediction`` was
    made, name. Raises as ``open_model`` and ``score`` do."""
    opened = open_predicted(prediction.model, world, prediction.parallel)
    opened = opened.reading_from(media_folder)
    for example in examples:
        if taken := [name for name in _names(opened, example) if name in example.columns]:
            raise DataError(
                f"{example.origin}: the key {taken[0]!r} is used for what is computed; give it "
                "another name"
            )
    if unread := unread_in(examples, ()):
        logger.warning("rows: %s", unread_line(unread))
    size = load(path, overrides, generate=opened.generate).generate.batch_size
    count = len(examples)
    if opened.classes is None:
        count = sum(len(_names(opened, example)) for example in examples)
    with progress("rewards" if opened.classes is None else "labels", count) as advance:
        scores = score(opened, examples, batch_size=size, on_scored=advance)
    rows = [{**e.columns, **each} for e, each in zip(examples, scores, strict=True)]
    return rows, scores


def score(
    opened: LoadedModel,
    examples: Sequence[Example],
    *,
    batch_size: int,
    on_scored: Callable[[int], None] = lambda _: None,
) -> list[Scores]:
    """The reward of each response, in order, on every rank, read at its end token: ``reward``, or
    ``reward_chosen`` and ``reward_rejected``; by a classifier the ``Classes.verdict`` of each text.
    ``on_scored`` gets the number of responses of each batch. Raises ``ModelError``: it scores
    nothing; ``DataError``: a response that cannot be encoded within ``data.cutoff_len``."""
    if opened.network.heads.values is None:
        raise ModelError(
            f"{opened.folder}: no reward model or classifier; train one with stage: rm or classify"
        )
    classes, codec = opened.classes, _codec(opened)
    items = list(_encoded(codec, examples) if classes is None else _inputs(codec, examples))
    order = sorted(range(len(items)), key=lambda i: -len(items[i]["input_ids"]))
    values_of = dict[int, Any]()  # a number, or a list of them
    with opened.network.evaluating():
        for start in range(0, len(order), batch_size):
            group = order[start : start + batch_size]
            rows = [items[i] for i in group]
            batch = collate(rows, packing=False)
            if opened.media is not None:
                batch = opened.media.added(batch, rows)
            batch = batch.to(device())
            values = opened.network.forward(batch, SCORES).values
            assert values is not None
            values_of |= zip(group, values.double().tolist(), strict=True)
            on_scored(len(group))
    if classes is not None:
        return [classes.verdict(values_of[i]) for i in range(len(items))]
    each = iter(values_of[i] for i in range(len(items)))
    return [{name: next(each) for name in _names(opened, example)} for example in examples]


def _codec(opened: LoadedModel) -> Codec:
    """As in training; of a reward model without a recipe, any text that fits its positions."""
    if opened.recipe is not None:
        return opened.codec
    limit = context_length(opened.model) or sys.maxsize
    return opened.codec.with_section(replace(opened.codec.section, cutoff_len=limit))


def _names(opened: LoadedModel, example: Example) -> Sequence[str]:
    if opened.classes is not None:
        return ("predicted", "probabilities")
    return ("reward",) if example.chosen is None else ("reward_chosen", "reward_rejected")


def _inputs(codec: Codec, examples: Sequence[Example]) -> Iterator[Features]:
    """What a classifier reads of each row, as in training."""
    for example, outcome in zip(examples, encode_inputs(examples, codec), strict=True):
        if isinstance(outcome, Dropped):
            raise DataError(f"{example.origin}: cannot be classified: {outcome.reason}")
        yield items_of(outcome)[-1]


def _encoded(codec: Codec, examples: Sequence[Example]) -> Iterator[Features]:
    """Each response after its prompt, up to its end token."""
    chats = [chat for example in examples for chat in _conversations(example)]
    for chat, outcome in zip(chats, codec.encode_chats(chats), strict=True):
        if isinstance(outcome, Dropped):
            raise DataError(f"{chat.origin}: cannot be scored: {outcome.reason}")
        if isinstance(outcome, Truncated):
            raise DataError(
                f"{chat.origin}: cannot be scored: it is longer than data.cutoff_len = "
                f"{codec.section.longest:,}, and its reward is read at its end"
            )
        yield up_to_last_label(outcome[-1])


def _conversations(example: Example) -> list[Example]:
    if example.chosen is not None and example.rejected is not None:
        return [answered(example, response) for response in (example.chosen, example.rejected)]
    *before, last = example.messages
    return [answered(replace(example, messages=tuple(before)), last)]


logger = logging.getLogger(__name__)
_PART = ".part"
_LIMIT = 1 << 34  # bytes of responses that are read back
_NAMES = {"job", "key", "result"}


@dataclass(frozen=True)
class Output:
    """The file of all answers, and whether to replace what is there."""

    path: Path
    force: bool = False

    def part(self, replica: int) -> Path:
        """The file with the responses of one replica so far."""
        return self.path.absolute().with_name(f"{self.path.name}{_PART}{replica or ''}")

    @property
    def parts(self) -> list[Path]:
        """Those of all replicas that exist."""
        first = self.part(0)
        names = [name for name in files.names_in(first.parent) if name.startswith(first.name)]
        ends = {name: name[len(first.name) :] for name in names}
        return [first.with_name(n) for n, end in ends.items() if not end or end.isdecimal()]

    @property
    def on_failure(self) -> str:
        """What the failure of a write means."""
        return (
            f"cannot write the answers (those so far are in {self.part(0).name}, and the same "
            "command continues after them)"
        )

    def remove_parts(self) -> None:
        """Delete the responses so far, once the output has them all."""
        with files.raising(RunError, "cannot delete the answers so far"):
            for path in self.parts:
                files.remove_tree(path)


@dataclass(frozen=True)
class ResultJournal:
    """The results of one replica, appended as they are computed; ``known`` are those of all
    replicas in earlier attempts, and of this process."""

    output: Output
    job: str  # identifies what is asked, settings and weights
    known: dict[str, Any]
    replica: int
    is_writer: bool  # one rank of each replica

    def add(self, results: Mapping[str, object]) -> None:
        """Append results, by their key, and flush them."""
        self.known.update(results)
        if not self.is_writer or not results:
            return
        rows = ({"job": self.job, "key": key, "result": result} for key, result in results.items())
        # a line break first, which ends a line that a crash has cut short
        text = "\n".join(["", *map(json.dumps, rows)])
        path = self.output.part(self.replica)
        # Flushed batch by batch: a disk that was full at the end once lost every answer.
        with files.raising(RunError, self.output.on_failure):
            files.append_line(path, text)
            with files.open_file(path) as file:
                file.sync()


def open_results(
    output: Output,
    opened: LoadedModel,
    request: object,
    what: tuple[str, str] = ("result", "of other questions"),
) -> ResultJournal:
    """The journal of this rank's replica for ``request``, which is plain data; a collective call.
    ``what`` is one result, and what those of another job belong to, as errors say it. Raises
    ``RunError`` if there are results of another job, unless they are to be replaced."""
    world, share = opened.world, opened.network.share
    job, earlier_results = world.from_main(
        _earlier(output, opened, request, *what) if world.is_main else None
    )
    if earlier_results:
        logger.info("%s: continuing after %s", output.path, counted(len(earlier_results), what[0]))
    return ResultJournal(output, job, earlier_results, share.index, share.is_first)


def _earlier(
    output: Output, opened: LoadedModel, request: object, noun: str, belonging: str
) -> tuple[str, dict[str, Any]]:
    """The identity of the job, and the results that earlier attempts at it have written."""
    weights = [weight_traces(folder) for folder in opened.folders]
    job = files.digest(
        json.dumps([request, str(opened.inner.dtype), weights], default=str).encode()
    )
    with files.raising(RunError, f"cannot read the {noun}s so far"):
        rows = [row for path in output.parts for row in complete_rows(path, _NAMES)]
    job_rows = [row for row in rows if row["job"] == job]
    if len(job_rows) < len(rows):
        if not output.force:
            raise RunError(
                f"{output.part(0)}: contains {counted(len(rows) - len(job_rows), noun)} "
                f"{belonging}, settings or weights; repeat the command that wrote them, choose "
                "another --output, or discard them with --force"
            )
        output.remove_parts()
        job_rows = []
    return job, {row["key"]: row["result"] for row in job_rows}


T = TypeVar("T")


@dataclass(frozen=True)
class KeyedResults(Generic[T]):
    """Results in a journal, by the index of what was computed; ``write`` makes plain data of one,
    ``read`` the result of that."""

    journal: ResultJournal
    keys: Sequence[str]  # of each prompt, or question
    write: Callable[[T], object]
    read: Callable[[Any], T]

    @property
    def known(self) -> Mapping[int, T]:
        """The results of earlier attempts."""
        results = self.journal.known
        return {i: self.read(results[key]) for i, key in enumerate(self.keys) if key in results}

    def add(self, results: Mapping[int, T]) -> None:
        """Append results to the journal."""
        self.journal.add({self.keys[i]: self.write(result) for i, result in results.items()})


def samples_in(journal: ResultJournal, keys: Sequence[str], decode: Decode) -> KeyedResults[Sample]:
    """Responses in a journal, with their text by ``decode`` for people who read the file."""

    def write(sample: Sample) -> dict[str, object]:
        return {
            "ids": sample.ids,
            "finish_reason": sample.finish_reason,
            "answer": sample.text(decode),
            "text_before_stop": sample.text_before_stop,
        }

    def read(result: Mapping[str, Any]) -> Sample:
        before = result["text_before_stop"]
        return Sample(tuple(result["ids"]), (), result["finish_reason"], text_before_stop=before)

    return KeyedResults(journal, keys, write, read)


def open_journal(
    output: Output, opened: LoadedModel, prompts: Sequence[Ids], section: GenerateSection, seed: int
) -> KeyedResults[Sample]:
    """The responses of this rank's replica to ``prompts``; as ``open_results``."""
    request: list[object] = [list(map(list, prompts)), asdict(section), seed]
    if any(pictures := [each and each.key for each in map(pictures_of, prompts)]):
        request.append(pictures)
    journal = open_results(output, opened, request, ("answer", "to other prompts"))
    return samples_in(journal, [str(i) for i in range(len(prompts))], decoder(opened.tokenizer))


def weight_traces(folder: Path) -> list[str]:
    """What changes with the files of a folder: names, lengths and times."""
    stats = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats]


def complete_rows(path: Path, names: Set[str]) -> Iterator[dict[str, Any]]:
    """The complete lines of a file of results, which have these ``names``."""
    with files.open_file(path) as file:
        text = files.read_all(file, _LIMIT).decode(errors="replace")
    for line in text.split("\n"):
        try:
            row = files.parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.keys() >= names:
            yield row
