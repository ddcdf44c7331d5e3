"""Evaluate the model of a run on data that it was not trained on."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..batch import IGNORE_INDEX, Features
from ..checkpoint.disk.commit import named
from ..data.example import Dropped, Example, Truncated
from ..data.media.files import seen_in
from ..data.text.ranking import answered
from ..data.text.templates import optional_template, section_template
from ..errors import CheckpointError, ModelError, RunError, counted, installation
from ..generate.generation import Ids, Sample, room
from ..generate.responses import Decode, decoder, pictures_of
from ..log import fell_back
from ..model.numerics import autocast
from ..network.network import Network
from ..parallel.section import ParallelSection
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe
from ..recipe.recipe_data import fitted_data, why_text
from ..run.parts import RunParts
from ..storage import files
from ..storage.files import make_folder, raising, write_aside
from ..storage.remote import Address
from ._model_location import locate
from .evaluation import HeldOut, auxiliary_columns, held_out, measure, num_batches, staying
from .model_loading import PLAINLY, LoadedModel, open_start, open_to_measure, refuse_scorer
from .prediction import Output, Progress, respond

BASE = "base"
# Responses and their references to metrics, as ``similarity``.
Compare = Callable[[Sequence[str], Sequence[str]], Mapping[str, float]]


@dataclass(frozen=True)
class DatasetResult:
    """The metrics and the responses of one dataset."""

    name: str
    num_examples: int
    metrics: dict[str, float]  # loss, perplexity, token_accuracy, say
    answers: Sequence[Generation] = field(default=())
    similarity: Mapping[str, float] = field(default_factory=dict)  # of the responses: BLEU, say

    @property
    def matches(self) -> int:
        """Number of responses that equal those of the data."""
        return sum(generation.is_match for generation in self.answers)

    def as_data(self) -> dict[str, object]:
        """All of it except the texts; NaN and infinite values are null."""
        fields: dict[str, object] = {"examples": self.num_examples}
        fields |= {n: v if math.isfinite(v) else None for n, v in self.metrics.items()}
        if self.answers:
            fields |= {"exact_match": self.matches / len(self.answers)}
            fields |= {"matches": self.matches, "answers": len(self.answers), **self.similarity}
        return fields


@dataclass(frozen=True)
class EvaluationReport:
    """The results of a model on each dataset."""

    model: str  # a short name
    results: Sequence[DatasetResult]
    similarity: Mapping[str, float] = field(default_factory=dict)  # of all responses

    def compared(self, compare: Compare) -> EvaluationReport:
        """With the similarity of responses to those of the data, by ``compare``."""
        results = [replace(r, similarity=_similarity(r, compare)) for r in self.results]
        return replace(self, results=results, similarity=_similarity(self, compare))

    @property
    def answers(self) -> Sequence[Generation]:
        """Those of all datasets."""
        return [generation for result in self.results for generation in result.answers]

    @property
    def overall(self) -> DatasetResult:
        """All datasets together. As in training, loss and similar metrics are means over the
        datasets; exact match is over all responses."""
        common = set.intersection(*(set(result.metrics) for result in self.results))
        means = {
            metric: sum(result.metrics[metric] for result in self.results) / len(self.results)
            for metric in self.results[0].metrics
            if metric in common
        }
        count = sum(result.num_examples for result in self.results)
        return DatasetResult("", count, means, self.answers, self.similarity)

    def as_data(self, generations: Path | None) -> dict[str, object]:
        """Everything as plain data; ``generations``: the file of the responses."""
        return {
            "model": self.model,
            **self.overall.as_data(),
            "generations": None if generations is None else str(generations),
            "datasets": {result.name: result.as_data() for result in self.results},
        }

    def write_generations(self, path: Path) -> None:
        """One JSON object per line; an old file is replaced. Raises ``RunError``."""
        lines = [
            json.dumps(
                {
                    "origin": generation.origin,
                    "prompt": generation.prompt,
                    "reference": generation.reference,
                    "answer": generation.answer,
                    "match": generation.is_match,
                    **({"pictures": generation.pictures} if generation.pictures else {}),
                },
                ensure_ascii=False,
            )
            for generation in self.answers
        ]
        with raising(RunError, "cannot write the generations"):
            make_folder(path.absolute().parent)
            write_aside(path, ("\n".join(lines) + "\n").encode(errors="replace"))


def evaluate_run(
    recipe: Recipe,
    world: World,
    parallel: ParallelSection,
    *,
    progress: Progress,
    model: str | None = None,
    base: str | None = None,
    dataset: str | None = None,
    limit: int | None = None,
) -> EvaluationReport:
    """Evaluate ``model`` (a checkpoint, any model, or ``base``; by default the run's best or latest
    checkpoint) on the held-out data of a recipe, or ``limit`` examples of another ``dataset``; the
    same on all ranks. ``base`` is that of an adapter, if it moved. Raises ``CheckpointError``,
    ``DataError``, ``ModelError`` or ``RecipeError`` if there is no such model, or nothing to
    evaluate it on."""
    path = evaluated_path(recipe, model, world)
    is_needed = path is None or bool(recipe.stage.auxiliary)
    start = parts_of_start(recipe, world, parallel, is_needed=is_needed)
    # Before the model is opened: two models are never in memory together, and what the reference
    # says never changes, so it is asked once for all evaluations (docs/decisions/0038).
    ahead = {} if start is None else auxiliary_columns(start, world, dataset=dataset, limit=limit)
    opened, parts = adopt(open_evaluated(recipe, path, base, start, world, parallel), recipe)
    with world.main_first():  # which fills the cache
        sources = held_out(start or parts, dataset=dataset, limit=limit)
    others = {} if start is None else staying(start, parts.codec, world)
    results = [
        _evaluate(opened, parts, source, ahead.get(source.name), others, progress)
        for source in sources
    ]
    folder = None if path is None else opened.folder
    return EvaluationReport(BASE if folder is None else folder.name, results)


def _similarity(result: DatasetResult | EvaluationReport, compare: Compare) -> Mapping[str, float]:
    answers = result.answers
    if not answers:
        return {}
    return compare([each.answer for each in answers], [each.reference for each in answers])


def evaluated_path(recipe: Recipe, model: str | None, world: World) -> str | None:
    """Where the model to evaluate is; None: the recipe's own before training. Raises
    ``CheckpointError`` or ``ModelError``: there is none."""
    with world.main_first():  # which downloads what is elsewhere
        path = None if model == BASE else _path(recipe.train.output_dir, model)
        if path is not None:
            locate(path, reading=recipe.model.reading)  # what is missing is said before slow work
    return path


def parts_of_start(
    recipe: Recipe,
    world: World = ALONE,
    parallel: ParallelSection = PLAINLY,
    *,
    is_needed: bool = False,
) -> RunParts | None:
    """The parts of ``recipe`` around its own model: the model that is evaluated must not change
    what is held out. None if that does not exist any more, unless it ``is_needed``. A collective
    call. Raises ``ModelError``."""
    with world.main_first():  # which downloads
        try:
            return RunParts.to_measure(recipe, parallel)
        except ModelError as error:
            if is_needed:
                raise
            what = "the rows to evaluate on are those with trained tokens in this model's own words"
            fell_back(what, str(error), "may drop others than in training")
            return None


def adopt(opened: LoadedModel, recipe: Recipe) -> tuple[LoadedModel, RunParts]:
    """``opened`` with the recipe's settings, and the parts of the recipe around it; with its
    template, too, if the model has none. Raises ``RecipeError`` if ``data.cutoff_len`` is more than
    the model has positions."""
    if not recipe.stage.spec.gives_scores:
        refuse_scorer(opened)
    folder = Path(opened.inner.name_or_path)
    recipe = replace(recipe, data=fitted_data(recipe.data, opened.inner.config, folder))
    template = opened.template
    if not recipe.stage.uses_template:
        template = None
    elif template is None:
        template_of = optional_template if recipe.stage.reads_texts else section_template
        template = template_of(recipe.data, opened.tokenizer)
    adopted = replace(opened, recipe=recipe, template=template)
    if not recipe.stage.reads_pictures:
        adopted = replace(adopted, media=None, why_text=why_text())
    return adopted, RunParts.around(recipe, adopted.codec, folder)


def open_evaluated(
    recipe: Recipe,
    path: str | None,
    base: str | None,
    start: RunParts | None,
    world: World,
    parallel: ParallelSection,
) -> LoadedModel:
    """The model to evaluate; without a path, the one before training, of ``start``."""
    if path is None:
        assert start is not None
        return open_start(start, world)
    heads = recipe.stage.heads
    return open_to_measure(path, recipe.model, heads, base=base, world=world, parallel=parallel)


def _path(run: Address | Path, model: str | None) -> str:
    """The model to locate: the run itself, one of its checkpoints, or any other model."""
    if not isinstance(run, Path):
        is_own = (
            model is not None and model.startswith("checkpoint-") and not files.exists(Path(model))
        )
        return f"{run}/{model}" if is_own else model or str(run)
    if model is None:
        if not run.is_dir():
            raise CheckpointError(
                f"{run}: contains no trained model yet; run `surefoot train` first, or use "
                "--model base"
            )
        return str(run)
    if files.is_folder(run / model):
        return str(run / model)
    if model.startswith("checkpoint-") and not files.exists(Path(model)):
        checkpoints = ", ".join(path.name for path in named(run)) or "no checkpoint"
        raise CheckpointError(f"--model {model}: {run} has {checkpoints}")
    return model


def _evaluate(
    opened: LoadedModel,
    parts: RunParts,
    source: HeldOut,
    columns: Sequence[Features] | None,
    others: Mapping[str, Network],
    progress: Progress,
) -> DatasetResult:
    count = len(source.examples)
    with progress(f"{source.name}: loss", num_batches(parts, count)) as advance:
        metrics = measure(
            opened,
            parts,
            source.examples,
            columns=columns,
            others=others,
            on_batch=lambda: advance(1),
        )
    answers: list[Generation] = []
    if parts.stage.uses_template and not parts.stage.spec.gives_scores:
        with progress(f"{source.name}: answers", count) as advance:
            answers = generations(opened, parts, source.examples, on_answered=advance)
    return DatasetResult(source.name, count, metrics, answers)


logger = logging.getLogger(__name__)
UNCUT = 1_000_000_000  # tokens; more than any window
_ILLUSTRATED = 24  # prompts that the board shows; 70 kB a picture of noise would fill its file


@dataclass(frozen=True)
class Generation:
    """A prompt of the data, the expected response, and the model's response."""

    origin: str  # "dataset:row"
    prompt: str  # as the model reads it, control tokens and all
    reference: str
    answer: str
    pictures: Sequence[str] = ()  # thumbnails of those of the prompt, of the first prompts

    @property
    def is_match(self) -> bool:
        """Whether both are equal, except for white space at the ends."""
        return self.answer.strip() == self.reference.strip()


