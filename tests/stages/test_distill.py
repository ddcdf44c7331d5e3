"""Distillation's loss and windows: whose tokens count how much, and which rows are sampled."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from stage_data import examples_of
from surefoot.batch import Outputs
from surefoot.data.section import DataSection
from surefoot.errors import RecipeError
from surefoot.generate.generation import Sample
from surefoot.parallel.section import ParallelSection
from surefoot.schema import read
from surefoot.stages._distill import Distill, prompt_of, sampled_rows


@dataclass
class Student:
    """A context whose policy answers with the tokens 60, 61, ... as many as the prompt has."""

    seed: int
    asked: list = field(default_factory=list)

    def generate(self, prompts, settings):
        self.asked.append((prompts, settings))
        return [
            Sample(tuple(range(60, 60 + len(p))), (0.0,) * len(p), "stop" if i else "length")
            for i, p in enumerate(prompts)
        ]


def stage(**settings):
    return Distill(**{"on_policy": 0.5, "max_new_tokens": 9, "sft_weight": 0.5, **settings})


@pytest.mark.parametrize("packing", [True, False])
def test_own_tokens_have_the_divergence_alone(packing):
    items, context = list(examples_of("distill", 8)), Student(seed=4)
    made = stage()
    window = made.prepare(context, items)
    ((prompts, settings),) = context.asked
    assert (settings.do_sample, settings.max_new_tokens) == (True, 9)
    rows = sampled_rows(8, 0.5, 4)
    assert prompts == [prompt_of(items[row]) for row in rows]
    assert window.figures["completions_clipped"] == 1 / 4
    for row, (before, after) in enumerate(zip(items, window.examples, strict=True)):
        is_own = 60 in after["input_ids"]
        assert is_own == (row in rows)
        if not is_own:
            assert after["labels"] == np.asarray(before["labels"]).tolist()
    batch = made.collate(window.examples, packing=packing)
    count = batch.num_trained
    of_dataset = [x for item in window.examples for x in item["of_dataset"]]
    torch.manual_seed(0)
    logps = -torch.rand(count, dtype=torch.float64)
    divergences = torch.rand(count, dtype=torch.float64)
    loss = made.loss("policy", Outputs(logps=logps, divergences=divergences), batch)
    expected = sum(
        d - 0.5 * logp * of
        for d, logp, of in zip(divergences.tolist(), logps.tolist(), of_dataset, strict=True)
    )
    assert float(loss.total) == pytest.approx(expected, rel=1e-12)
    assert int(loss.weight) == count == len(of_dataset)
    parts = loss.metrics["divergence"] + 0.5 * loss.metrics["sft_loss"]
    assert float(parts) == pytest.approx(expected)


def test_without_own_responses_a_window_is_as_it_was_loaded():
    items = examples_of("distill", 4)
    assert Distill().prepare(Student(1), items).examples is items
    batch = Distill().collate(list(items), packing=True)
    divergences = torch.rand(batch.num_trained)
    loss = Distill().loss("policy", Outputs(divergences=divergences), batch)
    assert loss.total == divergences.sum()


def test_the_sampled_rows_are_a_function_of_the_seed_and_their_share_is_right_on_average():
    assert sampled_rows(7, 0.3, 5) == sampled_rows(7, 0.3, 5)
    assert sampled_rows(7, 0.0, 5) == []
    assert sampled_rows(7, 1.0, 5) == list(range(7))
    found = [sampled_rows(7, 0.3, seed) for seed in range(2000)]
    assert {len(rows) for rows in found} == {2, 3}
    assert np.mean([len(rows) for rows in found]) == pytest.approx(2.1, abs=0.05)
    counts = np.bincount([row for rows in found for row in rows], minlength=7)
    assert counts / 2000 == pytest.approx(0.3, abs=0.05)


def test_a_prompt_ends_where_the_last_response_begins():
    labels = [-100, -100, 3, -100, 5, 6]
    assert prompt_of({"input_ids": [1, 2, 3, 4, 5, 6], "labels": labels}) == [1, 2, 3, 4]
    later = [-100, 2, -100, -100]
    assert prompt_of({"input_ids": [1, 2, 3, 4], "labels": later}) == [1]
    assert prompt_of({"input_ids": [1, 2], "labels": [1, 2]}) == [1]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"temperature": 0}, "temperature"),
        ({"beta": 1}, "forward_kl"),
        ({"on_policy": 1.5, "max_new_tokens": 2}, "on_policy"),
        ({"on_policy": 0.5}, "max_new_tokens: must be at least 1"),
        ({"max_new_tokens": 5}, "no effect without on_policy"),
        ({"sft_weight": -1}, "sft_weight"),
        ({"sampling_batch_size": 0}, "sampling_batch_size"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings, word):
    with pytest.raises(RecipeError, match=word):
        read(Distill, settings)


def test_settings_of_other_sections_that_do_not_go_are_named():
    data = DataSection(datasets=("any",), train_on_prompt=True)
    parallel = ParallelSection(tp=2, pp=2)
    found = [problem.path for problem in stage().problems(data, parallel)]
    assert found == [("data", "train_on_prompt"), ("parallel", "tp"), ("parallel", "pp")]
    assert not list(Distill(sft_weight=1).problems(data, ParallelSection()))


@pytest.mark.parametrize("settings", [{}, {"on_policy": 0.5, "max_new_tokens": 4}])
def test_a_student_that_is_its_own_teacher_is_refused(settings):
    data = DataSection(datasets=("any",))
    (problem,) = Distill(**settings).problems(data, ParallelSection())
    assert "nothing can be learned from it" in str(problem)
    for cure in ({"teacher": "another"}, {"sft_weight": 0.1}):
        assert not list(Distill(**settings, **cure).problems(data, ParallelSection()))
