"""A run goes on from a converted checkpoint exactly as it would have from the original."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from project import Project, assert_same, checkpoints, final_weights, losses, surefoot
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.sources import read_whole
from surefoot.checkpoint.verification import verify
from surefoot.recipe.recipe import load
from surefoot.run.training_run import build


def convert(*arguments):
    code, _, err = surefoot("ckpt", "convert", *arguments)
    assert code == 0, err


def go_on(project, start, folder):
    """In this process, from ``start`` to the end; the losses and the last weights."""
    train = {"train.output_dir": str(folder), "checkpoint.resume": str(start)}
    recipe = load(project.recipe, {**train, "checkpoint.async_save": False})
    build(recipe, resume=start).fit()
    return losses(folder), final_weights(folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Trained by two processes up to step 4 of 8, with dropout; its last checkpoint, in boxes."""
    changes = {"train": {"max_steps": 8}, "checkpoint": {"layout": "distributed"}}
    project = Project(tmp_path_factory.mktemp("two"), **changes)
    code, _, err = surefoot(
        "train", project.recipe, "parallel.num_processes=2", "train.max_steps=4"
    )
    assert code == 0, err
    return project, checkpoints(project.run)[-1]


def test_a_run_goes_on_bitwise_from_the_whole_of_what_two_saved(two, tmp_path):
    project, saved = two
    convert(saved, tmp_path / "full", "--layout", "full")
    assert verify(tmp_path / "full", full=True).ok
    found = go_on(project, tmp_path / "full", tmp_path / "from-full")
    expected = go_on(project, saved, tmp_path / "from-two")
    assert found[0] == expected[0]
    assert list(found[0]) == [*range(1, 9)]  # the log of the first four came with the checkpoint
    assert_same(found[1], expected[1])


@pytest.mark.proof
def test_it_goes_on_bitwise_from_three_ranks_that_never_ran(two, tmp_path):
    project, saved = two
    three = tmp_path / "three"
    convert(saved, three, "--layout", "distributed", "--mesh", "dp_shard=3")
    assert {p.name for p in three.iterdir() if p.is_dir()} == {f"rank_0000{i}" for i in range(3)}
    assert verify(three, full=True).ok
    found = go_on(project, three, tmp_path / "from-three")
    expected = go_on(project, saved, tmp_path / "from-two")
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])


def test_the_files_for_two_ranks_are_those_that_two_ranks_wrote(two, tmp_path):
    _, saved = two
    convert(saved, tmp_path / "full", "--layout", "full")
    again = tmp_path / "again"
    convert(tmp_path / "full", again, "--layout", "distributed", "--mesh", "dp_shard=2")
    for name in ("model.safetensors", "optimizer.safetensors"):
        for rank in ("rank_00000", "rank_00001"):
            assert (again / rank / name).read_bytes() == (saved / rank / name).read_bytes()


def test_what_two_saved_opens_everywhere_once_it_is_whole(two, tmp_path):
    _, saved = two
    convert(saved, tmp_path / "full", "--layout", "full")
    convert(saved, tmp_path / "plain", "--to", "huggingface", "--dtype", "bfloat16")
    source = open_folder(saved)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "full").state_dict()
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    assert small.dtype == torch.bfloat16
    rounded = small.state_dict()
    for name in source.shapes():
        assert torch.equal(opened[name], read_whole(source, name)), name
        assert torch.equal(rounded[name], read_whole(source, name).bfloat16()), name
    assert not list((tmp_path / "plain").glob("*optimizer*"))
    assert (tmp_path / "plain" / "tokenizer.json").is_file()


@pytest.mark.proof
def test_an_adapter_that_two_trained_goes_on_and_opens_by_itself(tmp_path):
    project = Project(tmp_path, train={"max_steps": 6}, method={"lora": {"rank": 4}})
    code, _, err = surefoot(
        "train", project.recipe, "parallel.num_processes=2", "train.max_steps=3"
    )
    assert code == 0, err
    saved = checkpoints(project.run)[-1]
    convert(saved, tmp_path / "full", "--layout", "full")
    found = go_on(project, tmp_path / "full", tmp_path / "from-full")
    expected = go_on(project, saved, tmp_path / "from-two")
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])
    convert(saved, tmp_path / "adapter", "--to", "peft")
    assert not list((tmp_path / "adapter").glob("*optimizer*"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert PeftModel.from_pretrained(base, tmp_path / "adapter")