@dataclass(frozen=True)
class _Question:
    origin: str
    prompt: Ids
    reference: list[int]

    @property
    def thumbnails(self) -> list[str]:
        """Small copies of its pictures, as data URLs."""
        media = pictures_of(self.prompt)
        return [] if media is None else media.thumbnails()


def generations(
    opened: LoadedModel,
    parts: RunParts,
    examples: Sequence[Example],
    *,
    on_answered: Callable[[int], None] | None = None,
    output: Output | None = None,
    hides_special: bool = False,
) -> list[Generation]:
    """The model's own last response in every conversation that ends in one, in order, generated by
    the run's ``generate`` section after what precedes that response in training. Nothing is
    expected where the response in the data is marked undesirable. A prompt that fills the context
    length gets an empty response, and a warning is logged.

    Args:
        opened: the model.
        parts: the settings of the run, around it.
        examples: the conversations.
        on_answered: called with numbers of responses as they end.
        output: beside which the responses are stored as they are made, and from which those of an
            earlier attempt are taken; the caller writes it, and then removes them.
        hides_special: whether responses and references are without special tokens.
    """
    questions = _questions(opened, parts, examples)
    full = sum(room(opened.model, question.prompt) == 0 for question in questions)
    if full:
        prompts = counted(full, "prompt fills", "prompts fill")
        logger.warning("%s the model's context length; no response is generated", prompts)
    prompt_ids = [question.prompt for question in questions]
    # a metric should depend on ``batch_size`` and ranks as little as it can
    section, seed = replace(parts.generate, batch_invariant=True), parts.train.seed
    with autocast(parts.models.policy.options.precision, opened.device):
        samples = respond(opened, prompt_ids, section, seed, on_answered, output)
    decode = decoder(opened.tokenizer)
    read = decoder(opened.tokenizer, hides_special=hides_special)

    def shown(ids: Ids) -> Ids:
        """With one placeholder for each picture, not for each of its tokens."""
        media = opened.media.processor.token_ids if opened.media else frozenset()
        return [i for before, i in pairwise([-1, *ids]) if i not in media or i != before]

    return [
        Generation(
            q.origin,
            decode(shown(q.prompt)),
            read(q.reference),
            _text(sample, decode, read),
            q.thumbnails if number < _ILLUSTRATED else (),
        )
        for number, (q, sample) in enumerate(zip(questions, samples, strict=True))
    ]


