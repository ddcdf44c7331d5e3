"""AWQ's scales change nothing before weights are rounded, and then the outputs change less."""

import json
import logging
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import surefoot
from folders import save_data, save_model, save_recipe
from surefoot.errors import ModelError
from surefoot.inference import export, open_model

pytest.importorskip("compressed_tensors")

from surefoot.inference.held_out_set import held_out
from surefoot.inference.quantizing.awq import GRID, Reader, best_scales, error_of
from surefoot.inference.quantizing.export import QuantizeOptions, export_quantized
from surefoot.inference.quantizing.foldings import Folding, find_foldings
from surefoot.inference.quantizing.schemes import scheme_of
from surefoot.inference.receipts.verification import verify_export

IDS = torch.arange(60, 92)[None]
SCHEME = scheme_of("w4a16", 32)
AWQ = QuantizeOptions(32, "awq")


def foldings_of(model, place=0):
    """Of one layer of a transformers model: its layer and what may be folded in it."""
    layer, seen = model.get_decoder().layers[place], []
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0], (args[1:], kwargs))), with_kwargs=True
    )
    model(IDS, use_cache=False)
    hook.remove()
    wanted = {id(p) for name, p in layer.named_parameters() if p.ndim > 1 and "gate." not in name}
    size = model.config.head_dim or model.config.hidden_size // model.config.num_attention_heads
    return layer, find_foldings(layer, *seen[0], size, wanted)


def opened(folder, kind, **changes):
    base = save_model(folder / kind, kind, **changes)
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float64, experts_implementation="eager"
    )
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # neither 0 nor 1, as after training
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


EVERY = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
READ = {
    "llama": EVERY,
    "qwen2": EVERY,  # with biases
    "qwen3": EVERY,  # with norms of queries and keys
    "gemma2": EVERY,  # norms multiply with 1 + weight
    "phi3": {"qkv_proj", "gate_up_proj", "o_proj", "down_proj"},
    "olmo2": {"o_proj", "down_proj"},  # no norm before attention
    "mixtral": {"q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_up_proj", "down_proj"},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", READ)
def test_folded_scales_leave_the_logits_as_they_are(kind, tmp_path):
    model = opened(tmp_path, kind)
    expected = model(IDS).logits
    layer, found = foldings_of(model)
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-6, atol=1e-9)  # tried, undone
    names = {id(p): name.split(".") for name, p in layer.named_parameters()}
    read = [names[id(one)] for folding in found for one in folding.consumers]
    assert {one[-2] if one[-1] == "weight" else one[-1] for one in read} == READ[kind]
    before = [p.clone() for p in layer.parameters()]
    for folding in found:
        shape = folding.num_experts, folding.num_scales
        folding.fold(0.2 + 3 * torch.rand(shape, dtype=torch.float64), torch.float64)
    changed = [not torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True)]
    assert sum(changed) >= len(read)
    logits = model(IDS).logits
    # norms compute in float32 whatever the dtype of the model
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@torch.no_grad()
def test_what_a_norm_loses_in_its_type_is_left_to_its_readers(tmp_path):
    """Without it, rounding a norm to bfloat16 would change each input by up to 0.4 %."""
    model = opened(tmp_path, "llama")
    expected = model(IDS).logits
    layer, found = foldings_of(model)
    for folding in found:
        if folding.is_norm:
            folding.fold(0.2 + 3 * torch.rand(1, folding.num_scales).double(), torch.bfloat16)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        assert torch.equal(norm.weight, norm.weight.bfloat16().double())
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_norm_that_others_read_is_left_alone(tmp_path):
    """A layer that also adds its norm's outputs to the hidden states, as no name tells."""
    model = opened(tmp_path, "llama")
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: plain(hidden) + hidden
    _, found = foldings_of(model)
    assert sum(one.is_norm for one in found) == 1
    names = {id(p): name for name, p in model.model.layers[0].named_parameters()}
    read = {names[id(one)] for folding in found for one in folding.consumers}
    assert {name for name in names.values() if "mlp" in name} & read == {"mlp.down_proj.weight"}


def by_hand(weight, inputs, step):
    """The squared error of one step of the grid, output by output, in float64."""
    magnitudes = inputs.abs().mean(0).clamp(min=1e-4)
    scales = magnitudes ** (step / GRID)
    scales = scales / (scales.max() * scales.min()).sqrt()
    total = 0.0
    for row in weight:
        found = []
        for start in range(0, len(row), 32):
            part = row[start : start + 32] * scales[start : start + 32]
            high = max(float(part.max()), -float(part.min()))
            size = high * 2 / 15
            found.append((part / size).round().clamp(-8, 7) * size / scales[start : start + 32])
        change = torch.cat(found) - row
        total += float((inputs @ change).square().sum())
    return scales, total


