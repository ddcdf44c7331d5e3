"""Models to and from MindSpore Transformers, by the command."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import commands
from folders import save_model, save_recipe
from plugins.mindspore.real import rank_file, rewrite
from surefoot.checkpoint.layouts.detection import open_contents
from surefoot.checkpoint.sources import FolderSource, read_whole
from surefoot.recipe.recipe import load
from surefoot.run.training_run import build

run, ok, fails = commands.of("ckpt", "convert")
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}
CUT = "data_parallel=2,model_parallel=2,enable_parallel_optimizer=true"
CUT += ",parallel_optimizer_threshold=0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of ours with the model it began with."""
    folder = tmp_path_factory.mktemp("project")
    path = save_recipe(folder, train={"max_steps": 2, "eval_steps": None})
    build(load(path)).fit()
    return folder / "run" / "checkpoint-2"


def weights(folder):
    return {
        n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()
    }


def everything(folder):
    contents = open_contents(folder)
    return {name: read_whole(FolderSource(contents), name) for name in contents.tensors}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("kind", "names"), [("qwen2", "legacy"), ("llama", "legacy-fused"), ("qwen3", "mcore-fused")]
)
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.proof), torch.bfloat16],
    ids=["fp32", "bf16"],
)
def test_a_model_goes_there_by_rank_and_comes_back_bitwise(tmp_path, kind, names, dtype):
    model = save_model(tmp_path / "model", kind, dtype=dtype, **SIZES)
    there, back = tmp_path / "there", tmp_path / "back"
    ok(model, there, "--to", "mindspore", "--names", names, "--layout", "distributed",
       "--parallel-config", CUT)  # fmt: skip
    assert (there / "checkpoint/rank_3/surefoot_rank_3-1_1.safetensors").is_file()
    ok(there, back, "--to", "huggingface", "--base", model)
    assert_equal(weights(back), weights(model))
    assert AutoModelForCausalLM.from_pretrained(back)


def test_one_folder_becomes_a_mesh_and_a_mesh_one_folder(real, tmp_path):
    said = ok(real / "pp2mp2", tmp_path / "full", "--to", "mindspore")
    assert f"load_checkpoint: {tmp_path / 'full'}, load_ckpt_format: safetensors" in said
    ok(tmp_path / "full", tmp_path / "cut", "--to", "mindspore", "--layout", "distributed",
       "--target-strategy", real / "w8_pp2dp2mp2_opt/strategy", "--remove-redundancy")  # fmt: skip
    assert_equal(everything(tmp_path / "cut"), everything(real / "pp2mp2"))
    assert (tmp_path / "cut/checkpoint/rank_7/surefoot_rank_7-1_1.safetensors").is_file()


def test_a_run_takes_its_moments_and_step_numbers_along(trained, tmp_path):
    ok(trained, tmp_path / "out", "--to", "mindspore", "--layout", "distributed",
       "--parallel-config", CUT)  # fmt: skip
    found, ours = everything(tmp_path / "out"), everything(trained)
    assert (tmp_path / "out/checkpoint/rank_0/surefoot_rank_0-1_2.safetensors").is_file()
    name = "self_attn.q_proj.weight"
    theirs = "model.layers.1.attention.wq.weight"
    moments = f"optimizer/model.layers.1.{name}.exp_avg"
    assert torch.equal(found[f"optimizer/adam_m.{theirs}"], ours[moments])
    assert torch.equal(found[f"optimizer/adam_v.{theirs}"], ours[moments + "_sq"])
    assert torch.equal(found[f"model/{theirs}"], ours[f"model/model.layers.1.{name}"])
    assert found["state/step_num"] == 2
    assert found["state/global_step"].tolist() == [2]
    assert found["state/global_batch_size"] == load(trained / "recipe.yaml").train.global_batch_size


def test_an_adapter_is_merged_into_its_base(tmp_path):
    path = save_recipe(
        tmp_path, method={"lora": {"rank": 2}}, train={"max_steps": 2, "eval_steps": None}
    )
    build(load(path)).fit()
    adapter = tmp_path / "run" / "checkpoint-2"
    ok(adapter, tmp_path / "there", "--to", "mindspore")
    ok(tmp_path / "there", tmp_path / "back", "--to", "huggingface")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    for name, tensor in weights(tmp_path / "back").items():
        assert torch.allclose(tensor, merged[name], atol=1e-6), name


