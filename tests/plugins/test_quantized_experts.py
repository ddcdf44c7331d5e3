"""Experts are quantized each by itself, calibrated on the tokens that the router sends to them, and
open in transformers; what transformers does not open is refused."""

import json
import logging
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surefoot
from each import some
from folders import save_data, save_model, save_recipe
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.sources import read_whole
from surefoot.errors import ModelError
from surefoot.model.tokenizer import load_tokenizer
from surefoot.use import export
from surefoot.use.exporting.conversion import meta_model
from surefoot.use.model_loading import find_parts

pytest.importorskip("compressed_tensors")

from surefoot.plugins.quantize import calibration
from surefoot.plugins.quantize.calibration import calibration_rows, matrices_of, statistics_of
from surefoot.plugins.quantize.layerwise import open_layerwise
from surefoot.plugins.quantize.schemes import find_linear_layers
from surefoot.plugins.quantize.target import QuantizedFolder
from surefoot.use.exporting.verification import verify_export

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
GROUPS = {"group_size": "32"}


def w4a16(algorithm):
    return QuantizedFolder(quantize="w4a16", group_size="32", algorithm=algorithm)


IDS = torch.arange(60, 92)[None]
KINDS = {"mixtral": {}, "qwen3_moe": {"moe_intermediate_size": 64}}


