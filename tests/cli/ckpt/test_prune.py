"""``ckpt prune``: the rule of the run, nothing behind anybody's back."""

import json
import os
from pathlib import Path

import pytest

from checkpoint.sample import sample_states
from surefoot.checkpoint.disk.commit import temporary_folder
from surefoot.checkpoint.saving.preparation import save
from surefoot.recipe.files import RUN_RECIPE
from surefoot.recipe.recipe import read
from surefoot.storage.folder_lock import NAME as LOCK

from .runner import ok, refused, run

LOSSES = {1: 0.9, 2: 0.2, 3: 0.7, 4: 0.3, 5: 0.8}


@pytest.fixture
def root(tmp_path):
    """Five checkpoints; the second is the best."""
    history = []
    for step, loss in LOSSES.items():
        history.append({"step": step, "eval_loss": loss, "eval_accuracy": loss})
        state = {"log_history": history, "best_global_step": min(2, step)}
        companions = {"trainer_state.json": json.dumps(state).encode()}
        save(tmp_path / "run", step, sample_states(), kind="full", companions=companions)
    (tmp_path / "run" / RUN_RECIPE).write_text("checkpoint: {keep: 2}\ntrain: {output_dir: run}\n")
    return tmp_path / "run"


def left(root):
    return sorted(int(path.name.split("-")[1]) for path in root.glob("checkpoint-*"))


def test_the_runs_own_rule_is_followed(root):
    shown = ok("prune", root, "--yes")
    assert left(root) == [2, 4, 5]
    assert "2 checkpoints of 5 can be deleted" in shown
    assert "✓ deleted 2 checkpoints" in shown
    assert not list(root.glob(".checkpoint*"))
    assert "nothing to delete" in run("prune", root, "--yes").output


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--keep", 1], [2, 5]),
        (["--keep-every", 3], [2, 3, 4, 5]),
        (["--keep", 1, "--keep-best", 2], [2, 4, 5]),
        (["--keep", 1, "--keep-best", 2, "--metric", "eval_accuracy", "--greater"], [1, 2, 5]),
        (["--keep", 1, "--keep-best", 2, "--metric", "eval_accuracy", "--smaller"], [2, 4, 5]),
        (["--keep", 1, "--keep-best", 2, "--greater"], [1, 2, 5]),
        (["--keep-hours", 1], [1, 2, 3, 4, 5]),
    ],
)
def test_options_replace_single_settings(root, options, steps):
    run("prune", root, "--yes", *options)
    assert left(root) == steps


def test_a_dry_run_shows_and_removes_nothing(root):
    result = run("prune", root, "--dry-run", "--keep", 1)
    assert left(root) == [1, 2, 3, 4, 5] and not (root / LOCK).exists()
    rows = [line.split() for line in result.output.splitlines()]
    assert rows[0] == ["checkpoint", "saved", "size", "eval", "loss", "why"]
    assert rows[1][-1] == "delete" and rows[2][-2:] == ["keep", "best"]
    assert rows[5][-2:] == ["keep", "latest"]


def test_what_comes_free_counts_shared_files_once(root):
    one, two = root / "checkpoint-1", root / "checkpoint-3"
    (two / "model.safetensors").unlink()
    os.link(one / "model.safetensors", two / "model.safetensors")
    kept = root / "checkpoint-5" / "optimizer.safetensors"
    (one / "optimizer.safetensors").unlink()
    os.link(kept, one / "optimizer.safetensors")
    found = json.loads(run("prune", root, "--dry-run", "--json").output)
    gone = {
        (path.stat().st_ino, path.stat().st_blocks * 512)
        for path in [*one.iterdir(), *two.iterdir()]
        if path.stat().st_ino != kept.stat().st_ino
    }
    assert found["freed_bytes"] == sum(size for _, size in gone)
    assert not found["removed"]
    stays = {row["step"]: row["why"] for row in found["checkpoints"] if row["stays"]}
    assert stays == {2: ["best"], 4: ["among the latest 2"], 5: ["latest"]}


def test_of_a_link_only_the_link_goes(root, tmp_path):
    elsewhere = (root / "checkpoint-1").rename(tmp_path / "checkpoint-1")
    (root / "checkpoint-1").symlink_to(elsewhere)
    other = sum(path.stat().st_blocks * 512 for path in (root / "checkpoint-3").iterdir())
    found = json.loads(run("prune", root, "--yes", "--json").stdout)
    assert left(root) == [2, 4, 5] and (elsewhere / "manifest.json").exists()
    assert found["freed_bytes"] == other


def test_it_asks_first(root):
    assert run("prune", root, stdin="n\n").exit_code == 1
    assert left(root) == [1, 2, 3, 4, 5]
    assert run("prune", root).exit_code == 1  # nobody there to answer
    result = run("prune", root, stdin="y\n")
    assert result.exit_code == 0 and "Remove 2 checkpoints? [y/N]" in result.stderr
    assert left(root) == [2, 4, 5]


