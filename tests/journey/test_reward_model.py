"""A reward model, from pairs to rewards that transformers computes, too."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import surefoot
from commands import ok, refused
from project import Project
from surefoot.use.exporting.receipt import identity_of

METHODS = {"full": "full", "lora": {"lora": {"rank": 2}}}


@pytest.fixture(scope="module", params=[pytest.param("full", marks=pytest.mark.proof), "lora"])
def trained(request, tmp_path_factory):
    """A run, the file of its pairs, and their rewards."""
    folder = tmp_path_factory.mktemp(request.param)
    made = Project(
        folder,
        stage="rm",
        method=METHODS[request.param],
        data={"datasets": ["pairs"], "val_size": 0.25},
        train={"max_steps": 12, "eval_steps": 6},
        optim={"adamw": {"learning_rate": 0.02}},
    )
    surefoot.train(made.recipe)
    pairs, scores = folder / "data" / "pairs.jsonl", folder / "scores.jsonl"
    told = ok("predict", made.run, "--prompts", pairs, "--output", scores)
    assert "rewards of 48 responses" in told
    return made, pairs, [json.loads(line) for line in scores.read_text().splitlines()]


def texts(rows, tokenizer):
    """Each conversation up to the end token of its response, and our reward of it."""
    for row in rows:
        for kind in ("chosen", "rejected"):
            said = (row["instruction"], row[kind])
            roles = zip(("user", "assistant"), said, strict=True)
            chat = [{"role": role, "content": text} for role, text in roles]
            text = tokenizer.apply_chat_template(chat, tokenize=False)
            yield text.rstrip("\n"), row[f"reward_{kind}"]


def test_what_is_exported_gives_the_same_rewards_in_transformers(trained, tmp_path):
    made, _, rows = trained
    ok("export", made.run, tmp_path / "out")
    model, told = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(told.values())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    said, ours = zip(*texts(rows, tokenizer), strict=True)
    assert len(set(ours)) > 20  # rewards that all differ would be of one place
    with torch.no_grad():
        theirs = [float(model.eval()(**one).logits) for one in encoded(said, tokenizer)]
    assert theirs == pytest.approx(ours, rel=1e-4, abs=1e-5)
    with pytest.raises(ValueError, match="no padding token"):  # it has none but the end token
        model(**tokenizer(list(said), return_tensors="pt", padding="max_length", max_length=50))


def encoded(texts, tokenizer):
    return [tokenizer(t, return_tensors="pt", add_special_tokens=False) for t in texts]


def test_a_value_head_lies_beside_a_language_model_as_llamafactory_has_it(trained, tmp_path):
    made, _, _ = trained
    ok("export", made.run, tmp_path / "out", "--reward-head", "v_head")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    head = load_file(tmp_path / "out" / "value_head.safetensors")
    own = load_file(tmp_path / "out" / "model.safetensors")
    width = own["model.embed_tokens.weight"].shape[1]
    assert {name: tuple(tensor.shape) for name, tensor in head.items()} == {
        "v_head.summary.weight": (1, width),
        "v_head.summary.bias": (1,),
    }
    assert head["v_head.summary.weight"].norm() > 0 == head["v_head.summary.bias"].norm()


@pytest.mark.parametrize("head", [pytest.param("score", marks=pytest.mark.proof), "v_head"])
def test_rewards_of_what_is_exported_are_verified(trained, head, tmp_path):
    made, _, _ = trained
    out = tmp_path / "out"
    told = ok("export", made.run, out, "--reward-head", head)
    assert "verified: the rewards of 12 fixed conversations" in told
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["verified"]["passed"]
    assert receipt["verified"]["difference"] < 1e-4 < receipt["verified"]["largest"]
    name = {"score": "model", "v_head": "value_head"}[head]
    path = out / f"{name}.safetensors"
    wrong = load_file(path)
    key = next(k for k in wrong if k.endswith(("score.weight", "v_head.summary.weight")))
    wrong[key] = -wrong[key]
    save_file(wrong, path, metadata={"format": "pt"})
    receipt["files"][path.name] = {"size": path.stat().st_size, "hash": identity_of(path).hash}
    (out / "receipt.json").write_text(json.dumps(receipt))
    assert "does not compute what its checkpoint does" in refused("export", "verify", out, code=1)


def test_eval_says_how_many_pairs_are_in_order_and_no_answers_are_written(trained):
    made, _, _ = trained
    found = json.loads(ok("eval", made.recipe, "--json"))
    assert 0 <= found["rewards/accuracies"] <= 1
    assert "answers" not in found
    last = json.loads((made.run / "all_results.json").read_text())
    assert found["loss"] == pytest.approx(last["eval_loss"], rel=1e-4)


def test_conversations_are_scored_and_a_row_without_a_response_is_named(trained, tmp_path):
    made, _, rows = trained
    chats, output = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    user = {"role": "user", "content": rows[0]["instruction"]}
    answer = {"role": "assistant", "content": rows[0]["chosen"]}
    chats.write_text(json.dumps({"messages": [user, answer], "id": 7}) + "\n")
    ok("predict", made.run, "--prompts", chats, "--output", output)
    found = json.loads(output.read_text())
    assert found["id"] == 7
    assert found["reward"] == pytest.approx(rows[0]["reward_chosen"], rel=1e-4, abs=1e-5)
    chats.write_text(json.dumps({"messages": [user]}) + "\n")
    told = refused("predict", made.run, "--prompts", chats, "--output", output, "--force")
    assert "row 0" in told and "no response" in told
    assert json.loads(output.read_text()) == found


def test_it_does_not_talk(trained):
    made, _, _ = trained
    told = refused("chat", made.run, "--prompt", "Hi")
    assert "a reward model scores responses" in told


@pytest.mark.parametrize("head", [pytest.param("score", marks=pytest.mark.proof), "v_head"])
def test_a_reward_model_of_other_tools_is_trained_further_and_scores_alone(trained, head, tmp_path):
    made, pairs, rows = trained
    ok("export", made.run, tmp_path / "out", "--reward-head", head)
    more = Project(
        tmp_path / "more",
        stage="rm",
        method="full",
        data={"datasets": ["pairs"], "val_size": 0.25},
        train={"max_steps": 1},
        optim={"adamw": {"learning_rate": 1e-9}},
    )
    surefoot.train(more.recipe, **{"model.path": str(tmp_path / "out")})
    ok("predict", more.run, "--prompts", pairs, "--output", tmp_path / "again.jsonl")
    if head == "score":
        ok("predict", tmp_path / "out", "--prompts", pairs, "--output", tmp_path / "alone.jsonl")
    for found in tmp_path.glob("*.jsonl"):
        again = [json.loads(line) for line in found.read_text().splitlines()]
        for kind in ("reward_chosen", "reward_rejected"):
            ours, theirs = ([row[kind] for row in each] for each in (again, rows))
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


def test_a_reward_model_of_transformers_has_nothing_to_say(trained, tmp_path):
    made, _, _ = trained
    ok("export", made.run, tmp_path / "out")
    told = refused("chat", tmp_path / "out", "--prompt", "Hi")
    assert "a reward model scores responses" in told
    changes = (
        "stage=sft",
        f"model.path={tmp_path / 'out'}",
        f"train.output_dir={tmp_path / 'run'}",
    )
    told = refused("train", made.recipe, "data.datasets=[sums]", *changes)
    assert "no output head for tokens" in told
    pairs = ("stage=dpo", f"stage.dpo.reference={tmp_path / 'out'}")
    told = refused("train", made.recipe, *pairs, f"train.output_dir={tmp_path / 'run'}")
    assert "no output head for tokens" in told
    sums = ("stage=sft", "data.datasets=[sums]")
    told = refused("eval", made.recipe, *sums, "--model", tmp_path / "out")
    assert "a reward model scores responses" in told


def test_it_rewards_the_rollouts_of_another_run(trained, tmp_path):
    """As transformers computes its score at the last token of each."""
    made, _, _ = trained
    stage = {"reward": {"reward_model": {"path": str(made.run)}}, "group_size": 2}
    ours = Project(
        tmp_path / "policy",
        stage={"grpo": {**stage, "max_new_tokens": 6}},
        model={"path": str(made.folder / "model")},
        data={"datasets": ["sums"], "val_size": 0.2},
        train={"max_steps": 1, "eval_steps": 1},
    )
    surefoot.train(ours.recipe)
    rows = [json.loads(line) for line in (ours.run / "rollouts-1.jsonl").read_text().splitlines()]
    ok("export", made.run, tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    rewards = [row["rewards"]["reward_model"] for row in rows]
    assert len(set(rewards)) > 3
    with torch.no_grad():
        for row, reward in zip(rows, rewards, strict=True):
            ids = [*row["prompt_ids"], *(token["id"] for token in row["tokens"])]
            assert float(model(torch.tensor([ids])).logits) == pytest.approx(reward, abs=1e-4)
    assert "reward" in json.loads(ok("eval", ours.recipe, "--limit", 2, "--json"))
    found = json.loads(ok("reward", "check", ours.recipe, "--samples", 2, "--json"))
    assert found["rewards"][0]["name"] == "reward_model"
    assert len({one["reward"] for one in found["responses"]}) > 1


def test_a_model_without_a_head_gives_no_rewards(trained, tmp_path):
    made, _, _ = trained
    model = made.folder / "model"
    ours = Project(
        tmp_path / "policy",
        stage={"grpo": {"reward": {"reward_model": {"path": str(model)}}, "max_new_tokens": 6}},
        model={"path": str(model)},
    )
    assert "not a reward model; train one with stage: rm" in refused("train", ours.recipe)
