"""The eval command: figures for people, JSON for scripts, every answer in a file."""

import json

import pytest

import commands
import surefoot
from folders import save_data, save_model, save_recipe
from project import Project, metrics
from stage_data import written
from surefoot.network.open import open_network

run, ok, refused = commands.of("eval")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A finished LoRA run; its recipe."""
    folder = tmp_path_factory.mktemp("project")
    recipe = save_recipe(folder, method={"lora": {"rank": 2}})
    surefoot.train(recipe)
    return recipe


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_newest_checkpoint_is_evaluated_on_what_was_held_out(project):
    shown = ok(project)
    assert shown.splitlines()[-1] == "exact match 0.0 % (0/6)"
    assert "checkpoint-4" in shown
    found = lines(project.parent / "run" / "generations-checkpoint-4.jsonl")
    assert len(found) == 6
    assert found[0].keys() == {"origin", "prompt", "reference", "answer", "match"}
    assert all(row["prompt"].endswith("<|im_start|>assistant\n") for row in found)


def test_json_is_one_object_with_all_figures(project):
    found = json.loads(run(project, "--json").stdout)
    state = json.loads((project.parent / "run/checkpoint-4/trainer_state.json").read_text())
    logged = next(r for r in state["log_history"] if r["step"] == 4 and "eval_loss" in r)
    assert found["loss"] == pytest.approx(logged["eval_loss"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(logged["eval_perplexity"], rel=1e-5)
    assert found["token_accuracy"] == pytest.approx(logged["eval_token_accuracy"])
    assert (found["model"], found["examples"], found["answers"]) == ("checkpoint-4", 6, 6)
    assert (found["matches"], found["exact_match"]) == (0, 0.0)
    assert found["generations"].endswith("generations-checkpoint-4.jsonl")
    assert found["datasets"]["held out"]["loss"] == found["loss"]


def test_the_base_is_evaluated_before_training(project):
    found = json.loads(run(project, "--json", "--model", "base").stdout)
    assert found["model"] == "base"
    assert (project.parent / "run" / "generations-base.jsonl").is_file()
    after = json.loads(run(project, "--json").stdout)
    assert after["loss"] < found["loss"]


def test_any_model_can_be_evaluated(project, tmp_path):
    save_model(tmp_path / "other", "qwen2")
    for model in ("checkpoint-2", project.parent / "run" / "checkpoint-2", tmp_path / "other"):
        found = json.loads(run(project, "--json", "--model", model).stdout)
        assert found["model"] == str(model).rsplit("/", maxsplit=1)[-1]


def test_limit_dataset_output_and_overrides(project, tmp_path):
    save_data(
        project.parent / "data", "more", [{"instruction": f"{i}?", "output": "x"} for i in range(9)]
    )
    out = tmp_path / "new" / "answers.jsonl"
    options = ["--dataset", "more", "--limit", 5, "--output", out, "--json"]
    found = json.loads(run(project, "generate.max_new_tokens=1", *options).stdout)
    assert found["datasets"].keys() == {"more"}
    assert found["examples"] == 5
    assert [row["origin"] for row in lines(out)] == [f"more:{i}" for i in range(5)]
    assert all(len(row["answer"]) <= 1 for row in lines(out))


def test_several_datasets_are_reported_apart_and_together(project):
    for name in ("one", "two"):
        save_data(project.parent / "data", name, [{"instruction": f"{name}?", "output": "x"}] * 3)
    overrides = ["data.val_size=0", "data.eval_datasets=[one, two]"]
    found = json.loads(run(project, *overrides, "--json").stdout)
    parts = [found["datasets"][name] for name in ("one", "two")]
    assert found["loss"] == pytest.approx(sum(part["loss"] for part in parts) / 2)
    assert found["answers"] == 6
    text = run(project, *overrides).stdout
    assert "one: exact match" in text
    assert text.splitlines()[-1].startswith("exact match")


def test_an_old_file_of_generations_is_replaced(project):
    path = project.parent / "run" / "generations-checkpoint-4.jsonl"
    run(project, "--limit", 2)
    assert len(lines(path)) == 2
    run(project, "--limit", 1)
    assert len(lines(path)) == 1
    assert not list(path.parent.glob(".*.part"))


def test_a_perfect_model_matches_everything(tmp_path):
    """Trained until it knows one answer by heart, and asked the same question in new rows."""
    recipe = save_recipe(
        tmp_path,
        train={"max_steps": 60, "eval_steps": None},
        checkpoint={"save_steps": 60},
        data={"val_size": 4},
        optim={"adamw": {"learning_rate": 0.02}},
    )
    save_data(tmp_path / "data", rows=[{"instruction": "Hi", "output": "yes"}] * 24)
    surefoot.train(recipe)
    assert run(recipe).stdout.splitlines()[-1] == "exact match 100.0 % (4/4)"


def test_plain_text_has_no_generations(tmp_path):
    save_model(tmp_path / "model", template=None)
    save_data(tmp_path / "data")
    (tmp_path / "data" / "t.txt").write_text("\n".join(f"Once upon a time {i}." for i in range(12)))
    info = {"t": {"file_name": "t.txt", "columns": {"prompt": "text"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    recipe = save_recipe(
        tmp_path, stage="pt", data={"datasets": ["t"], "val_size": 3, "text_unit": "line"}
    )
    surefoot.train(recipe)
    found = json.loads(run(recipe, "--json").stdout)
    assert found["examples"] == 3 and "answers" not in found
    assert found["generations"] is None
    assert "exact match" not in run(recipe).stdout
    assert not list((tmp_path / "run").glob("generations*"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "/nowhere"], "no folder /nowhere"),
        (["--model", "checkpoint-3"], "has checkpoint-2, checkpoint-4"),
        (["--dataset", "nothing"], "dataset 'nothing' is not in"),
        (["train.output_dir=/nowhere"], "--model base"),
        (["data.val_size=0", "train.eval_steps=null"], "nothing to evaluate on"),
        (["data.valsize=0"], "did you mean val_size"),
    ],
)
def test_mistakes_are_told_plainly(project, arguments, error):
    assert error in refused(project, *arguments)


def test_answers_that_cannot_be_written_are_an_error(project, tmp_path):
    (tmp_path / "file").touch()
    done = run(project, "--limit", 1, "--output", tmp_path / "file" / "answers.jsonl")
    assert done.exit_code == 2
    assert "cannot write the generations" in done.stderr
    assert "exact match 0.0 % (0/1)" in done.stdout  # the metrics are not lost
    assert "generations" not in done.stdout


@pytest.mark.parametrize("method", [pytest.param("full", marks=pytest.mark.proof), "lora"])
def test_of_pairs_the_rewards_are_those_that_training_logged(method, tmp_path):
    made = Project(
        tmp_path,
        stage="dpo",
        method=method,
        data={"datasets": ["pairs"], "val_size": 4},
        train={"max_steps": 4, "eval_steps": 4},
        generate={"max_new_tokens": 8},
    )
    surefoot.train(made.recipe)
    logged = metrics(made.run)[-1]
    found = json.loads(run(made.recipe, "--json").stdout)
    for name in ("loss", "rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/chosen"):
        assert found[name] == pytest.approx(logged[f"eval_{name}"], abs=1e-5)
    assert found["answers"] == 4
    (answer, *_) = lines(made.run / "generations-checkpoint-4.jsonl")
    assert answer["reference"].startswith("It is ")
    assert "said the hen" not in answer["reference"]
    base = json.loads(run(made.recipe, "--json", "--model", "base").stdout)
    assert base["rewards/margins"] == pytest.approx(0, abs=1e-5)


def test_what_the_reference_computes_is_kept_for_the_next_evaluation(tmp_path, monkeypatch):
    made = Project(
        tmp_path,
        stage="dpo",
        method="lora",
        data={"datasets": ["pairs"], "val_size": 4, "cache_dir": str(tmp_path / "cache")},
        train={"max_steps": 1},
        generate={"max_new_tokens": 1},
    )
    opened = []

    def counted(folder, *arguments):
        opened.append(str(folder))
        return open_network(folder, *arguments)

    monkeypatch.setattr("surefoot.run.models.open_network", counted)
    assert "no trained model yet" in run(made.recipe).stderr
    assert not opened, "the reference was asked before a model was found"
    surefoot.train(made.recipe)
    first, again = (json.loads(run(made.recipe, "--json").stdout) for _ in range(2))
    assert opened == [str(tmp_path / "model")]
    assert first == again


def test_of_rollouts_every_metric_is_shown(tmp_path):
    sections = {"data": {"datasets": ["sums"], "val_size": 4}, "train": {"max_steps": 1}}
    made = Project(tmp_path, stage=written("grpo"), generate={"max_new_tokens": 2}, **sections)
    surefoot.train(made.recipe)
    figures = json.loads(run(made.recipe, "--json").stdout)
    shown = run(made.recipe).stdout
    for metric in ("loss", "reward", "reward_std", "completion_length", "completions_clipped"):
        assert f"│ {metric.replace('_', ' ')} " in shown
        assert f"{figures[metric]:.4f}" in shown