def test_json_is_the_only_output(root):
    found = json.loads(run("prune", root, "--yes", "--json").stdout)
    assert found["removed"] and left(root) == [2, 4, 5]


def test_it_is_refused_while_a_save_is_being_written(root):
    with temporary_folder(root / "checkpoint-6"):
        assert "is still being saved" in refused("prune", root, "--yes")
        assert left(root) == [1, 2, 3, 4, 5]
    assert run("prune", root, "--yes").exit_code == 0


def test_it_is_refused_while_a_process_trains_there(root):
    from surefoot.run.folder import opened

    recipe = read(
        {
            "model": {"path": "."},
            "data": {"datasets": ["a"]},
            "stage": "sft",
            "train": {"output_dir": str(root)},
            "checkpoint": {"keep": 2},
        }
    )
    (root / RUN_RECIPE).unlink()
    moved = [path.rename(root.parent / path.name) for path in root.glob("checkpoint-*")]
    with opened(recipe):
        for path in moved:
            path.rename(root / path.name)
        assert "a process is training there" in refused("prune", root, "--keep", 1, "--yes")
        assert left(root) == [1, 2, 3, 4, 5]
        assert run("prune", root, "--keep", 1, "--dry-run").exit_code == 0
    assert run("prune", root, "--keep", 1, "--yes").exit_code == 0
    assert left(root) == [2, 5]


def test_a_damaged_checkpoint_neither_counts_nor_goes(root):
    (root / "checkpoint-5" / "state.json").unlink()
    (root / "checkpoint-1" / "manifest.json").write_text("{")
    run("prune", root, "--keep", 1, "--yes")
    assert left(root) == [1, 2, 4, 5]  # the newest whole one is the fourth


def test_the_checkpoint_that_the_recipe_resumes_from_stays(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    (root / RUN_RECIPE).write_text("checkpoint: {keep: 1, resume: run/checkpoint-3}\n")
    result = run("prune", Path("run"), "--yes")
    assert left(root) == [2, 3, 5] and "checkpoint.resume names it" in result.output


def test_the_metric_of_the_recipe_is_used(root):
    text = "checkpoint: {keep: 1, keep_best: 2}\ntrain: {metric_for_best_model: eval_accuracy"
    (root / RUN_RECIPE).write_text(text + ", greater_is_better: false}\n")
    run("prune", root, "--yes")
    assert left(root) == [2, 4, 5]


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        (None, [], "no recipe.yaml, so no retention policy; give one, for example --keep 3"),
        (
            "checkpoint: {kep: 2}",
            [],
            "recipe.yaml:1:14 checkpoint.kep: unknown key (did you mean keep?)",
        ),
        ("checkpoint: [", [], "not YAML"),
        ("", ["--keep-best", 2, "--metric", "eval_los"], "did you mean eval_loss?"),
        ("", ["--keep-best", 2, "--metric", "zzz"], "there are eval_accuracy, eval_loss, step"),
        ("", ["--keep", 0], "0 is not in the range"),
    ],
)
def test_mistakes_are_told_and_remove_nothing(root, recipe, options, words):
    (root / RUN_RECIPE).unlink()
    if recipe is not None:
        (root / RUN_RECIPE).write_text(recipe)
    assert words in refused("prune", root, "--yes", *options)
    assert left(root) == [1, 2, 3, 4, 5]


def test_without_keep_all_stay(root):
    (root / RUN_RECIPE).unlink()
    result = run("prune", root, "--keep-every", 2, "--yes")
    assert "nothing to delete" in result.output and "all are kept" in result.output


def test_folders_of_others_are_left_alone(theirs, tmp_path):
    message = refused("prune", theirs.parent, "--keep", 1, "--yes")
    assert "no complete Surefoot checkpoint" in message
    assert run("prune", tmp_path, "--keep", 1).exit_code == 2


def test_a_checkpoint_is_no_run(root, monkeypatch):
    for folder in (root / "checkpoint-5", "."):
        monkeypatch.chdir(root / "checkpoint-5")
        assert "name the folder of its run" in refused("prune", folder, "--keep", 1, "--yes")
    assert not (root / "checkpoint-5" / LOCK).exists()


def test_the_newest_is_the_newest_by_name(root):
    (root / "checkpoint-2").rename(root / "checkpoint-9")  # its manifest says 2
    run("prune", root, "--keep", 1, "--yes")
    assert 9 in left(root)


def test_a_folder_that_cannot_be_locked_is_an_error(root):
    (root / LOCK).mkdir()
    assert "cannot lock the run's folder" in refused("prune", root, "--yes")
