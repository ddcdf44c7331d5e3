"""What a base has and its class does not build is named at the start, and is in every export."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import mixtures
import surefoot
from folders import edit_json, save_recipe, tokenizer
from surefoot.model.unloaded_tensors import unloaded
from surefoot.use import export

EXTRA = {  # by architecture: layers for multi-token prediction, as published models have them
    "deepseek_v3": ["model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight"],
    "qwen3_next": ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"],
    # of another depth than that of the published model, which alone transformers has in its list
    "glm4_moe": ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight"],
}
COUNTS = {"qwen3_next": "mtp_num_hidden_layers"}


def save_base(folder, kind):
    known = tokenizer()
    sizes = {"vocab_size": len(known), "eos_token_id": known.eos_token_id}
    model = mixtures.model(kind, **sizes, pad_token_id=known.pad_token_id, num_hidden_layers=2)
    model.save_pretrained(folder)
    known.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(3)
    tensors |= {name: torch.randn(4, 8) for name in EXTRA[kind]}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", **{COUNTS.get(kind, "num_nextn_predict_layers"): 1})
    return folder


def trained(folder, base, method, name="run", **more):
    train = {"output_dir": str(folder / name), "max_steps": 1, "eval_steps": None}
    data = {"packing": False}  # of Qwen3-Next, rows in one would see each other
    model = {"path": str(base)}
    path = save_recipe(folder, method=method, train=train, model=model, data=data, **more)
    surefoot.train(path)
    return folder / name


@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v3",
        *(pytest.param(kind, marks=pytest.mark.proof) for kind in ("qwen3_next", "glm4_moe")),
    ],
)
def test_layers_that_are_not_built_are_named_and_exported(kind, tmp_path, caplog):
    base = save_base(tmp_path / "base", kind)
    before = load_file(base / "model.safetensors")
    with caplog.at_level("INFO", "surefoot"):
        run = trained(tmp_path, base, "full")
    lines = [record.getMessage() for record in caplog.records]
    assert sum("2 tensors of the base (" in line for line in lines) == 1
    after = load_file(export(run, tmp_path / "out") / "model.safetensors")
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in EXTRA[kind])
    # of the export, another run; its export has them still
    again = trained(tmp_path, run / "checkpoint-1", "full", "again")
    assert set(load_file(export(again, tmp_path / "next") / "model.safetensors")) == set(before)
    adapter = trained(tmp_path, base, {"lora": {"rank": 2}}, "lora")
    assert set(load_file(export(adapter, tmp_path / "merged") / "model.safetensors")) == set(before)


def test_a_base_that_has_gone_is_said(tmp_path, caplog):
    base = save_base(tmp_path / "base", "deepseek_v3")
    run = trained(tmp_path, base, "full")
    base.rename(tmp_path / "elsewhere")
    with caplog.at_level("WARNING", "surefoot"):
        out = export(run, tmp_path / "out")
    assert not set(EXTRA["deepseek_v3"]) & set(load_file(out / "model.safetensors"))
    assert "config.json names layers for multi-token prediction" in caplog.text


def test_buffers_and_parts_of_quantized_weights_are_none_of_them():
    with torch.device("meta"):
        model = mixtures.model("qwen3_moe", num_hidden_layers=2)
    names = [*model.state_dict(), "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    names += ["model.layers.0.self_attn.q_proj.weight.absmax", "model.layers.0.self_attn.bias"]
    bare = [name.removeprefix("model.") for name in names]  # as files of the bare model have them
    experts = [f"model.layers.0.mlp.experts.3.{n}_proj.weight" for n in ("gate", "up", "down")]
    assert unloaded(model, [*names, *bare, *experts]) == []
    more = ["model.visual.blocks.0.norm.weight", "mtp.fc.weight", "model.layers.2.norm.weight"]
    assert unloaded(model, [*names, *more]) == sorted(more)


def test_other_unexpected_tensors_are_refused_as_before(tmp_path):
    base = save_base(tmp_path / "base", "deepseek_v3")
    tensors = load_file(base / "model.safetensors")
    save_file({**tensors, "model.more.weight": torch.ones(2)}, base / "model.safetensors")
    with pytest.raises(surefoot.errors.ModelError, match=r"1 tensor unexpected \(model\.more"):
        trained(tmp_path, base, "full")


@pytest.mark.parametrize("method", ["full", {"lora": {"rank": 2}}], ids=["full", "lora"])
@pytest.mark.parametrize("stated", [0, 1])
def test_layers_that_no_configuration_states_are_of_another_model(stated, method, tmp_path):
    base = save_base(tmp_path / "base", "glm4_moe")
    edit_json(base / "config.json", num_hidden_layers=1, num_nextn_predict_layers=stated)
    with pytest.raises(surefoot.errors.ModelError, match=r"unexpected \(model\.layers\.1\."):
        trained(tmp_path, base, method)
