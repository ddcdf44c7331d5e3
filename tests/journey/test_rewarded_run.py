"""A run by rewards through the CLI: tried before it, its rollouts kept and shown, evaluated."""

import json
import math

import pytest

import surefoot
from commands import ok, refused
from project import Project, metrics
from stage_data import REWARD

STAGE = {
    "reward": [f"{REWARD}:varied", {"length": {"soft_limit": 2, "hard_limit": 6, "weight": 0.5}}],
    "group_size": 3,
    "max_new_tokens": 5,
    "beta": 0.1,
    "sampling_batch_size": 4,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewarded")
    project = Project(
        folder,
        stage={"grpo": STAGE},
        method={"lora": {"rank": 2}},
        data={"datasets": ["sums"], "val_size": 0.25},
        train={"max_steps": 4, "eval_steps": 2},
    )
    surefoot.train(project.recipe)
    return project


def test_each_reward_has_its_figure_and_the_reference_its_divergence(made):
    found = metrics(made.run)
    row = next(one for one in found if "loss" in one)
    assert row["reward"] == pytest.approx(row["rewards/varied"] + 0.5 * row["rewards/length"])
    assert row["kl"] == pytest.approx(0, abs=1e-6)  # the policy is still the reference
    assert next(one for one in reversed(found) if "kl" in one)["kl"] > 1e-6


def test_what_was_sampled_is_what_is_trained_to_rounding(made):
    gaps = [row["sampling_gap_max"] for row in metrics(made.run) if "sampling_gap_max" in row]
    assert gaps
    assert max(gaps) < 1e-5


def test_the_first_prompts_of_an_evaluation_are_kept_and_shown(made):
    assert sorted(p.name for p in made.run.glob("rollouts-*")) == [
        "rollouts-2.jsonl",
        "rollouts-4.jsonl",
    ]
    rows = [json.loads(line) for line in ok("rollouts", made.run, "--json").splitlines()]
    assert len({row["origin"] for row in rows}) == 4
    assert len(rows) == 4 * 3
    for row in rows:
        parts = row["rewards"]
        assert row["reward"] == pytest.approx(parts["varied"] + 0.5 * parts["length"])
        for token in row["tokens"]:  # sampled as they are trained
            assert token["sampled"] == pytest.approx(token["trained"], abs=1e-4)
    group = [row["advantage"] for row in rows if row["origin"] == rows[0]["origin"]]
    assert math.fsum(group) == pytest.approx(0, abs=1e-9)
    told = ok("rollouts", made.run, "--step", 2, "-n", 2)
    assert "step 2: 12 rollouts, 2 shown" in told
    assert "advantage" in told
    assert "steps 2, 4" in refused("rollouts", made.run, "--step", 3)
    assert "has no rollouts-STEP.jsonl" in refused("rollouts", made.folder)


@pytest.mark.proof
def test_a_run_can_be_evaluated_with_its_reference(made):
    found = json.loads(ok("eval", made.recipe, "--limit", 2, "--json"))
    assert {"reward", "kl"} <= found.keys()


def test_rewards_are_tried_before_a_run(made):
    found = json.loads(ok("reward", "check", made.recipe, "--samples", 2, "--json"))
    assert [one["name"] for one in found["rewards"]] == ["varied", "length"]
    assert all(one["num_changed"] == one["num_missing"] == 0 for one in found["rewards"])
    assert found["num_groups"] == 2
    assert len(found["responses"]) == 6
    told = ok(
        "reward", "check", made.recipe, f"stage.grpo.reward={REWARD}:restless", "--samples", 2
    )
    assert "restless: from" in told
    assert "NOT deterministic: 6 changed" in told
    told = ok("reward", "check", made.recipe, f"stage.grpo.reward={REWARD}:flat", "--samples", 2)
    assert "2 groups, 2 with equal rewards" in told
    told = refused("reward", "check", made.recipe, "stage=sft")
    assert "nothing is sampled and rewarded" in told


def test_a_reward_that_fails_stops_a_run_before_a_step_and_names_it(made, tmp_path):
    other = [f"train.output_dir={tmp_path / 'run'}", f"stage.grpo.reward={REWARD}:short"]
    told = refused("train", made.recipe, *other)
    assert "stage_rewards.py:short: gave 1 reward" in told
    told = refused("train", made.recipe, other[0], "stage.grpo.reward=nowhere.py:f")
    assert "there is no Python file" in told
    told = refused(
        "train", made.recipe, other[0], "stage.grpo.reward=[{exact_match: {column: gold}}]"
    )
    assert "the dataset has no column 'gold' (its columns: instruction, output)" in told
