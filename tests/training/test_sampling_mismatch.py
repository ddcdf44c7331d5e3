"""The distance of sampled and trained log-probabilities: its figures, its causes, its size."""

import numpy as np
import pytest
import torch

from answering import sample
from surefoot.batch import Outputs
from surefoot.generate.section import GenerateSection
from surefoot.generate.servers import Engine
from surefoot.training.conversations import mismatch, sampling_figures
from surefoot.training.rollout import DatasetRow, Rollout
from tiny import model

SECTION = GenerateSection(max_new_tokens=24, do_sample=True, temperature=0.7, batch_size=4)


class Passes:
    """Computes log-probabilities in one pass over a rollout."""

    def __init__(self, network, temperature):
        self.network, self.temperature, self.count = network, temperature, 0

    def compute(self, role, examples):
        assert role == "policy"
        found = []
        for item in examples:
            ids, labels = torch.tensor([item["input_ids"]]), np.array(item["labels"])
            with torch.no_grad():
                logits = self.network(ids, use_cache=False).logits[0] / self.temperature
            at = np.flatnonzero(labels >= 0)
            logps = logits.log_softmax(-1)[at - 1, labels[at]]
            found.append(Outputs(logps=logps))
            self.count += 1
        return found


def rollouts(network, count=40):
    prompts = [[5, 9, n % 60] for n in range(count)]
    found = sample(network, prompts, SECTION, stop_token_ids=[2], seed=0)
    return [
        Rollout(
            ids=(*prompt, *found[n].ids),
            is_sampled=(False,) * 3 + (True,) * len(found[n].ids),
            logps=(0.0,) * 3 + found[n].logps,
            num_prompt=3,
            temperature=0.7,
            stop_reason=found[n].finish_reason,
            group=n,
            row=DatasetRow({}),
        )
        for n, prompt in enumerate(prompts)
    ]


def test_the_figures_are_those_of_the_formulas():
    sampled, trained = np.log([0.5, 0.2, 0.9]), np.log([0.4, 0.3, 0.9])
    figures = mismatch(sampled, trained).figures
    gaps = [np.log(5 / 4), np.log(3 / 2), 0]
    assert figures["sampling_gap"] == pytest.approx(np.mean(gaps))
    assert figures["sampling_gap_max"] == pytest.approx(np.log(3 / 2))
    ratios = np.array([0.8, 1.5, 1.0])
    assert figures["sampling_kl"] == pytest.approx(np.mean(ratios - 1 - np.log(ratios)))


def test_samples_of_the_policy_differ_by_rounding(caplog):
    network = model("qwen3")
    passes = Passes(network, 0.7)
    figures = sampling_figures(passes, "policy", rollouts(network), Engine())
    assert figures["sampling_gap"] < 1e-6
    assert figures["sampling_gap_max"] < 1e-5
    assert abs(figures["sampling_kl"]) < 1e-9
    assert passes.count <= 16
    assert not caplog.records


def test_samples_of_other_weights_or_temperatures_are_told(caplog):
    network = model("qwen3")
    said = rollouts(network)
    with torch.no_grad():
        network.lm_head.weight.mul_(3)
    sampling_figures(Passes(network, 0.7), "policy", said, Engine())
    assert "without the adapter" in caplog.text


@pytest.mark.parametrize(
    ("differences", "cause"),
    [([0.04] * 9, None), ([0.0] * 9 + [3.0], "few tokens"), ([np.inf, 0.0], "not finite")],
)
def test_a_cause_is_named_beyond_a_bound(differences, cause):
    found = mismatch(differences, [0.0] * len(differences)).cause
    assert found is None if cause is None else cause in found


def test_responses_without_tokens_have_no_figures():
    assert sampling_figures(Passes(None, 1.0), "policy", [], Engine()) == {}
