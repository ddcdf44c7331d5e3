"""Bases whose files are quantized: read as what they mean, or refused by name."""

from math import ceil

import peft
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

import folders
import surefoot
from surefoot.cli.main import main
from surefoot.errors import ModelError
from surefoot.inference.model_loading import open_model
from surefoot.model.pretrained.positions import read_config
from surefoot.model.pretrained.stored_quantization import dequantization
from surefoot.model.section import ModelSection

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


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """A project on an fp8 base, and the plain model that the base means."""
    folder = tmp_path_factory.mktemp("fp8")
    folders.save_model(folder / "model", intermediate_size=64)
    folders.save_data(folder / "data")
    plain = AutoModelForCausalLM.from_pretrained(folder / "model")
    tensors = load_file(folder / "model" / "model.safetensors")
    with torch.no_grad():
        for name, module in plain.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                stored, scales, meant = quantize_blocks(module.weight)
                tensors |= {f"{name}.weight": stored, f"{name}.weight_scale_inv": scales}
                module.weight.copy_(meant)
    save_file(tensors, folder / "model" / "model.safetensors", {"format": "pt"})
    folders.edit_json(folder / "model" / "config.json", quantization_config=FP8)
    return folder, plain.eval()


@torch.no_grad()
def test_an_adapter_is_trained_on_what_fp8_weights_mean_and_peft_opens_it(fp8, tmp_path):
    folder, plain = fp8
    expected = plain(IDS).logits
    assert torch.allclose(open_model(folder / "model").model(IDS).logits, expected, atol=1e-5)
    recipe = folders.save_recipe(folder, method={"lora": {"rank": 2}})
    run = tmp_path / "run"
    with torch.enable_grad():
        surefoot.train(recipe, **{"train.output_dir": str(run), "train.max_steps": 2})
        surefoot.train(recipe, **{"train.output_dir": str(run), "train.max_steps": 4})
    adapted = peft.PeftModel.from_pretrained(plain, run / "checkpoint-4")
    expected = adapted(IDS).logits
    assert torch.allclose(open_model(run).model(IDS).logits, expected, atol=1e-5)
    assert "neither cast nor merged with an adapter" in refused(
        ["export", str(run), str(tmp_path / "out")]
    )
    assert not (tmp_path / "out").exists()


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


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed-tensors", "bitsandbytes", "new"])
def test_other_forms_are_refused_by_name(form, tmp_path):
    folders.save_model(tmp_path / "model")
    folders.save_data(tmp_path / "data")
    stored = {"quant_method": form, "bits": 4}
    folders.edit_json(tmp_path / "model" / "config.json", quantization_config=stored)
    recipe = str(folders.save_recipe(tmp_path, method="lora"))
    for command in ("train", "plan"):
        said = refused([command, recipe])
        assert f"quantized ({form}), which is not read; fp8 and mxfp4 are" in said
        assert "Traceback" not in said


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
