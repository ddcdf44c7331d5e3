"""``ckpt diff``: a summary first, all on request, exit codes as of ``diff``."""

import json

import pytest
import torch
from safetensors.torch import save_file

from checkpoint.sample import sample_states
from surefoot.checkpoint.saving.preparation import save

from .runner import damage, ok, on_screen, refused, run


@pytest.fixture
def pair(folder):
    return folder.with_name("checkpoint-5"), folder


def test_equal_checkpoints(folder):
    assert "✓ equal: " in ok("diff", folder, folder)
    found = json.loads(run("diff", folder, folder, "--json").output)
    assert found["equal"] and set(found["values"]) == {
        "config", "optimizer", "recipe", "state", "versions",
    }  # fmt: skip
    assert "equal" in run("diff", folder, folder, "--all").output.splitlines()[3]


def test_a_summary_comes_first(pair):
    shown = ok("diff", *pair, code=1)
    lines = shown.splitlines()
    assert lines[0] == f"A {pair[0]}" and lines[1] == f"B {pair[1]}"
    assert lines[2].split() == ["tensors", "equal", "differs"]
    assert lines[3].split()[0] == "model"
    assert lines[4].split() == ["optimizer", "3", "6"]  # the step counts are equal
    assert "max |B-A|" in shown and "‖B-A‖" in shown
    assert "loader.seed" in shown
    assert any(line.split() == ["checkpoint.save_steps", "5", "1000"] for line in lines)
    assert "and 1 more (--all lists them)" in shown
    assert "more (--all" not in run("diff", *pair, "--all").output


def test_only_some_parts(pair):
    found = json.loads(run("diff", *pair, "--only", "recipe", "--json").output)
    assert found["tensors"] == [] and list(found["values"]) == ["recipe"]
    assert found["values"]["recipe"][0]["path"] == "checkpoint.save_steps"
    assert run("diff", *pair, "--only", "versions").exit_code == 0
    found = json.loads(run("diff", *pair, "--only", "model", "--json").output)
    assert {tensor["name"].split("/")[0] for tensor in found["tensors"]} == {"model"}
    assert found["values"] == {}
    assert "'model'" in refused("diff", *pair, "--only", "modle")


def test_json_holds_every_figure(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, value in ((a, 3.0), (b, 4.0)):
        folder.mkdir()
        save_file({"x": torch.tensor([value])}, folder / "model.safetensors")
    (tensor,) = json.loads(run("diff", a, b, "--json").output)["tensors"]
    assert tensor == {
        "name": "model/x", "verdict": "differs", "types": ["F32", "F32"], "shapes": [[1], [1]],
        "num_different": 1, "max_absolute": 1.0, "norm": 1.0, "norm_a": 3.0, "norm_b": 4.0,
        "relative": 0.25,
    }  # fmt: skip


def test_every_kind_of_difference_has_its_words(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    one = {"t": torch.ones(2), "s": torch.ones(2), "z": torch.zeros(1), "a": torch.ones(1)}
    other = {"t": torch.ones(2).half(), "s": torch.ones(3), "z": -torch.zeros(1)}
    for folder, tensors in ((a, one), (b, other)):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"rope": len(tensors)}))
    lines = run("diff", a, b).output.splitlines()
    rows = {
        line[0]: " ".join(line.split()[1:])
        for line in lines
        if line[:2] in ("t ", "s ", "z ", "a ")
    }
    assert rows["t"].startswith("F32 → F16") and rows["s"] == "2 → 3"
    assert rows["z"].startswith("bits only") and rows["a"] == "only in A"
    assert any(line.split() == ["config.json.rope", "4", "3"] for line in lines)


def test_it_fits_the_screen(pair, monkeypatch):
    for columns in ("80", "120"):
        lines = on_screen(monkeypatch, columns, "diff", *pair)
        assert all(len(line.rstrip()) <= int(columns) for line in lines[2:])
        assert any(line.split()[0].endswith("norm.weight.exp_avg") for line in lines if line)


def test_mistakes_give_two(pair, tmp_path):
    damage(pair[1])
    assert run("diff", *pair).exit_code == 2
    assert run("diff", pair[0], tmp_path).exit_code == 2
    assert run("diff", pair[0], tmp_path / "none").exit_code == 2


def test_a_recipe_that_is_none_is_a_mistake(tmp_path):
    folders = [
        save(tmp_path / n, 1, sample_states(), kind="full", companions={"recipe.yaml": b"["})
        for n in "ab"
    ]
    assert "recipe.yaml" in refused("diff", *folders)
