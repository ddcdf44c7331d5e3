"""Quantized weights open in transformers with the logits of the values they stand for, and the
schemes round as compressed-tensors' own compression of a model in memory does."""

import json
import math
import typing

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot
from commands import refused
from folders import save_adapter, save_data, save_model, save_recipe
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.sources import TensorsInMemory, read_whole
from surefoot.errors import CheckpointError, ModelError
from surefoot.parallel.sharding import Box
from surefoot.use import export, open_model

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from transformers import CompressedTensorsConfig

from surefoot.model.weight_matrices import layer_list
from surefoot.plugins.quantize import calibration as calibration_data
from surefoot.plugins.quantize.calibration import DAMPING, Calibrator, round_by_gptq
from surefoot.plugins.quantize.layerwise import open_layerwise, run_layer
from surefoot.plugins.quantize.schemes import (
    PRESETS,
    QuantizedSource,
    find_linear_layers,
    scheme_of,
)
from surefoot.plugins.quantize.target import QuantizedFolder
from surefoot.schema import settings
from zoo.architectures import SETTINGS, build

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
IDS = torch.arange(60, 92)[None]
SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
GROUPS = {"group_size": "32"}


def w4a16(algorithm):
    return QuantizedFolder(quantize="w4a16", group_size="32", algorithm=algorithm)


KEPT = ("embed", "norm", "lm_head")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("quantizing") / "base", dtype=torch.bfloat16, **SIZES)


@torch.no_grad()
def logits(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)(IDS).logits


