"""A model as lm-eval 0.4 asks models: likelihoods behind shared contexts, and generation in slots.

The requests have the tokens that lm-eval's own Hugging Face backend gives them, so figures are the
same up to the rounding of sums.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval import evaluate, utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.tasks import TaskManager

from ..errors import RunError, counted, did_you_mean
from ..generate.likelihood import Likelihood, LikelihoodStore, Question, likelihoods, share_of
from ..generate.section import GenerateSection
from ..network.network import Network
from .model_loading import LoadedModel, refuse_scorer
from .prediction import KeyedResults, Output, ResultJournal, open_results, samples_in

logger = logging.getLogger(__name__)
_SEED = 1234  # lm-eval's own
_SAMPLING_SEED = 42  # ours, as in predict
_MOST = 256  # tokens of a response, unless its task says otherwise
_READ = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
Pair = tuple[tuple[int, ...], tuple[int, ...]]
Encoded = tuple[tuple[str, str] | None, Sequence[int], Sequence[int]]


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Answers lm-eval's requests with a ``LoadedModel``. Each rank answers all of them: the
    network divides them among its replicas."""

    def __init__(self, opened: LoadedModel, journal: ResultJournal, *, batch_size: int) -> None:
        super().__init__()
        refuse_scorer(opened)
        self.opened, self.journal = opened, journal
        self.tokenizer = opened.tokenizer
        self._batch_size = batch_size
        self.num_truncated = 0  # contexts that were too long

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token_id: int = self.tokenizer.eos_token_id
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def max_length(self) -> int:
        """The model's context length."""
        return int(resolve_max_length(self.opened.inner.config, self.tokenizer, default=2048))

    @property
    def tokenizer_name(self) -> str:
        """Names the chat template, in lm-eval's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, by the model's chat template."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """The ids of a text, without a second beginning if it has one."""
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        beginning = self.tokenizer.decode(self.prefix_token_id)
        if add_special_tokens is None and string.startswith(beginning):
            options = {"add_special_tokens": False}
        ids: list[int] = self.tokenizer(string, verbose=False, **options)["input_ids"]
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **kwargs: object
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the greedy one. Requests with
        the same context share it."""
        pairs = [self._fitted(context, end) for _, context, end in requests]
        # lm-eval's own backend computes a context again for every choice, unless all choices have
        # one token; the examples that all questions of a subject begin with, too
        # (docs/decisions/0061).
        groups: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for context, end in pairs:
            groups.setdefault(context, {})[end] = None
        questions = [Question(context, tuple(ends)) for context, ends in groups.items()]
        keys = [_key("loglikelihood", q.prompt, q.continuations) for q in questions]
        results = network_likelihoods(
            self.opened.network,
            questions,
            batch_size=self._batch_size,
            store=KeyedResults(self.journal, keys, _as_pairs, _of_pairs),
        )
        likelihood_of = {
            (question.prompt, end): (likelihood.logp, likelihood.is_greedy)
            for question, of_question in zip(questions, results, strict=True)
            for end, likelihood in zip(question.continuations, of_question, strict=True)
        }
        return [likelihood_of[pair] for pair in pairs]

    def _fitted(self, context: Sequence[int], end: Sequence[int]) -> Pair:
        """Without the beginning of the context that exceeds the model's positions."""
        most = self.max_length + 1 - len(end)  # the last token is not computed
        if most < 1:
            raise RunError(
                f"a continuation has {len(end):,} tokens, the model's context length is "
                f"{self.max_length:,}; leave its task out"
            )
        self.num_truncated += len(context) > most
        return tuple(context[-most:]), tuple(end)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each text, in windows as long as the model's context."""
        windows: list[Encoded] = []
        counts: list[int] = []
        for (text,) in (request.args for request in requests):
            token_windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            disjoint = [(None, *utils.make_disjoint_window(window)) for window in token_windows]
            windows += disjoint
            counts.append(len(disjoint))
        logps = iter(self._loglikelihood_tokens(windows))
        return [sum(next(logps)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """A response to each context, up to the first of the texts that end it."""
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        for gen_kwargs, members in groups.items():
            contexts = [requests[index].args[0] for index in members]
            responses = self._generated(contexts, json.loads(gen_kwargs))
            texts |= zip(members, responses, strict=True)
        return [texts[index] for index in range(len(requests))]

    def _generated(self, contexts: Sequence[str], gen_kwargs: Mapping[str, Any]) -> list[str]:
        settings = normalize_gen_kwargs(dict(gen_kwargs), _MOST)
        eos = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(settings.pop("until", None), eos=eos)
        section = self._section(settings)
        room = self.max_length - section.max_new_tokens
        if room < 1:
            raise RunError(
                f"max_gen_toks: {section.max_new_tokens:,} of a task leaves no room in the model's "
                f"context of {self.max_length:,} tokens"
            )
        prompts = [self.tok_encode(text) for text in contexts]
        self.num_truncated += sum(len(prompt) > room for prompt in prompts)
        section = replace(section, stop=tuple(filter(None, until)))
        responses = self._responses([tuple(prompt[-room:]) for prompt in prompts], section)
        return [str(postprocess_generated_text(text, until, None)) for text in responses]

    def _section(self, settings: Mapping[str, Any]) -> GenerateSection:
        """The settings of a task, over those that the model was saved with. Raises ``RunError``:
        one of them is not supported."""
        most = int(settings["max_gen_toks"])
        supported = {name: settings[name] for name in _READ if settings.get(name) is not None}
        if unknown := sorted(settings.keys() - {*_READ, "max_gen_toks"}):
            raise RunError(
                f"generation_kwargs: {unknown[0]} of a task is not supported; leave its task out"
            )
        saved_penalty = self.opened.inner.generation_config.repetition_penalty
        penalty = supported.get("repetition_penalty") or saved_penalty or 1.0
        is_greedy = not supported.get("do_sample") or supported.get("temperature") == 0
        options = {**({} if is_greedy else supported), "repetition_penalty": penalty}
        options["batch_invariant"] = True  # as all evaluations
        return GenerateSection(max_new_tokens=most, batch_size=self._batch_size, **options)

    def _responses(self, prompts: Sequence[tuple[int, ...]], section: GenerateSection) -> list[str]:
        """Their texts, up to the token that completes a text that ends them."""
        seen: dict[tuple[int, ...], int] = {}
        keys = []
        for prompt in prompts:  # equal prompts have samples of their own
            seen[prompt] = number = seen.get(prompt, -1) + 1
            keys.append(_key("generate", prompt, {**asdict(section), "batch_size": 0}, number))
        samples = self.opened.network.generate(
            prompts,
            section,
            seed=_SAMPLING_SEED,
            stop_token_ids=(self.eot_token_id,),
            decode=self._text,
            store=samples_in(self.journal, keys, self._text),
        )
        return [self._text(sample.ids) for sample in samples]

    def _text(self, ids: Sequence[int]) -> str:
        """What lm-eval reads: without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _as_pairs(likelihoods: Sequence[Likelihood]) -> list[list[object]]:
    return [[likelihood.logp, likelihood.is_greedy] for likelihood in likelihoods]


def _of_pairs(pairs: Sequence[Any]) -> list[Likelihood]:
    return [Likelihood(*pair) for pair in pairs]


def _key(*request: object) -> str:
    return hashlib.blake2b(json.dumps(request).encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class TaskSettings:
    """Which tasks of lm-eval, and how they ask."""

    names: Sequence[str]
    include_path: Path | None = None  # a folder with YAML files of tasks
    shots: int | None = None  # examples before each row; None: as the task says
    limit: int | None = None  # rows of each task
    is_chat: bool = False  # whether the model's chat template is applied


def run_tasks(
    opened: LoadedModel, settings: TaskSettings, *, output: Output, batch_size: int
) -> dict[str, Any]:
    """lm-eval's results, on every rank; those of requests are stored beside ``output`` as they are
    computed. Raises ``RunError``: there is no such task, its data cannot be read, or it asks for
    what is not supported."""
    manager = _manager(settings)
    try:
        tasks = manager.load(list(settings.names))
    except OSError as error:
        raise RunError(f"--tasks: the data of a task cannot be read: {error}") from None
    for task in tasks["tasks"].values():
        _prepare(task, settings.shots)
    journal = open_results(output, opened, ["lm-eval"])
    model = HarnessModel(opened, journal, batch_size=batch_size)
    # As lm_eval.simple_evaluate seeds them: else few-shot examples differ from its own figures.
    random.seed(0)
    np.random.seed(_SEED)
    results = evaluate(
        model,
        tasks,
        limit=settings.limit,
        apply_chat_template=settings.is_chat,
        fewshot_as_multiturn=settings.is_chat,
    )
    if model.num_truncated:
        logger.warning(
            "%s longer than the model's context: its beginning is truncated",
            counted(model.num_truncated, "context is", "contexts are"),
        )
    return dict(results)


def _prepare(task: Any, shots: int | None) -> None:
    """Set the examples as lm-eval does: a task that excludes them keeps to that."""
    task_shots = task.get_config("num_fewshot")
    if shots is not None and task_shots == 0 != shots:
        logger.warning("%s has no examples by its own settings; --shots is ignored", task.task_name)
    elif shots is not None:
        task.set_config(key="num_fewshot", value=shots)
    elif task_shots is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_SEED)


def _manager(settings: TaskSettings) -> TaskManager:
    """The tasks that lm-eval knows, with those of a folder. Raises ``RunError``: a name is not
    among them."""
    folder = settings.include_path
    if folder is not None and not folder.is_dir():
        raise RunError(f"--include-path {folder}: there is no such folder")
    if folder is not None:
        folder_manager = TaskManager(include_path=str(folder), include_defaults=False)
        if set(settings.names) <= set(folder_manager.all_subtasks):
            return folder_manager  # lm-eval's thousands of files take eight seconds to read
    manager = TaskManager(include_path=None if folder is None else str(folder))
    for name in settings.names:
        if not manager.match_tasks([name]):
            hint = did_you_mean(name, manager.all_tasks)
            raise RunError(f"--tasks: lm-eval has no task {name!r}{hint}")
    return manager


def sample_rows(results: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """A line for each row of each task: the row, the responses and the metrics."""
    for task, samples in results["samples"].items():
        for sample in sorted(samples, key=lambda row: (row["doc_id"], str(row.get("filter")))):
            plain = json.loads(json.dumps(sample, default=str))
            names = ("doc_id", "filter", "target", "resps", "filtered_resps", *sample["metrics"])
            fields = {name: plain[name] for name in names if name in plain}
            yield {"task": task, **fields, "doc": plain["doc"]}


@torch.no_grad()
def network_likelihoods(
    network: Network,
    questions: Sequence[Question],
    *,
    batch_size: int,
    store: LikelihoodStore | None = None,
) -> list[list[Likelihood]]:
    """The likelihoods of the continuations of all ``questions``, in order, on every rank. A
    collective call; questions are divided among the replicas. ``store`` gets their likelihoods.
    Raises ``RecipeError`` as ``Network.generate``."""
    results = {} if store is None else dict(store.known)
    of_replica = share_of(questions, network.share.index, network.share.count)
    pending = [i for i in of_replica if i not in results]
    unsaved: dict[int, list[Likelihood]] = {}
    with network.evaluating(), network.engine.generating(network.inner, network.world):
        waiting = [questions[i] for i in pending]
        for place, of_question in likelihoods(network.module, waiting, batch_size=batch_size):
            results[pending[place]] = unsaved[pending[place]] = of_question
            if store is not None and len(unsaved) >= batch_size:
                store.add(unsaved)
                unsaved = {}
    if store is not None and unsaved:
        store.add(unsaved)
    of_all_ranks: dict[int, list[Likelihood]] = {}
    for of_rank in network.world.gathered(results):
        of_all_ranks |= of_rank
    return [of_all_ranks[i] for i in range(len(questions))]