def _text(sample: Sample, decode: Decode, read: Decode) -> str:
    """The text of a response as ``read`` decodes it; stop texts were found as ``decode`` does."""
    text_before_stop, ids = sample.text_before_stop, sample.ids
    if text_before_stop is None:
        return read(sample.text_ids)
    count = next(n for n in range(len(ids), -1, -1) if text_before_stop.startswith(decode(ids[:n])))
    return read(ids[:count]) + text_before_stop[len(decode(ids[:count])) :]


def _questions(
    opened: LoadedModel, parts: RunParts, examples: Sequence[Example]
) -> list[_Question]:
    """Split conversations where training does: before the last response's first label."""
    section = replace(
        parts.data,
        mask_history=True,
        train_on_prompt=False,
        cutoff_len=UNCUT,
        on_too_long="truncate",
    )
    codec = parts.codec.with_section(section)
    stops = frozenset(opened.stop_token_ids)
    questions = []
    examples = [answered(e, e.chosen) if e.chosen else e for e in examples if e.label is not False]
    for example, outcome in zip(examples, codec.encode_chats(examples), strict=True):
        if not isinstance(outcome, Dropped | Truncated):
            ids, labels = (list(outcome[-1][name]) for name in ("input_ids", "labels"))
            start, end = _last_span(labels)
            last = next((i for i in range(start, end) if ids[i] in stops), end)
            prompt = opened.with_pictures(ids[:start], seen_in(outcome[-1]))
            questions.append(_Question(example.origin, prompt, ids[start:last]))
    return questions


