"""``ckpt show``: what is in a folder, and how large its values are."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from .runner import damage, ok, on_screen, refused, run


def test_show_tells_what_is_in_a_checkpoint(folder):
    shown = ok("show", folder)
    for words in (
        "Surefoot",
        "full weights",
        "model.safetensors",
        "optimizer",
        "epoch, index, seed",
        "BF16 (1)",
    ):
        assert words in shown
    assert "model.norm.weight" not in run("show", folder).output.replace("model.norm.weight,", "")
    assert "model.norm.weight.exp_avg" in run("show", folder, "--tensors").output


def test_show_as_json(folder):
    found = json.loads(run("show", folder, "--json").output)
    assert found["layout"] == "native" and found["facts"]["step"] == "1000"
    assert {tensor["dtype"] for tensor in found["groups"][0]["tensors"]} == {"F32", "BF16", "BOOL"}


def test_show_of_a_model_of_others(shared):
    result = run("show", shared / "models" / "stories260k")
    assert "Hugging Face" in result.output and "260,032" in result.output


def test_show_of_what_is_no_checkpoint_is_a_users_mistake(tmp_path):
    message = refused("show", tmp_path)
    assert "error:" in message and "contains no weights" in message


def test_show_names_tensors_of_the_optimizer_and_of_states(folder):
    listed = run("show", folder, "--tensors").output
    assert "optimizer/model.norm.weight.exp_avg" in listed and "state/random.torch" in listed


def test_show_norms_finds_what_is_not_a_number(tmp_path):
    bad = torch.tensor([3.0, math.nan, -4.0, math.inf, -math.inf])
    save_file({"bad": bad, "none": torch.empty(0)}, tmp_path / "model.safetensors")
    lines = run("show", tmp_path, "--norms").output.splitlines()
    head = next(line for line in lines if "L2 norm" in line).split()
    assert head == ["tensor", "type", "shape", "L2", "norm", "min", "max", "mean", "NaN", "inf"]
    line = next(line for line in lines if line.startswith("bad")).split()
    assert line == ["bad", "F32", "5", "5", "-4", "3", "-0.5", "1", "2"]
    (tensors,) = (
        g["tensors"]
        for g in json.loads(run("show", tmp_path, "--norms", "--json").output)["groups"]
    )
    assert tensors[0]["norms"]["num_inf"] == 2 and tensors[1]["norms"]["minimum"] is None


def test_show_norms_of_a_damaged_checkpoint_is_an_error(folder):
    damage(folder)
    assert "is damaged" in refused("show", folder, "--norms")


def test_show_prints_a_state_as_it_is_stored(folder):
    assert json.loads(run("show", folder, "--state", "loader").output)["epoch"] == 1
    found = json.loads(run("show", folder, "--state", "optimizer").output)
    assert found["groups"][0]["betas"] == {"$tuple": [0.9, 0.999]}
    assert "no state 'loder'; did you mean loader?" in refused("show", folder, "--state", "loder")
    result = run("show", folder, "--state", "xyz")
    assert "there are loader, optimizer, random, trainer" in result.output


def test_show_lists_pickles_and_reads_none(theirs):
    result = run("show", theirs)
    names = "optimizer.pt, rng_state.pth, scheduler.pt, training_args.bin"
    assert f"pickled, and not read: {names}" in result.output
    assert "Hugging Face, by the Trainer" in result.output
    facts = json.loads(run("show", theirs, "--json").output)["facts"]
    assert (facts["step"], facts["loss"], facts["best step"]) == ("30", "1.25", "30")
    found = json.loads(run("show", theirs, "--json").output)
    assert found["pickles"] == names.split(", ")
    found = json.loads(run("show", theirs, "--state", "trainer_state").output)
    assert found["log_history"][0]["grad_norm"] is None  # it was NaN


def test_show_has_no_state_where_there_is_none(shared):
    message = refused("show", shared / "models" / "stories260k", "--state", "trainer")
    assert "it contains no states" in message


@pytest.mark.parametrize("columns", ["60", "90", "200"])
def test_show_fits_the_screen_and_keeps_the_ends_of_names(folder, columns, monkeypatch):
    lines = on_screen(monkeypatch, columns, "show", folder, "--tensors")
    lines = lines[lines.index(next(line for line in lines if line.startswith("tensor "))) :]
    assert all(len(line.rstrip()) <= int(columns) for line in lines)
    assert any("q_proj.weight.exp_avg_sq" in line for line in lines)
