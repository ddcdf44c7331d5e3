"""PPO from the command line: scored by a reward model, planned, exported; and wrong input."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surefoot
from commands import ok, refused
from project import Project, checkpoints, metrics, model_folder
from stage_data import REWARD
from surefoot.data.example import Example, Message
from surefoot.recipe.recipe import load
from surefoot.run.assembly import build
from surefoot.run.parts import RunParts
from surefoot.run.resolving import resolved
from surefoot.training.rewards import by_name
from surefoot.training.rollout import DatasetRow, Rollout
from surefoot.use.estimate._dry_run import build as dry_run
from surefoot.use.estimate._fake_tensors import HoldingOptions
from surefoot.use.estimate._rank_memory import initial_values_size

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"passes": 2, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A reward model's run: an adapter and a head."""
    made = Project(
        tmp_path_factory.mktemp("rm"),
        stage="rm",
        method={"lora": {"rank": 2}},
        data={"datasets": ["pairs"]},
        train={"max_steps": 4},
        optim={"adamw": {"learning_rate": 0.02}},
    )
    surefoot.train(made.recipe)
    return made


@pytest.fixture(scope="module")
def trained(reward_model, tmp_path_factory):
    """A run of two windows, scored by the reward model."""
    stage = {"reward": [{"reward_model": {"path": str(reward_model.run)}}], **SMALL}
    made = Project(
        tmp_path_factory.mktemp("ppo"),
        stage={"ppo": stage},
        method={"lora": {"rank": 2}},
        train={"max_steps": 4},
    )
    surefoot.train(made.recipe)
    return made


@pytest.mark.proof
def test_a_reward_model_scores_responses_as_predict_scores_them(trained, reward_model, tmp_path):
    said = (("user", "What is 1 plus 1?"), ("assistant", "It is 2."))
    chat = {"messages": [{"role": role, "content": text} for role, text in said]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    output = tmp_path / "scores.jsonl"
    ok("predict", reward_model.run, "--prompts", tmp_path / "chats.jsonl", "--output", output)
    expected = json.loads(output.read_text())["reward"]
    trainer = build(resolved(load(trained.recipe, [f"train.output_dir={tmp_path / 'other'}"])))
    context, stage = trainer.evaluation.context((0, 0)), trainer.stage
    example = Example(messages=tuple(Message(role, text) for role, text in said))
    ((item,),) = trainer.evaluation.context((0, 0)).codec.encode_chats([example])
    ids, labels = item["input_ids"], item["labels"]
    last = max(i for i, label in enumerate(labels) if label >= 0)
    is_sampled = tuple(label >= 0 for label in labels[: last + 1])
    rollout = Rollout(
        *(tuple(ids[: last + 1]), is_sampled, (0.0,) * (last + 1), is_sampled.index(True)),
        *(1.0, "stop", 0, DatasetRow({})),
    )
    longer = replace(rollout, ids=(*rollout.ids, 5), is_sampled=(*is_sampled, True))
    (found,) = context.reward(by_name(stage.reward), [rollout, longer], 10.0, "stop").by_reward
    assert found[0] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert found[1] != pytest.approx(expected, rel=1e-3)
    assert any("reward" in row and row["kl"] == 0 for row in metrics(trained.run))


def test_an_export_has_the_value_head_only_if_asked(trained, tmp_path):
    ok("export", trained.run, tmp_path / "plain")
    ok("export", trained.run, tmp_path / "valued", "--reward-head", "v_head")
    assert not (tmp_path / "plain" / "value_head.safetensors").exists()
    head = load_file(tmp_path / "valued" / "value_head.safetensors")
    assert head["v_head.summary.weight"].norm() > 0
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(told.values())


@pytest.mark.proof
def test_eval_measures_rewards_also_of_the_base_which_has_no_values(trained):
    data = f"data.eval_datasets={json.dumps(['sums'])}"
    for model in ([], ["--model", "base"]):
        found = json.loads(ok("eval", trained.recipe, data, "--limit", 4, "--json", *model))
        assert {"reward", "kl", "value_loss"} <= found.keys()
        assert (found["kl"] == 0) == bool(model)


def test_a_plan_counts_what_computes_beside_the_policy(trained, reward_model):
    base = trained.folder / "model"
    options = HoldingOptions("fp32", torch.float32)

    def sizes(*changes):
        recipe = resolved(load(trained.recipe, changes))
        policy = dry_run(RunParts.unopened(recipe), options)
        beside = [p for other in policy.others for p in other.module.parameters()]
        found = initial_values_size(policy, 1), sum(4 * p.numel() for p in beside)
        return found, 4 * policy.network.num_trainable

    function = f'stage.ppo.reward=["{REWARD}:varied"]'
    assert sizes(function, "stage.ppo.kl_coefficient=0")[0] == (0, 0)
    assert sizes(function)[0] == (0, 0)  # the base under the adapter
    found, trained_size = sizes(function, "method=full")
    assert found == (trained_size, 0)  # a copy in main memory
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(base).parameters())
    adapter = load_file(checkpoints(reward_model.run)[-1] / "adapter_model.safetensors")
    scorer = 4 * (whole + sum(tensor.numel() for tensor in adapter.values()))
    found, _ = sizes()
    assert found == (0, pytest.approx(scorer, rel=0.01))


def test_wrong_input_is_one_sentence(trained, tmp_path):
    plain = model_folder(tmp_path / "plain")
    other = model_folder(tmp_path / "other")
    words = json.loads((other / "tokenizer.json").read_text())
    words["added_tokens"].append({**words["added_tokens"][0], "id": 999, "content": "<more>"})
    (other / "tokenizer.json").write_text(json.dumps(words))
    folder = f"train.output_dir={tmp_path / 'run'}"
    beside = {
        "plain: not a reward model; train one with stage: rm": {"path": str(plain)},
        "absent', and it is not a hub id": {"path": str(tmp_path / "absent")},
    }
    rewards = {words: [{"reward_model": model}] for words, model in beside.items()}
    rewards["has no column 'absent'"] = [{"exact_match": {"column": "absent"}}]
    for expected, reward in rewards.items():
        change = f"stage.ppo.reward={json.dumps(reward)}"
        told = refused("train", trained.recipe, folder, change)
        assert expected in told.splitlines()[-1]
    told = refused("train", trained.recipe, folder, f"stage.ppo.reference={other}")
    assert "has a different tokenizer" in told
    assert not list((tmp_path / "run").glob("checkpoint-*"))


@pytest.mark.proof
def test_the_demos_model_learns_a_rule_that_it_was_never_shown(tmp_path, monkeypatch):
    """About three minutes on two cores."""
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("runs", "cluster"))
    monkeypatch.chdir(folder)
    ok("train", "quickstart.yaml")
    before = json.loads(ok("eval", "ppo.yaml", "--model", "base", "--json"))
    ok("train", "ppo.yaml")
    after = json.loads(ok("eval", "ppo.yaml", "--json"))
    assert before["reward"] < 0.3
    assert after["reward"] > 0.9