@torch.no_grad()
def logits(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", some(["fp8", "w4a16"], ["w4a16"]))
def test_transformers_opens_experts_with_the_values_they_stand_for(kind, name, tmp_path):
    base = save_model(tmp_path / "base", kind, **SIZES, **KINDS[kind])
    options = GROUPS if name == "w4a16" else {}
    out = export(base, tmp_path / "out", QuantizedFolder(quantize=name, **options))
    stored = load_file(out / "model.safetensors")
    experts = [n for n in stored if "experts" in n and "scale" in n]
    assert len(experts) == 3 * 4 * 3  # layers, experts, matrices
    routers = [n for n in stored if n.endswith("gate.weight")]
    assert len(routers) == 3
    original = load_file(base / "model.safetensors")
    assert all(torch.equal(stored[n], original[n]) for n in routers)
    plain = export(out, tmp_path / "plain")  # dequantized by us
    error = (logits(out) - logits(plain)).norm() / logits(plain).norm()
    assert error < (1e-5 if name == "w4a16" else 0.05)  # with fp8 inputs are rounded, too


def test_what_transformers_does_not_open_is_refused(tmp_path, monkeypatch):
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
    base = save_model(tmp_path / "base", "mixtral", **sizes, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"has experts, .* open in w8a8; use --quantize fp8"):
        export(base, tmp_path / "out", QuantizedFolder(quantize="w8a8"))
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("surefoot.plugins.quantize.export._WITHOUT_EXPERTS", ())
    out = export(base, tmp_path / "out", QuantizedFolder(quantize="w8a8"))
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        logits(out)


def test_experts_that_are_one_tensor_in_the_files_are_refused(tmp_path):
    save_model(tmp_path / "base", "mixtral", **SIZES)
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    model = meta_model(tmp_path / "base", False)
    fused = {n for n, p in model.named_parameters() if p.ndim == 3}
    shapes = {n: tuple(t.shape) for n, t in tensors.items() if "experts" not in n}
    shapes |= {n: tuple(model.get_parameter(n).shape) for n in fused}
    with pytest.raises(ModelError, match=r"experts.* are one tensor in its files, .*--to gguf"):
        find_linear_layers(model, shapes, "base")


@torch.no_grad()
def test_each_expert_is_calibrated_on_the_tokens_it_gets(tmp_path):
    """Beside a loop over the tokens, with the router's own choice."""
    base = save_model(tmp_path / "base", "mixtral", **SIZES)
    source = open_folder(base)
    model = open_layerwise(source, (base / "config.json").read_text(), "base")
    layers = find_linear_layers(meta_model(base, False), source.shapes(), "base")
    hidden, calls = model.record([list(range(5, 60)), list(range(70, 90))])
    with model.loaded(0) as (prefix, layer):
        matrices = matrices_of(layer, prefix, layers, source.dtypes())
        found = statistics_of(layer, matrices, hidden, calls[0])
        seen = []
        hook = layer.mlp.register_forward_hook(lambda _, args, __: seen.append(args[0][0]))
        for one, (args, kwargs) in zip(hidden, calls[0], strict=True):
            layer(one, *args, **kwargs)
        hook.remove()
        inputs = torch.cat(seen).double()
        chosen = layer.mlp.gate(torch.cat(seen))[2]
        experts = layer.mlp.experts
        assert len({m.place for m in matrices if m.is_expert}) == 8
        for expert in range(4):
            own = [x for x, picks in zip(inputs, chosen.tolist(), strict=True) if expert in picks]
            gate, up = experts.gate_up_proj[expert].double().chunk(2)
            inner = [torch.nn.functional.silu(gate @ x) * (up @ x) for x in own]
            for role, rows in (("w1", own), ("w3", own), ("w2", inner)):
                (matrix,) = (m for m in matrices if m.name.endswith(f"{expert}.{role}.weight"))
                assert torch.equal(matrix.weight, source_weight(source, matrix.name))
                statistics = found[matrix.place]
                assert statistics.num_tokens == len(own)
                expected = sum(torch.outer(x, x) for x in rows)
                torch.testing.assert_close(statistics.gram.double(), expected, rtol=1e-4, atol=1e-5)


def source_weight(source, name):
    return read_whole(source, name).float()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    # each token goes to all experts: a random router is undecided, and its errors hide others
    save_model(folder / "model", "mixtral", **SIZES, num_experts_per_tok=4)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    for layer in model.model.layers:  # some inputs are large, as those of large language models
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data[[3, 40]] *= 25
    model.save_pretrained(folder / "model")
    save_data(folder / "data")
    surefoot.train(save_recipe(folder))
    return folder / "run"


@torch.no_grad()
def first_layer(folder, run_folder):
    """What the first layer computes of the run's own rows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = calibration_rows(find_parts(run_folder), 6)
    each = [model(torch.tensor([row]), output_hidden_states=True).hidden_states[1] for row in rows]
    return torch.cat(each, 1)


def test_a_run_with_experts_is_calibrated_and_loses_less(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "FEWEST", 8)
    out = {
        name: export(
            run_folder,
            tmp_path / name,
            w4a16(name),
        )
        for name in ("rtn", "gptq")
    }
    expected = first_layer(export(run_folder, tmp_path / "plain"), run_folder)
    errors = {
        name: float((first_layer(folder, run_folder) - expected).norm())
        for name, folder in out.items()
    }
    assert errors["gptq"] < errors["rtn"]
    assert verify_export(out["gptq"]).is_within


def test_experts_with_few_tokens_are_rounded_and_counted(run_folder, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "surefoot")
    monkeypatch.setattr(calibration, "FEWEST", 1 << 20)
    found = {}
    for name in ("rtn", "gptq"):
        out = export(
            run_folder,
            tmp_path / name,
            w4a16(name),
        )
        found[name] = load_file(out / "model.safetensors")
    (said,) = (one.message for one in caplog.records)
    assert (
        "36 of 48 weights got too few tokens of the calibration rows (an expert needs 1048576"
        in said
    )
    same = [n for n in found["rtn"] if torch.equal(found["rtn"][n], found["gptq"][n])]
    assert all(n in same for n in found["rtn"] if "experts" in n)
    assert any("q_proj.weight_packed" in n for n in found["rtn"].keys() - set(same))
    receipt = json.loads((tmp_path / "gptq" / "receipt.json").read_text())
    assert receipt["artefact"]["settings"]["num_rounded"] == 36


def test_a_streaming_run_is_calibrated_on_the_beginning_of_its_stream(tmp_path):
    data = {"val_size": 4, "streaming": True, "buffer_size": 16}
    surefoot.train(save_recipe(tmp_path, data=data, train={"max_steps": 2}))
    parts = find_parts(tmp_path / "run")
    texts = [parts_text(parts, ids) for ids in calibration_rows(parts, 10)]
    assert len(texts) == len({*texts}) == 10
    numbers = [text_number(text) for text in texts]
    assert numbers == sorted(numbers)  # in the order of the file
    assert len(calibration_rows(parts, 10**6)) == 20  # all but those held out


@pytest.mark.proof
def test_a_streaming_run_is_quantized(tmp_path):
    data = {"val_size": 4, "streaming": True, "buffer_size": 16}
    surefoot.train(save_recipe(tmp_path, data=data, train={"max_steps": 2}))
    target = QuantizedFolder(quantize="w8a8", algorithm="gptq")
    assert verify_export(export(tmp_path / "run", tmp_path / "out", target)).is_within


def parts_text(parts, ids):
    return load_tokenizer(parts.tokenizer).decode(ids)


def text_number(text):
    """The place in ``save_data``'s rows."""
    a, b = re.search(r"(\d)\+(\d)", text).groups()
    return int(a) * 6 + int(b)
