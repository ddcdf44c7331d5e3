"""The convert command."""

import json
import warnings
from shutil import copyfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from checkpoint.sample import sample_states
from folders import save_recipe
from plugins.trainers.zero_folders import write_zero
from surefoot.checkpoint.converting.targets import write_dcp
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.sources import TensorsInMemory
from surefoot.recipe.recipe import load
from surefoot.run.training_run import build

from .runner import ok, refused, run

ADAPTER = {"lora": {"rank": 2}}


@pytest.fixture(scope="module", params=["full", ADAPTER], ids=["model", "adapter"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    path = save_recipe(folder, method=request.param, train={"max_steps": 2, "eval_steps": None})
    build(load(path)).fit()
    return folder / "run" / "checkpoint-2"


def test_a_checkpoint_becomes_the_trainers(checkpoint, tmp_path):
    target = tmp_path / "out" / "checkpoint-2"
    shown = ok("convert", checkpoint, target, "--to", "trainer")
    first, second, third = shown.splitlines()
    count = len(list(target.iterdir()))
    assert first.startswith(f"wrote {target} ({count} files, ")
    assert second.startswith("resume with TrainingArguments(output_dir=..., max_steps=2, ")
    assert third == f"and trainer.train(resume_from_checkpoint='{target}')"
    assert get_last_checkpoint(str(tmp_path / "out")) == str(target)


def test_json_says_what_was_written_and_how_to_go_on(checkpoint, tmp_path):
    target = tmp_path / "out"
    told = json.loads(run("convert", checkpoint, target, "--to", "trainer", "--json").stdout)
    assert (told["path"], told["to"]) == (str(target), "trainer")
    assert told["files"] == {p.name: p.stat().st_size for p in target.iterdir()}
    arguments = told["training_arguments"]
    assert arguments["learning_rate"] == 0.003
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)


def test_a_checkpoint_becomes_a_plain_model(checkpoint, tmp_path):
    shown = ok("convert", checkpoint, tmp_path / "out", "--to", "huggingface", "--json")
    assert "training_arguments" not in json.loads(shown)
    assert not list((tmp_path / "out").glob("*optimizer*"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_mistakes_are_told_plainly(checkpoint, tmp_path):
    message = refused("convert", checkpoint, checkpoint.parent, "--to", "trainer")
    assert "it exists already; choose another folder" in message
    model = checkpoint.parents[1] / "model"
    done = run("convert", model, tmp_path / "out", "--to", "trainer")
    assert done.stderr.startswith(f"error: {model}: ")
    assert "--to" in run("convert", checkpoint, tmp_path / "out").stderr
    assert "pickle" in run("convert", checkpoint, tmp_path / "out", "--to", "pickle").stderr
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_its_recipe_is_told(checkpoint, tmp_path):
    lone = tmp_path / checkpoint.name
    lone.mkdir()
    for path in checkpoint.iterdir():
        (lone / path.name).write_bytes(path.read_bytes())
    manifest = lone / "manifest.json"
    assert "recipe.yaml" in manifest.read_text()
    (lone / "recipe.yaml").unlink()
    assert "recipe.yaml" in refused("convert", lone, tmp_path / "out", "--to", "trainer")
    save(tmp_path, 7, sample_states(), kind="full")
    message = refused("convert", tmp_path / "checkpoint-7", tmp_path / "out", "--to", "trainer")
    assert "it has no recipe.yaml, which contains the settings of its optimizer" in message


def test_layouts_and_meshes(checkpoint, tmp_path):
    cut = tmp_path / "cut"
    mesh = ("--mesh", "dp_shard=3,dp_replicate=2")
    shown = ok("convert", checkpoint, cut, *mesh, "--json")
    told = json.loads(shown)
    assert (told["to"], told["layout"]) == ("surefoot", "distributed")
    assert told["mesh"] == {"dp_replicate": 2, "dp_shard": 3, "tp": 1}
    assert told["files"]["manifest.json"] == (cut / "manifest.json").stat().st_size
    assert "rank_00005/optimizer.safetensors" in told["files"]
    shown = ok("convert", cut, tmp_path / "full", "--layout", "full")
    assert shown.splitlines()[1] == f"resume from it with checkpoint.resume={tmp_path / 'full'}"
    assert run("diff", checkpoint, tmp_path / "full").exit_code == 0
    assert run("verify", cut).exit_code == 0


def test_to_dcp_and_back(checkpoint, tmp_path):
    if (checkpoint / "adapter_config.json").exists():
        pytest.skip("an adapter is not a model")
    theirs = tmp_path / "dcp"
    shown = ok("convert", checkpoint, theirs, "--to", "dcp", "--mesh", "dp_shard=3")
    assert f"storage_reader=HuggingFaceStorageReader('{theirs}')" in shown
    assert len(list(theirs.glob("shard-*.safetensors"))) == 3
    done = run("convert", theirs, tmp_path / "same", "--to", "huggingface")
    assert (tmp_path / "same" / "config.json").exists()
    (theirs / "config.json").unlink()
    done = run("convert", theirs, tmp_path / "bare", "--to", "huggingface")
    assert "weights only: its config.json and tokenizer" in done.stdout
    ok(
        "convert", theirs, tmp_path / "out", "--to", "huggingface", "--base", checkpoint,
        "--dtype", "bfloat16",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("around", ["", "_orig_mod.", "policy.module."])
def test_a_pickled_checkpoint_of_the_trainers_fsdp_becomes_a_model(around, checkpoint, tmp_path):
    if (checkpoint / "adapter_config.json").exists():
        pytest.skip("an adapter is not a model")
    weights = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    theirs = tmp_path / "checkpoint-9"
    inside = theirs / "pytorch_model_fsdp_0"
    with warnings.catch_warnings(action="ignore"):
        wrapped = {f"{around}{name}": tensor for name, tensor in weights.items()}
        dcp.save({"model": wrapped}, checkpoint_id=inside, no_dist=True)
    assert "--trust-pickle" in refused("convert", theirs, tmp_path / "out", "--to", "huggingface")
    assert not (tmp_path / "out").exists()
    ok(
        "convert", theirs, tmp_path / "out", "--to", "huggingface", "--trust-pickle",
        "--base", checkpoint,
    )  # fmt: skip
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("is_live", [False, True], ids=["adapter alone", "whole model"])
def test_an_adapter_in_a_checkpoint_of_the_trainers_fsdp_becomes_peft(
    is_live, checkpoint, tmp_path
):
    if not (checkpoint / "adapter_config.json").exists():
        pytest.skip("a model is no adapter")
    expected = weights = load_file(checkpoint / "adapter_model.safetensors")
    if is_live:
        base = AutoModelForCausalLM.from_pretrained(checkpoint.parents[1] / "model")
        weights = PeftModel.from_pretrained(base, checkpoint).state_dict()
    theirs = tmp_path / "run" / "checkpoint-9"
    state = {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}
    with warnings.catch_warnings(action="ignore"):
        inside = theirs / "pytorch_model_fsdp_0"
        dcp.save({"model": state}, checkpoint_id=inside, no_dist=True)
    out = tmp_path / "out"
    message = refused("convert", theirs, out, "--to", "huggingface", "--trust-pickle")
    assert "ADAPTER --to peft --trust-pickle`" in message
    message = refused("convert", theirs, out, "--to", "peft", "--trust-pickle")
    assert "has an adapter_config.json; copy it there" in message
    assert not out.exists()
    copyfile(checkpoint / "adapter_config.json", theirs.parent / "adapter_config.json")
    ok("convert", theirs, out, "--to", "peft", "--trust-pickle")
    found = load_file(out / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_of_deepspeed_becomes_a_model(checkpoint, tmp_path):
    if (checkpoint / "adapter_config.json").exists():
        pytest.skip("an adapter is not a model")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    names = list(weights)
    write_zero(tmp_path / "zero", weights, [names[::2], names[1::2]], stage=3, ranks=3)
    ok(
        "convert", tmp_path / "zero", tmp_path / "out", "--to", "huggingface", "--trust-pickle",
        "--base", checkpoint,
    )  # fmt: skip
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_weights_of_another_model_are_refused(checkpoint, tmp_path):
    write_dcp(TensorsInMemory({"a": torch.ones(2)}), tmp_path / "dcp")
    message = refused(
        "convert", tmp_path / "dcp", tmp_path / "out", "--to", "huggingface",
        "--base", checkpoint.parents[1] / "model",
    )  # fmt: skip
    assert "weights of another model than" in message
    assert not (tmp_path / "out").exists()


def test_an_adapter_becomes_peft(checkpoint, tmp_path):
    done = run("convert", checkpoint, tmp_path / "out", "--to", "peft")
    if not (checkpoint / "adapter_config.json").exists():
        assert done.exit_code == 2
        assert "it contains no adapter; use --to huggingface" in done.stderr
        return
    assert done.exit_code == 0, done.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not names & {"state.json", "recipe.yaml", "optimizer.safetensors", "manifest.json"}
    ok("convert", tmp_path / "out", tmp_path / "again", "--to", "peft", "--dtype", "float16")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            [],
            "expected what to write: --to (surefoot, huggingface, peft, dcp, mindspore, ",
        ),
        (["--layout", "full", "--mesh", "dp_shard=2"], "--mesh needs --layout distributed"),
        (["--layout", "whole"], "'whole' is not one of 'full', 'distributed'"),
        (["--to", "trainer", "--mesh", "dp_shard=2"], "--mesh cannot be used with --to trainer"),
        (["--to", "dcp", "--layout", "full"], "--layout cannot be used with --to dcp"),
        (["--to", "peft", "--base", "x"], "--base of an adapter by itself needs --experts single"),
        (
            ["--layout", "full", "--trust-pickle"],
            "--trust-pickle cannot be used with a Surefoot checkpoint",
        ),
        (["--layout", "full", "--dtype", "int8"], "'int8' is not one of"),
        (["--layout", "distributed", "--mesh", "pp=2"], "not 'pp'; for example dp_shard=4"),
        (["--layout", "distributed", "--mesh", "dp_shard=0"], "dp_shard must be at least 1, got 0"),
        (["--to", "dcp", "--mesh", "dp_shard=x"], "dp_shard must be a whole number, got 'x'"),
    ],
)
def test_options_that_make_no_sense_write_nothing(options, told, checkpoint, tmp_path):
    assert told in " ".join(refused("convert", checkpoint, tmp_path / "out", *options).split())
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_converted(checkpoint, tmp_path):
    for source, options, told in (
        (checkpoint.parent, ("--layout", "full"), "did you mean"),
        (checkpoint.parent, ("--to", "dcp"), "did you mean"),
        (tmp_path, ("--to", "huggingface"), "contains no weights"),
    ):
        assert told in refused("convert", source, tmp_path / "out", *options)
        assert not (tmp_path / "out").exists()