def _last_span(labels: Sequence[int]) -> tuple[int, int]:
    """The bounds of the last run of labels."""
    positions = [i for i, label in enumerate(labels) if label != IGNORE_INDEX]
    breaks = [b for a, b in pairwise(positions) if b > a + 1]
    return (breaks[-1] if breaks else positions[0]), positions[-1] + 1


METRIC_PACKAGES = ("jieba", "nltk", "rouge_chinese", "sacrebleu")  # the extra "metrics"
_ROUGES = ("rouge-1", "rouge-2", "rouge-l")


def comparison() -> Compare:
    """BLEU and ROUGE. Raises ``RunError``: their packages are not installed."""
    try:
        for package in METRIC_PACKAGES:
            import_module(package)
    except ImportError as error:
        raise RunError(
            f"BLEU and ROUGE need {error.name}, which is not installed: {installation('jieba')}"
        ) from None
    return similarity


def row_scores(response: str, reference: str) -> dict[str, float]:
    """BLEU-4 and the F measures of ROUGE of one response as LLaMA-Factory computes them, from 0 to
    100 with four digits: words by jieba for ROUGE, characters for BLEU-4 (nltk, smoothing 3)."""
    import jieba
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
    from rouge_chinese import Rouge

    jieba.setLogLevel(logging.WARNING)
    words, expected = (" ".join(jieba.cut(text)) for text in (response, reference))
    scores = dict.fromkeys(_ROUGES, 0.0)
    if words.split() and expected.split():
        (rouge,) = Rouge().get_scores(words, expected)
        scores = {name: rouge[name]["f"] for name in _ROUGES}
    smoothing = SmoothingFunction().method3
    bleu = sentence_bleu([list(reference)], list(response), smoothing_function=smoothing)
    return {name: round(100 * value, 4) for name, value in {**scores, "bleu-4": bleu}.items()}


def similarity(responses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """How similar responses, at least one, are to their references: the means of ``row_scores``
    over the responses, as LLaMA-Factory has them, and ``sacrebleu``, the BLEU of all of them as one
    corpus. sacrebleu's tokenizer is the one for Chinese if the references have Chinese
    characters."""
    from sacrebleu.metrics.bleu import BLEU

    rows = [row_scores(*pair) for pair in zip(responses, references, strict=True)]
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    is_chinese = any("\u4e00" <= letter <= "\u9fff" for text in references for letter in text)
    bleu = BLEU(tokenize="zh" if is_chinese else "13a")
    score = bleu.corpus_score(list(responses), [list(references)]).score
    return {**{name: means[name] for name in ("bleu-4", *_ROUGES)}, "sacrebleu": float(score)}
