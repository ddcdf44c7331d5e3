"""What answers prompts, told by a file or on the command line."""

import pytest

from surefoot.errors import RecipeError
from surefoot.generate.section import GenerateSection
from surefoot.recipe.prediction import load, parallel_of


def write(path, text):
    path.write_text(text)
    return str(path)


def test_any_path_of_a_model_will_do():
    found = load("org/some-model", ["generate.max_new_tokens=7", "parallel.tp=2"])
    assert found.model.path == "org/some-model"
    assert (found.generate.max_new_tokens, found.parallel.tp) == (7, 2)


def test_a_file_says_the_same_and_its_paths_are_beside_it(tmp_path):
    (tmp_path / "qwen").mkdir()
    (tmp_path / "ranks").mkdir()
    text = "model: {path: qwen, weights: ranks, dtype: bfloat16}\ngenerate: {top_k: 3}\n"
    changes = ["generate.top_k=4", "generate.do_sample=true"]
    found = load(write(tmp_path / "answers.yaml", text), changes)
    assert found.model.path == str(tmp_path / "qwen")
    assert found.model.weights == str(tmp_path / "ranks")
    assert (found.model.dtype, found.generate.top_k) == ("bfloat16", 4)


def test_a_path_of_the_command_line_is_relative_to_the_current_folder(tmp_path, monkeypatch):
    for name in ("recipes/qwen", "here/qwen", "recipes/recipes"):
        (tmp_path / name).mkdir(parents=True)
    text = "model: {path: qwen}\n"
    write(tmp_path / "recipes/answers.yaml", text)
    training = f"{text}data: {{datasets: [a]}}\nstage: sft\n"
    write(tmp_path / "recipes/run.yaml", training)
    write(tmp_path / "recipes/recipes/run.yaml", training)
    monkeypatch.chdir(tmp_path / "here")
    found = load("../recipes/answers.yaml", ["model.adapter=qwen"]).model
    assert found.path == str(tmp_path / "recipes/qwen")
    assert found.adapter == str(tmp_path / "here/qwen")
    monkeypatch.chdir(tmp_path)
    assert load("recipes/run.yaml").model.path == str(tmp_path / "recipes/run.yaml")


def test_a_recipe_of_a_training_stands_for_its_run(tmp_path):
    text = "model: {path: x}\ndata: {datasets: [a]}\nstage: sft\nparallel: {pp: 2}\n"
    path = write(tmp_path / "recipe.yaml", text)
    found = load(path, ["parallel.tp=2"])
    assert found.model.path == path
    assert (found.parallel.tp, found.parallel.pp) == (2, 1)


def test_the_runs_own_way_to_sample_holds_where_nothing_else_is_said(tmp_path):
    own = GenerateSection(max_new_tokens=5, do_sample=True, top_p=0.5)
    path = write(tmp_path / "a.yaml", "model: {path: x}\ngenerate: {top_p: 0.7}\n")
    found = load(path, ["generate.max_new_tokens=9"], generate=own).generate
    assert found == GenerateSection(max_new_tokens=9, do_sample=True, top_p=0.7)
    assert load("x", generate=own).generate == own


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("generate: {top_k: 3}", "model: missing"),
        ("model: {pth: x}", "pth"),
        ("model: {path: x}\ngenerate: {top_p: 2}", "generate.top_p: must be in (0, 1]"),
        ("model: {path: x}\ngenerate: 3", "generate: expected"),
        ("model: {path: x}\nparallel: {pp: 2}", "parallel.pp: responses are generated token"),
        (
            "model: {path: x}\nparallel: {tp: 2, sequence_parallel: true}",
            "parallel.sequence_parallel: has no effect on responses",
        ),
        (
            "model: {path: x}\nparallel: {dp_replicate: 2, cp: 2}",
            "parallel.cp: has no effect on responses",
        ),
        ("model: {path: x, weights: y, base: z}", "model.base: cannot be used with model.weights"),
        ("- x", "expected"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text, problem, tmp_path):
    path = write(tmp_path / "answers.yaml", text)
    with pytest.raises(RecipeError) as caught:
        load(path, generate=GenerateSection())
    assert problem in str(caught.value)
    assert "answers.yaml" in str(caught.value)


def test_an_override_of_training_is_refused():
    with pytest.raises(RecipeError, match=r"command line: train\.max_steps=3: train: unknown"):
        load("x", ["train.max_steps=3"])


def test_the_processes_of_an_evaluation_are_told_apart_from_those_of_the_training():
    parallel, others = parallel_of(["train.seed=1", "parallel.tp=2", "parallel={dp_shard: 2}"])
    assert (parallel.tp, parallel.dp_shard, others) == (2, 2, ["train.seed=1"])
    with pytest.raises(RecipeError, match=r"parallel\.pp: responses are generated token by token"):
        parallel_of(["parallel.pp=2"])
