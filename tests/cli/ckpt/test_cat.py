"""``ckpt cat``: the values of a slice."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from .runner import damage, run


def numbers(text):
    """All numbers in what was printed, the header line aside."""
    body = text.split("\n", 1)[1]
    return [
        float(word) for word in body.replace("[", " ").replace("]", " ").replace(",", " ").split()
    ]


@pytest.mark.parametrize(
    "where", ["", "0", "-1", "2:5", "-3:", "::2", "1:9:3, 2", "..., -2:", ":, 1:1", "[3, :]", "0,0"]
)
def test_cat_prints_what_numpy_would(folder, where):
    whole = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].numpy()
    index = eval(f"np.s_[{where.strip('[]') or '...'}]", {"np": np})  # ours never does
    result = run("cat", folder, "model.embed_tokens.weight", where)
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose(numbers(result.output), whole[index].reshape(-1), rtol=1e-5)
    found = json.loads(run("cat", folder, "model.embed_tokens.weight", where, "--json").output)
    assert found["values"] == (whole[index].tolist() if whole[index].size else [])
    assert found["dtype"] == "F32" and found["shape"] == [16, 8]


def test_cat_prints_rows_as_torch_does(tmp_path):
    save_file(
        {"x": torch.arange(12).reshape(2, 3, 2), "s": torch.tensor(7), "b": torch.tensor([True])},
        tmp_path / "model.safetensors",
    )
    assert run("cat", tmp_path, "x").output == (
        "x  I64 2 × 3 × 2\n[[[ 0,  1],\n  [ 2,  3],\n  [ 4,  5]],\n\n"
        " [[ 6,  7],\n  [ 8,  9],\n  [10, 11]]]\n"
    )
    assert run("cat", tmp_path, "x", "0, 1").output == "x[0, 1]  I64 2\n[2, 3]\n"
    assert run("cat", tmp_path, "s").output == "s  I64 scalar\n7\n"
    assert run("cat", tmp_path, "b").output == "b  BOOL 1\n[True]\n"
    assert run("cat", tmp_path, "x", "0, 0, 5:").output == "x[0, 0, 5:]  I64 0\n[]\n"


def test_cat_of_what_json_has_no_number_for(tmp_path):
    odd = torch.tensor([1.0, math.nan, -math.inf])
    save_file({"x": odd, "c": torch.tensor([1 + 2j])}, tmp_path / "model.safetensors")
    assert json.loads(run("cat", tmp_path, "x", "--json").output)["values"] == [1.0, "nan", "-inf"]
    assert json.loads(run("cat", tmp_path, "c", "--json").output)["values"] == [[1.0, 2.0]]
    assert "[1+2j]" in run("cat", tmp_path, "c").output


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int16]
)
def test_cat_of_any_type(tmp_path, dtype):
    save_file({"x": torch.tensor([0, 1, 2, 96]).to(dtype)}, tmp_path / "model.safetensors")
    assert numbers(run("cat", tmp_path, "x").output) == [0, 1, 2, 96]


def test_cat_shows_the_edges_of_a_large_tensor(tmp_path):
    large = torch.arange(5000.0).reshape(50, 100)
    save_file({"x": large, "y": torch.zeros(1100, 1000)}, tmp_path / "model.safetensors")
    lines = run("cat", tmp_path, "x").output.splitlines()
    assert lines[1].replace(" ", "") == "[[0,1,2,…,97,98,99],"
    assert (
        lines[4].strip() == "…,"
        and lines[-1].replace(" ", "") == "[4900,4901,4902,…,4997,4998,4999]]"
    )
    assert numbers(run("cat", tmp_path, "x", "--all").output) == large.reshape(-1).tolist()
    assert "…" in run("cat", tmp_path, "y").output
    for option in ("--all", "--json"):
        result = run("cat", tmp_path, "y", option)
        assert result.exit_code == 2 and "1,100,000 values are too many" in result.output


def test_cat_checks_what_it_reads_whole(folder):
    damage(folder)  # the last tensor of the file
    names = load_file(folder / "model.safetensors")
    results = [run("cat", folder, name) for name in names]
    assert sorted(result.exit_code for result in results) == [0, 0, 0, 2]
    (bad,) = (result for result in results if result.exit_code)
    assert "is damaged" in bad.output or "a bool must be" in bad.output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.norm.wieght", "did you mean model.norm.weight"),
        ("norm.weight.exp_avg", "did you mean optimizer/model.norm.weight.exp_avg"),
        ("zzz", "`surefoot ckpt show --tensors` lists them"),
    ],
)
def test_cat_knows_near_names(folder, name, words):
    result = run("cat", folder, name)
    assert result.exit_code == 2 and f"contains no tensor {name!r}" in result.output
    assert words in result.output


def test_cat_of_a_wrong_slice_is_a_users_mistake(folder):
    result = run("cat", folder, "model.norm.weight", "__import__('os')")
    assert result.exit_code == 2 and "cannot read" in result.output
    assert run("cat", folder, "model.norm.weight", "8").exit_code == 2