def test_names_may_change_without_leaving_mindspore(real, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    ok(real / "dp2mp2", tmp_path / "there", "--to", "mindspore", "--names", "mcore-v1")
    ok(tmp_path / "there", tmp_path / "back", "--to", "mindspore", "--names", "legacy")
    assert_equal(everything(tmp_path / "back"), everything(real / "dp2mp2"))


def test_the_type_of_the_weights_changes_alone(real, tmp_path):
    ok(real / "mp4", tmp_path / "out", "--to", "mindspore", "--dtype", "bfloat16")
    found = everything(tmp_path / "out")
    assert found["model/lm_head.weight"].dtype == torch.bfloat16
    assert found["optimizer/adam_m.lm_head.weight"].dtype == torch.float32


def test_slices_without_strategy_files_beside_them_need_their_place(copied, tmp_path):
    folder = copied("dp2mp2")
    elsewhere = (folder / "strategy").rename(tmp_path / "elsewhere")
    refused = run(folder, tmp_path / "out", "--to", "mindspore")
    assert "4 ranks without strategy files" in refused.stderr
    ok(folder, tmp_path / "out", "--to", "mindspore", "--strategy", elsewhere)
    assert_equal(everything(tmp_path / "out"), everything(folder / "unified"))


def test_the_newer_form_goes_there_and_comes_back(real, tmp_path):
    ok(real / "w8_pp2dp2mp2_opt", tmp_path / "there", "--to", "mindspore", "--iteration",
       "--layout", "distributed", "--parallel-config", CUT)  # fmt: skip
    ok(tmp_path / "there", tmp_path / "back", "--to", "mindspore")
    assert_equal(everything(tmp_path / "back"), everything(real / "dp2mp2"))
    ok(real / "mp4", tmp_path / "staged", "--to", "mindspore", "--iteration",
       "--layout", "distributed", "--target-strategy", real / "pp2mp2/strategy")  # fmt: skip
    ok(tmp_path / "staged", tmp_path / "whole", "--to", "mindspore")
    assert_equal(everything(tmp_path / "whole"), everything(real / "mp4"))


def refused(tmp_path, *arguments):
    message = fails(*arguments)
    assert not (tmp_path / "out").exists()
    return message


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("model_paralel=2", "did you mean model_parallel?"),
        ("model_parallel=two", "model_parallel must be a whole number, got 'two'"),
        ("model_parallel=2,model_parallel=2", "model_parallel occurs twice"),
        ("vocab_emb_dp=1", "vocab_emb_dp must be true or false, got '1'"),
        ("model_parallel=32", "has 8 rows, which is no multiple of it"),
        ("pipeline_stage=3", "2 layers cannot be divided evenly"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_and_nothing_written(real, tmp_path, config, problem):
    out = tmp_path / "out"
    said = refused(tmp_path, real / "mp4", out, "--to", "mindspore", "--layout", "distributed",
                   "--parallel-config", config)  # fmt: skip
    assert problem in said


def test_bad_input_is_one_sentence_and_nothing_is_written(copied, tmp_path):
    out, folder = tmp_path / "out", copied("mp4")
    to = (out, "--to", "mindspore")
    assert "layout full needs neither" in refused(
        tmp_path, folder, *to, "--target-strategy", folder / "strategy"
    )
    assert "layout distributed needs a parallel_config" in refused(
        tmp_path, folder, *to, "--layout", "distributed"
    )
    wrong = refused(tmp_path, folder, *to, "--strategy", copied("dp2mp2") / "strategy")
    assert "does not fit" in wrong
    rewrite(rank_file(folder, 1), lambda tensors: tensors.update(odd=torch.ones(2)))
    rewrite(rank_file(folder, 2), lambda tensors: tensors.update(odd=torch.zeros(2)))
    assert "the slicing of 'odd' is unknown" in refused(tmp_path, folder, *to)
    rank_file(folder, 1).unlink()
    assert "the files of rank 1 are missing" in refused(tmp_path, folder, *to)


def test_ranks_of_different_steps_are_refused_and_nothing_is_written(copied, tmp_path):
    folder, out = copied("mp4"), tmp_path / "out"
    rewrite(rank_file(folder, 2), lambda tensors: tensors.update(step_num=torch.tensor(19)))
    said = refused(tmp_path, folder, out, "--to", "mindspore")
    assert "saved at another step than" in said
    file = rank_file(folder, 2)
    file.rename(file.with_name(file.name.replace("2_10", "2_9")))
    assert "ranks of different steps" in refused(tmp_path, folder, out, "--to", "huggingface")


def test_types_that_one_side_does_not_know_are_refused_and_nothing_is_written(copied, tmp_path):
    folder, out = copied("mp4"), tmp_path / "out"
    data = rank_file(folder, 1).read_bytes()
    rank_file(folder, 1).write_bytes(data.replace(b'"dtype":"F32"', b'"dtype":"F3X"', 1))
    said = refused(tmp_path, folder, out, "--to", "huggingface")
    assert "F3X" in said
    assert "rank_1" in said
    model = save_model(tmp_path / "model")
    tensors = weights(model)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    said = refused(tmp_path, model, out, "--to", "mindspore", "--names", "keep", "--iteration",
                   "--layout", "distributed", "--parallel-config", "data_parallel=2")  # fmt: skip
    assert "'model.norm.weight': MindSpore has no type F8_E4M3" in said


def test_a_name_without_another_is_refused_and_keep_leaves_it(tmp_path):
    model = save_model(tmp_path / "model", "qwen3")
    out = tmp_path / "out"
    said = refused(tmp_path, model, out, "--to", "mindspore", "--names", "legacy")
    assert "_norm.weight' has no name in MindSpore Transformers" in said
    ok(model, out, "--to", "mindspore", "--names", "keep")
    assert_equal(
        {name.removeprefix("model/"): tensor for name, tensor in everything(out).items()},
        weights(model),
    )