def test_the_scales_are_the_best_of_the_grid():
    torch.manual_seed(0)
    inputs = torch.randn(300, 96) * torch.rand(96).exp().pow(3)
    inputs[:, 7] *= 30
    weights = [torch.randn(24, 96), torch.randn(16, 96)]
    folding = Folding(torch.nn.Parameter(torch.ones(96)), None, ())
    readers = [Reader(weight, inputs.T @ inputs) for weight in weights]
    found = best_scales(readers, inputs.abs().mean(0), folding, SCHEME, torch.float32)
    errors = []
    for step in range(GRID + 1):
        each = [by_hand(weight.double(), inputs.double(), step) for weight in weights]
        errors.append((sum(error for _, error in each), each[0][0]))
        ours = sum(
            error_of(reader, each[0][0].float(), SCHEME, torch.float32) for reader in readers
        )
        assert ours == pytest.approx(errors[-1][0], rel=0.02)  # values on an edge between steps
    least, scales = min(errors, key=lambda one: one[0])
    assert least < 0.6 * errors[0][0]
    torch.testing.assert_close(found, scales.float())


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A trained model, some of whose inputs are large, as those of large language models are."""
    folder = tmp_path_factory.mktemp("awq")
    save_model(folder / "model", hidden_size=64, head_dim=16, intermediate_size=96)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[[3, 40]] *= 25
            layer.self_attn.v_proj.weight[5] *= 25
            layer.mlp.up_proj.weight[[2, 70]] *= 25
    model.save_pretrained(folder / "model")
    save_data(folder / "data")
    surefoot.train(save_recipe(folder, train={"max_steps": 12}))
    return folder / "run"


@torch.no_grad()
def distance(folder, run_folder):
    """The divergence of the run's probabilities on rows that were held out, in nats per token."""
    plain = open_model(run_folder)
    (part,) = held_out(plain.recipe, plain.codec)
    model, total, count = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 0.0, 0
    for (features,) in plain.codec.encode_chats(part.examples):
        ids = torch.tensor([list(map(int, features["input_ids"]))])
        ours, theirs = (m(ids).logits[0].double().log_softmax(-1) for m in (model, plain.model))
        total += float((theirs.exp() * (theirs - ours)).sum())
        count += ids.numel()
    return total / count


def test_a_trained_model_with_outliers_loses_less_than_by_rounding(run_folder, tmp_path, caplog):
    caplog.set_level(logging.WARNING, "surefoot")
    found = {}
    for algorithm in ("rtn", "awq"):
        out = export_quantized(
            run_folder,
            tmp_path / algorithm,
            quantize="w4a16",
            options=QuantizeOptions(32, algorithm),
        )
        found[algorithm] = verify_export(out)
    assert not [one for one in caplog.records if "AWQ" in one.message]  # every weight is scaled
    quality = {name: one.quality for name, one in found.items()}
    assert math.log(quality["awq"].perplexity) < math.log(quality["rtn"].perplexity) + 1e-3
    error = {name: distance(tmp_path / name, run_folder) for name in found}
    assert error["awq"] < 0.8 * error["rtn"]
    assert "scaled by AWQ" in (tmp_path / "awq" / "README.md").read_text()
    assert {p.name for p in (tmp_path / "awq").iterdir()} == {
        p.name for p in (tmp_path / "rtn").iterdir()
    }
    receipt = json.loads((tmp_path / "awq" / "receipt.json").read_text())
    assert receipt["artefact"]["settings"] == {"algorithm": "awq", "group_size": 32}


def test_awq_needs_groups_and_a_run(run_folder, tmp_path):
    for name in ("w8a8", "fp8"):
        with pytest.raises(ModelError, match=f"{name} has no groups of inputs.*use w4a16"):
            export_quantized(
                run_folder, tmp_path / "o", quantize=name, options=QuantizeOptions(algorithm="awq")
            )
    plain = export(run_folder, tmp_path / "plain")
    with pytest.raises(ModelError, match="has no recipe, so no data to calibrate on"):
        export_quantized(plain, tmp_path / "o", quantize="w4a16", options=AWQ)
    assert [one.name for one in tmp_path.iterdir()] == ["plain"]
