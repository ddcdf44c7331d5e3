"""Bases whose files are quantized: read as what they mean, or refused by name."""

import json
from math import ceil

import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

import folders
import packed_weights
import surefoot
from surefoot.cli.main import main
from surefoot.errors import ModelError
from surefoot.model.config import dequantization, read_config
from surefoot.model.section import ModelSection
from surefoot.network.shard_loading import init_on_meta
from surefoot.parallel.sharding import Box
from surefoot.parallel.world import ALONE
from surefoot.use.model_loading import open_model

IDS = torch.arange(3, 19)[None]
BLOCK = 32
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
# The sixteen values of E2M1 (OCP Microscaling Formats 1.0), in the order of their bits.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def refused(arguments):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


def quantize_blocks(weight):
    """A matrix in float8 with one scale for each block, and the matrix that they mean."""
    rows, columns = (ceil(size / BLOCK) for size in weight.shape)
    stored, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    meant = torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            at = (
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            scale = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scale).to(torch.float8_e4m3fn)
            meant[at], scales[row, column] = stored[at].float() * scale, scale
    return stored, scales, meant


def blocks_of_fp8(weight):
    stored, scales, meant = quantize_blocks(weight)
    return {"weight": stored, "weight_scale_inv": scales}, meant


def ordered_gptq(weight):
    outputs, inputs = weight.shape
    order = [i * 5 % (inputs // 16) for i in range(inputs)]
    return packed_weights.gptq(outputs, inputs, size=16, order=order, seed=outputs + inputs)


def gemm_awq(weight):
    return packed_weights.awq(*weight.shape, seed=sum(weight.shape))


def integers(weight):
    tensors, meant = packed_weights.packed_integers(*weight.shape, seed=sum(weight.shape))
    return {**tensors, "input_scale": torch.ones(1)}, meant


def floats(weight):
    scales = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scales).to(torch.float8_e4m3fn)
    tensors = {"weight": stored, "weight_scale": scales.half()}
    return tensors, (stored.float() * tensors["weight_scale"].float()).half()


def schemes(form, **weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    ignored = {"ignore": ["lm_head"], "quant_method": "compressed-tensors"}
    return {**ignored, "format": form, "config_groups": groups}


FORMS = {
    "fp8": (blocks_of_fp8, FP8),
    "gptq": (
        ordered_gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
    ),
    "awq": (gemm_awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM"}),
    "pack-quantized": (
        integers,
        schemes("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16),
    ),
    "float-quantized": (
        floats,
        schemes("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
}


def made(folder, form, kind="llama", **changes):
    """A project on a quantized base, and the plain model that the base means."""
    quantize, settings = FORMS[form]
    base = folders.save_model(folder / "model", kind, intermediate_size=64, **changes)
    folders.save_data(folder / "data")
    plain = load_file(base / "model.safetensors")
    tensors = dict(plain)
    for name in [name for name in plain if name.endswith("proj.weight")]:
        stored, meant = quantize(tensors.pop(name))
        plain[name] = meant.float()
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{role}": tensor for role, tensor in stored.items()}
    save_file(plain, base / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    folders.edit_json(base / "config.json", quantization_config=settings)
    return folder, model


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """The project on an fp8 base."""
    return made(tmp_path_factory.mktemp("fp8"), "fp8")


LONG = [
    pytest.param(form, marks=pytest.mark.proof)
    for form in ("gptq", "awq", "float-quantized", "pack-quantized")
]


@torch.no_grad()
@pytest.mark.parametrize("form", ["fp8", *LONG])
def test_an_adapter_is_trained_on_what_quantized_weights_mean_and_peft_opens_it(form, tmp_path):
    folder, plain = made(tmp_path, form)
    expected = plain(IDS).logits
    assert torch.allclose(open_model(folder / "model").model(IDS).logits, expected, atol=1e-5)
    recipe = folders.save_recipe(folder, method={"lora": {"rank": 2}})
    assert CliRunner().invoke(main, ["plan", str(recipe)]).exit_code == 0
    run = tmp_path / "run"
    with torch.enable_grad():
        surefoot.train(recipe, **{"train.output_dir": str(run), "train.max_steps": 2})
        surefoot.train(recipe, **{"train.output_dir": str(run), "train.max_steps": 4})
    adapted = peft.PeftModel.from_pretrained(plain, run / "checkpoint-4")
    expected = adapted(IDS).logits
    assert torch.allclose(open_model(run).model(IDS).logits, expected, atol=1e-5)
    words, out = ["export", str(run), str(tmp_path / "out"), "--dtype", "float32"], tmp_path / "out"
    if form == "fp8":
        assert "neither cast nor merged with an adapter" in refused(words)
        assert not out.exists()
        return
    assert CliRunner().invoke(main, words).exit_code == 0
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert torch.allclose(exported(IDS).logits, expected, atol=2e-3)  # merged in float16


@torch.no_grad()
@pytest.mark.parametrize("form", [form for form in FORMS if form != "fp8"])
def test_ranks_read_their_shards_of_what_is_quantized(form, tmp_path):
    folder, plain = made(tmp_path, form)
    section = ModelSection(path=str(folder / "model"))
    start = init_on_meta(folder / "model", section, dtype=torch.float32)
    model, values = start.apply(lambda model: model)
    name = "model.layers.0.mlp.down_proj.weight"
    part = values.readers[name](Box((8, 16), (4, 32)))
    assert torch.equal(part, plain.get_parameter(name)[8:12, 16:48])
    values.fill(model, {}, ALONE)
    assert torch.equal(model.eval()(IDS).logits, plain(IDS).logits)
    assert torch.equal(open_model(folder / "model").model(IDS).logits, plain(IDS).logits)


@torch.no_grad()
def test_experts_are_read_one_by_one(tmp_path):
    sizes = {"moe_intermediate_size": 32, "num_hidden_layers": 1}
    folder, plain = made(tmp_path, "gptq", "qwen3_moe", **sizes)
    assert torch.equal(open_model(folder / "model").model(IDS).logits, plain(IDS).logits)


@torch.no_grad()
def test_biases_of_zeros_that_a_writer_has_added_are_left_out(tmp_path):
    folder, plain = made(tmp_path, "gptq")
    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".scales")]:
        bias = tensors[f"{name.removesuffix('scales')}bias"] = torch.zeros(tensors[name].shape[1])
    save_file(tensors, path, {"format": "pt"})
    assert torch.equal(open_model(folder / "model").model(IDS).logits, plain(IDS).logits)
    bias[0] = 1e-3
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensor unexpected .*bias"):
        open_model(folder / "model")


def test_a_wrong_part_is_said_before_any_row_is_encoded(tmp_path, monkeypatch):
    monkeypatch.setattr("surefoot.run._data_loading.open_data", lambda *_: pytest.fail("encoded"))
    folder, _ = made(tmp_path, "gptq")
    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.1.mlp.up_proj.qzeros")
    save_file(tensors, path, {"format": "pt"})
    said = refused(["train", str(folders.save_recipe(folder, method="lora"))])
    assert f"{folder / 'model'}: model.layers.1.mlp.up_proj.qzeros is missing" in said


def test_what_would_be_saved_wrongly_is_refused_before_slow_work(fp8, tmp_path):
    recipe = str(folders.save_recipe(fp8[0], method="full"))
    for command in ("train", "plan"):
        assert "quantized (fp8); use method: lora" in refused([command, recipe])
    out = ["export", str(fp8[0] / "model"), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert "its weights are quantized (fp8)" in refused(out)


def test_it_is_not_quantized_again(fp8):
    section = ModelSection(path=str(fp8[0] / "model"), quantization_bit=8)
    config = read_config(fp8[0] / "model", section)
    with pytest.raises(ModelError, match=r"are quantized already \(fp8\); leave it unset"):
        dequantization(config, section, fp8[0])


def test_blocks_that_transformers_would_misread_are_refused(fp8, tmp_path):
    """48 rows in blocks of 32 have two scales, of 32 and 16 rows, not of 24 each."""
    folders.save_model(tmp_path, intermediate_size=48)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name], tensors[f"{name}_scale_inv"], _ = quantize_blocks(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    folders.edit_json(tmp_path / "config.json", quantization_config=FP8)
    words = rf"{name} in .* \[48, 32\], which fp8 blocks of 32 x 32 do not divide"
    with pytest.raises(ModelError, match=words):
        open_model(tmp_path)


@pytest.mark.parametrize("form", ["hqq", "bitsandbytes", "new"])
def test_other_forms_are_refused_by_name(form, tmp_path):
    folders.save_model(tmp_path / "model")
    folders.save_data(tmp_path / "data")
    stored = {"quant_method": form, "bits": 4}
    folders.edit_json(tmp_path / "model" / "config.json", quantization_config=stored)
    recipe = str(folders.save_recipe(tmp_path, method="lora"))
    for command in ("train", "plan"):
        said = refused([command, recipe])
        assert f"quantized ({form}), which is not read; gptq, awq, compressed-tensors, fp8" in said
        assert "Traceback" not in said


def test_a_form_that_is_read_is_refused_by_the_setting_that_is_not(tmp_path):
    folders.save_model(tmp_path / "model")
    folders.save_data(tmp_path / "data")
    stored = {"quant_method": "gptq", "bits": 3}
    folders.edit_json(tmp_path / "model" / "config.json", quantization_config=stored)
    recipe = str(folders.save_recipe(tmp_path, method="lora"))
    for command in ("train", "plan"):
        said = refused([command, recipe])
        assert "quantized (gptq) in a way that is not read: quantization_config.bits is 3" in said
        assert "Take the model that they were made from" in said


@torch.no_grad()
def test_the_experts_of_mxfp4_are_what_their_blocks_mean(tmp_path):
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    plain = GptOssForCausalLM(config).eval()
    plain.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        experts, rows, columns = tensors.pop(key).shape  # inputs before outputs
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, columns, rows // 32), dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        pairs = torch.stack([E2M1[(blocks & 15).int()], E2M1[(blocks >> 4).int()]], dim=-1)
        meant = pairs.flatten(-2) * torch.exp2(scales.float() - 127).unsqueeze(-1)
        plain.get_parameter(key).copy_(meant.flatten(2).transpose(1, 2))
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    folders.edit_json(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"})
    folders.tokenizer().save_pretrained(tmp_path)
    found = open_model(tmp_path).model
    assert torch.allclose(found(IDS).logits, plain(IDS).logits, atol=1e-4)