def in_memory(folder, name):
    """The tensors of compressed-tensors' own compression, scales by the largest values."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    scheme = scheme_of(name)
    config = QuantizationConfig.model_validate(
        {"config_groups": {PRESETS[name]: ["Linear"]}, "ignore": ["lm_head"]}
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            module.weight_scale.data = scheme.scales(module.weight.data)[0]
            module.weight.data = module.weight.data.float()
    ModelCompressor(quantization_config=config).compress_model(model)
    return {name: value for name, value in model.state_dict().items() if "rotary" not in name}


def test_the_schemes_of_the_command_are_those_of_the_module():
    assert tuple(PRESETS) == typing.get_args(settings(QuantizedFolder)["quantize"].hint)


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_opens_each_scheme_with_the_logits_of_its_values(base, name, tmp_path):
    out = export(base, tmp_path / "out", QuantizedFolder(quantize=name))
    plain = export(out, tmp_path / "plain")  # dequantized by us
    found = logits(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert torch.equal(found, logits(plain))
    expected = logits(base)
    error = (logits(out) - expected).norm() / expected.norm()  # inputs rounded too
    assert error < {"w4a16": 0.25, "w8a8": 0.03}.get(name, 0.1)
    stored, original = load_file(out / "model.safetensors"), load_file(base / "model.safetensors")
    kept = [n for n in original if any(word in n for word in KEPT)]
    assert kept
    assert all(torch.equal(stored[n], original[n]) for n in kept)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    theirs = in_memory(base, name)
    assert all(torch.equal(stored[n], theirs[n]) for n in stored if "proj" in n)


def test_an_adapter_is_merged_before_rounding(base, tmp_path):
    save_adapter(base, tmp_path / "adapter")
    merged = export(tmp_path / "adapter", tmp_path / "merged")
    expected = export(merged, tmp_path / "expected", QuantizedFolder(quantize="w4a16"))
    found = export(tmp_path / "adapter", tmp_path / "found", QuantizedFolder(quantize="w4a16"))
    one, other = (load_file(folder / "model.safetensors") for folder in (expected, found))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", PRESETS)
def test_any_rows_of_a_tensor_are_those_of_the_whole(name):
    torch.manual_seed(0)
    weights = TensorsInMemory({"a.weight": torch.randn(384, 256)})
    source = QuantizedSource(weights, scheme_of(name), frozenset(["a.weight"]))
    for tensor, shape in source.shapes().items():
        whole = read_whole(source, tensor)
        assert (tuple(whole.shape), whole.dtype) == (shape, source.dtypes()[tensor])
        for part in Box.whole(shape).blocks(max(1, whole.numel() // 5)):
            assert torch.equal(
                source.read(tensor, part).float(), whole[part.slices_in(Box.whole(shape))].float()
            )


def test_few_rows_are_read_at_a_time():
    """What is read at a time is bounded, and so is what is computed of it."""
    most = 0

    class Rows:
        def shapes(self):
            return {"a.weight": (1 << 16, 4096)}

        def dtypes(self):
            return {"a.weight": torch.bfloat16}

        def read(self, name, box):
            nonlocal most
            most = max(most, box.size)
            return torch.ones(box.shape, dtype=torch.bfloat16)

    source = QuantizedSource(Rows(), scheme_of("fp8"), frozenset(["a.weight"]))
    source.read("a.weight_scale", Box((0, 0), (2000, 1)))
    source.read("a.weight", Box((5, 0), (500, 4096)))
    assert most <= 256 * 4096


def test_a_layer_that_does_not_fit_is_named_with_what_to_do(tmp_path):
    save_model(tmp_path / "base", intermediate_size=96)
    with pytest.raises(ModelError, match=r"q_proj.weight is 32 x 32, which groups of 128.*size 32"):
        export(tmp_path / "base", tmp_path / "out", QuantizedFolder(quantize="w4a16"))
    save_model(tmp_path / "odd", intermediate_size=48)
    with pytest.raises(ModelError, match=r"128 inputs do not divide; use --quantize fp8 or w8a8"):
        export(tmp_path / "odd", tmp_path / "out", QuantizedFolder(quantize="w4a16"))
    out = export(tmp_path / "base", tmp_path / "out", QuantizedFolder(quantize="w4a16", **GROUPS))
    assert torch.isfinite(open_model(out).model(IDS).logits).all()


def test_values_that_cannot_be_rounded_leave_nothing_behind(tmp_path):
    save_model(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.inf
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"layers\.1.mlp.up_proj.weight: .*NaN or infinite"):
        export(tmp_path / "base", tmp_path / "out", QuantizedFolder(quantize="fp8"))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def rounded(weight, scheme):
    scales = scheme.scales(weight)[0].repeat_interleave(scheme.group_size, 1)
    return (weight / scales).round().clamp(-8, 7) * scales


def by_least_squares(weight, hessian, scheme):
    """GPTQ without its factorization: after each column, the best change of all that are left is
    solved for anew, in float64 (Optimal Brain Surgeon, as in arXiv:2208.11580)."""
    scales = scheme.scales(weight)[0].repeat_interleave(scheme.group_size, 1).double()
    damped = hessian.double() + DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian))
    left, found = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    order = hessian.diagonal().argsort(descending=True).tolist()
    for place, i in enumerate(order):
        found[:, i] = (left[:, i] / scales[:, i]).round().clamp(-8, 7) * scales[:, i]
        rest = order[place + 1 :]
        change = (found[:, i] - left[:, i])[None]
        if rest:
            left[:, rest] -= (
                torch.linalg.solve(damped[rest][:, rest], damped[rest, i][:, None]) @ change
            ).T
    return found


def correlated_inputs(count, seed):
    torch.manual_seed(seed)
    return torch.randn(count, 96) @ torch.randn(96, 96) * torch.rand(96)


def output_error(weight, found, hessian):
    """The mean squared change of the outputs, relative to their mean square."""
    change, plain, hessian = (weight - found).double(), weight.double(), hessian.double()
    return float(((change @ hessian) * change).sum() / ((plain @ hessian) * plain).sum())


def test_gptq_is_the_solution_of_least_squares_column_by_column():
    scheme, inputs = scheme_of("w4a16", 32), correlated_inputs(400, 0)
    weight, hessian = torch.randn(24, 96), inputs.T @ inputs
    found, expected = (
        round_by_gptq(weight, hessian, scheme),
        by_least_squares(weight, hessian, scheme),
    )
    steps = scheme.scales(weight)[0].repeat_interleave(32, 1)
    same = (found - expected).abs() < 0.01 * steps
    assert same.float().mean() > 0.99  # the others stand on the edge between two steps
    ours, theirs = (output_error(weight, one.float(), hessian) for one in (found, expected))
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours < 0.6 * output_error(weight, rounded(weight, scheme), hessian)
    outputs = (inputs @ (weight - found).T).double().square().sum()
    assert ours == pytest.approx(float(outputs / (inputs @ weight.T).square().sum()), rel=1e-3)


def test_inputs_that_are_always_zero_are_rounded_to_nearest():
    scheme, inputs = scheme_of("w4a16", 32), correlated_inputs(50, 1)  # fewer rows than inputs
    inputs[:, 40:60] = 0
    weight = torch.randn(24, 96)
    found = round_by_gptq(weight, inputs.T @ inputs, scheme)
    assert torch.isfinite(found).all()
    assert torch.equal(found[:, 40:60], rounded(weight, scheme)[:, 40:60])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_layer_by_layer_the_model_computes_the_same(kind, tmp_path):
    base = save_model(tmp_path / "base", kind)
    model = open_layerwise(open_folder(base), (base / "config.json").read_text(), "base")
    rows = [[5, 6, 7, 8, 9, 10], [40, 3]]
    hidden, calls = model.record(rows)
    for place in range(len(model.layers)):
        with model.loaded(place) as (_, layer):
            hidden = [run_layer(layer, *both) for both in zip(hidden, calls[place], strict=True)]
    assert all(p.is_meta for p in model.model.parameters())
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for row, found in zip(rows, hidden, strict=True):
        expected = whole.get_decoder()(torch.tensor([row])).last_hidden_state
        torch.testing.assert_close(whole.get_decoder().norm(found), expected, atol=1e-6, rtol=1e-5)


ODD = {
    "deepseek_v3": "routers have buffers that are in the files",
    "codegen": "layers return tuples",
    "mamba2": "config.json has an infinite limit",
    "modernbert-decoder": "what transformers calls its decoder is its output head",
    "gemma3n_text": "layers read the keys and values of others",
}


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [name if name in ODD else pytest.param(name, marks=pytest.mark.proof) for name in SETTINGS],
)
def test_layer_by_layer_every_architecture_computes_the_same(name, tmp_path):
    model, outputs = build(name), []
    model.save_pretrained(tmp_path)
    try:
        opened = open_layerwise(open_folder(tmp_path), (tmp_path / "config.json").read_text(), name)
        (hidden,), calls = opened.record([list(range(5, 45))])
        for index in range(len(opened.layers)):
            with opened.loaded(index) as (_, layer):
                hidden = run_layer(layer, hidden, calls[index][0])
    except ModelError as error:
        assert name not in ODD
        pytest.skip(str(error))
    layer_list(model)[-1].register_forward_hook(lambda *given: outputs.append(given[2]))
    model(torch.arange(5, 45)[None], use_cache=False)
    (expected,) = (out[0] if isinstance(out, tuple) else out for out in outputs)
    assert (hidden - expected).norm() / expected.norm() < 1e-4


def test_layers_that_share_their_weights_are_refused(tmp_path, monkeypatch):
    base = save_model(tmp_path / "base")
    plain = AutoModelForCausalLM.from_config

    def shared(*given, **named):
        model = plain(*given, **named)
        model.model.layers[2].mlp = model.model.layers[0].mlp
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", shared)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp.* is used in several places"):
        open_layerwise(open_folder(base), (base / "config.json").read_text(), "base")


@torch.no_grad()
def test_what_is_infinite_is_named(tmp_path):
    base = save_model(tmp_path / "base", hidden_size=64, head_dim=16, intermediate_size=96)
    source = open_folder(base)
    tensors = {name: read_whole(source, name) for name in source.shapes()}

    def calibrate(name):
        broken = {n: t.clone() for n, t in tensors.items()}
        broken[name].view(-1)[7] = math.nan
        found = TensorsInMemory(broken)
        model = open_layerwise(found, (base / "config.json").read_text(), "base")
        layers = find_linear_layers(model.model, found.shapes(), "base")
        calibrator = Calibrator(model, layers, scheme_of("w4a16", 32))
        calibrator.run([list(range(40)), list(range(9))], tmp_path / name)

    with pytest.raises(ModelError, match=r"the embeddings: .* contains NaN or infinite values"):
        calibrate("model.embed_tokens.weight")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight: it contains NaN"):
        calibrate("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"layers\.1: .* contains NaN or infinite"):
        calibrate("model.layers.1.input_layernorm.weight")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    save_model(folder / "model", intermediate_size=96)
    save_data(folder / "data")
    surefoot.train(save_recipe(folder))
    return folder / "run"


def test_a_run_is_calibrated_on_its_data_and_loses_less(run_folder, tmp_path):
    """The layers' outputs on rows of the run, as transformers computes them."""
    out = {
        algorithm: export(
            run_folder,
            tmp_path / algorithm,
            w4a16(algorithm),
        )
        for algorithm in ("rtn", "gptq")
    }
    assert {p.name for p in out["rtn"].iterdir()} == {p.name for p in out["gptq"].iterdir()}
    encode = AutoTokenizer.from_pretrained(out["rtn"])
    ids = encode.apply_chat_template(
        [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}],
        return_tensors="pt",
        return_dict=False,
    )

    def states(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return model(ids, output_hidden_states=True).hidden_states[1]

    expected = states(export(run_folder, tmp_path / "plain"))
    errors = {name: float((states(one) - expected).norm()) for name, one in out.items()}
    assert errors["gptq"] < 0.8 * errors["rtn"]


def test_too_little_data_is_refused(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_data, "FEWEST_IN_ALL", 10**6)
    with pytest.raises(
        ModelError, match=r"18 rows of its training data have \d+ tokens in all, too"
    ):
        export(
            run_folder,
            tmp_path / "o",
            w4a16("gptq"),
        )
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_real_layers_lose_less_than_by_rounding(shared):
    """Weights and inputs of a trained model, and an independent loop in float64."""
    folder = shared / "models" / "stories260k"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lines = (shared / "data" / "c4_demo.jsonl").read_text().splitlines()[:4]
    encode, inputs = AutoTokenizer.from_pretrained(folder), []
    module = model.model.layers[2].mlp.up_proj
    module.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    for line in lines:
        ids = encode(json.loads(line)["text"], return_tensors="pt")["input_ids"][:, :256]
        model(ids)
    hessian = torch.cat(inputs).T @ torch.cat(inputs)
    scheme, weight = scheme_of("w4a16", 32), module.weight.data
    plain = output_error(weight, rounded(weight, scheme), hessian)
    ours = output_error(weight, round_by_gptq(weight, hessian, scheme), hessian)
    reference = by_least_squares(weight, hessian, scheme).float()
    assert ours == pytest.approx(output_error(weight, reference, hessian), rel=0.02)
    assert ours < 0.7 * plain


def test_calibration_needs_a_run_and_integers(base, tmp_path):
    with pytest.raises(ModelError, match="has no recipe, so no data to calibrate on"):
        export(base, tmp_path / "o", QuantizedFolder(quantize="w8a8", algorithm="gptq"))
    with pytest.raises(ModelError, match="fp8 has no integers; use w4a16 or w8a8"):
        export(base, tmp_path / "o", QuantizedFolder(quantize="fp8", algorithm="gptq"))
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_types_of_other_formats(base, tmp_path):
    words = ["export", base, tmp_path / "o", "--to"]
    for options, said in (
        (["compressed-tensors", "--quantize", "q8_0"], "expected one of fp8, w8a8"),
        (["gguf", "--quantize", "w8a8"], "not written by --to gguf"),
        (["compressed-tensors", "--quantize", "fp8", "--group-size", "64"], "use --quantize w4a16"),
    ):
        assert said in refused(*words, *options)
