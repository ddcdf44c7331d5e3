"""AWQ's scales change nothing before weights are rounded, and then the outputs change less."""

import json
import logging
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import surefoot
from folders import save_data, save_model, save_recipe
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.sources.source import TensorsInMemory, read_whole
from surefoot.errors import ModelError
from surefoot.inference import export, open_model

pytest.importorskip("compressed_tensors")

from surefoot.inference.held_out_set import held_out
from surefoot.inference.quantizing import rows as calibration_data
from surefoot.inference.quantizing.awq import GRID, Reader, best_scales, error_of, round_to_nearest
from surefoot.inference.quantizing.calibration import Calibrator
from surefoot.inference.quantizing.export import QuantizeOptions, export_quantized
from surefoot.inference.quantizing.foldings import Folding, find_foldings
from surefoot.inference.quantizing.inputs import QuantizedMatrix, matrices_of
from surefoot.inference.quantizing.layerwise import open_layerwise, run
from surefoot.inference.quantizing.linear_layers import find_linear_layers
from surefoot.inference.quantizing.schemes import scheme_of
from surefoot.inference.quantizing.trial import LayerTrial
from surefoot.inference.receipts.verification import verify_export
from zoo.architectures import SETTINGS, build

IDS = torch.arange(60, 92)[None]
SCHEME = scheme_of("w4a16", 32)
AWQ = QuantizeOptions(32, "awq")


def first_layer(model, **others):
    """Of a transformers model: the layer, the hidden states before it, and what it is called with,
    besides ``others``."""
    layer, seen = model.get_decoder().layers[0], []
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0], (args[1:], {**kwargs, **others}))),
        with_kwargs=True,
    )
    model(IDS, use_cache=False)
    hook.remove()
    return layer, *seen[0]


def foldings_of(model, **others):
    """Of one layer of a transformers model: its layer and what may be folded in it."""
    layer, hidden, call = first_layer(model, **others)
    wanted = {id(p) for name, p in layer.named_parameters() if p.ndim > 1 and "gate." not in name}
    size = model.config.head_dim or model.config.hidden_size // model.config.num_attention_heads
    return layer, find_foldings(layer, hidden, call, size, wanted)


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


@torch.no_grad()
def test_values_that_later_layers_read_are_left_alone(tmp_path):
    """Layers of Gemma 3n without keys and values of their own read those of a layer before."""
    model, kept = opened(tmp_path, "llama"), {}
    layer = model.model.layers[0]
    layer.self_attn.v_proj.register_forward_hook(lambda *given: kept.update(values=(given[2],)))
    _, found = foldings_of(model, shared_kv_states=kept)
    names = {id(p): name.split(".")[-2] for name, p in layer.named_parameters()}
    assert {names[id(p)] for one in found for p in one.consumers} == EVERY - {"o_proj"}


def trial_of(model):
    layer, *row = first_layer(model)
    matrices = [
        QuantizedMatrix(name, p.detach(), torch.float32, (0, 0, 0))
        for name, p in layer.named_parameters()
        if p.ndim == 2
    ]
    dtypes = {id(p): torch.float32 for p in layer.parameters()}
    return LayerTrial(layer, matrices, [tuple(row)], SCHEME, dtypes)


@torch.no_grad()
def test_scales_with_which_a_layer_computes_worse_are_not_folded(tmp_path):
    model = opened(tmp_path, "llama", hidden_size=64, head_dim=16, intermediate_size=96).float()
    layer, found = foldings_of(model)
    before = [p.clone() for p in layer.parameters()]
    wild = [(one, torch.logspace(-3, 3, one.num_scales)[None]) for one in found]
    assert trial_of(model).fold_better(wild) == []
    assert all(map(torch.equal, before, layer.parameters()))


@torch.no_grad()
def test_scales_with_which_a_layer_computes_better_are_folded(tmp_path):
    """Beside the outputs of a layer that was folded and rounded by hand."""
    model = opened(tmp_path, "llama", hidden_size=64, head_dim=16, intermediate_size=96).float()
    norm = model.model.layers[0].post_attention_layernorm
    norm.weight[:] = 1
    norm.weight[[3, 40]] = 50
    layer, hidden, (args, kwargs) = first_layer(model)
    expected = layer(hidden, *args, **kwargs)
    _, found = foldings_of(model)
    one = next(folding for folding in found if folding.producer is norm.weight)
    scales = norm.weight.sqrt()[None]
    trial = trial_of(model)

    def rounded_error(choices):
        plain = [p.clone() for p in layer.parameters()]
        for folding, factors in choices:
            folding.fold(factors)
        for matrix in trial.matrices:
            matrix.weight.copy_(round_to_nearest(matrix.weight, SCHEME, torch.float32))
        error = float((layer(hidden, *args, **kwargs) - expected).norm())
        for parameter, values in zip(layer.parameters(), plain, strict=True):
            parameter.copy_(values)
        return error

    assert rounded_error([(one, scales)]) < 0.9 * rounded_error([])
    assert trial.fold_better([(one, scales), (one, 1e6**scales)]) == [(one, scales)]
    torch.testing.assert_close(
        norm.weight, torch.ones(64).index_fill(0, torch.tensor([3, 40]), 50**0.5)
    )
    torch.testing.assert_close(layer(hidden, *args, **kwargs), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_what_is_infinite_is_named(algorithm, tmp_path):
    base = save_model(tmp_path / "base", hidden_size=64, head_dim=16, intermediate_size=96)
    source = open_folder(base)
    tensors = {name: read_whole(source, name) for name in source.shapes()}

    def calibrate(name):
        broken = {n: t.clone() for n, t in tensors.items()}
        broken[name].view(-1)[7] = math.nan
        found = TensorsInMemory(broken)
        model = open_layerwise(found, (base / "config.json").read_text(), "base")
        layers = find_linear_layers(model.model, found.shapes(), "base")
        calibrator = Calibrator(model, layers, SCHEME, algorithm)
        calibrator.run([list(range(40)), list(range(9))], tmp_path / name)

    with pytest.raises(ModelError, match=r"the embeddings: .* contains NaN or infinite values"):
        calibrate("model.embed_tokens.weight")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight: it contains NaN"):
        calibrate("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"layers\.1: .* contains NaN or infinite"):
        calibrate("model.layers.1.input_layernorm.weight")


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
    settings = receipt["artefact"]["settings"]
    assert (settings["algorithm"], settings["group_size"]) == ("awq", 32)
    assert settings["num_scaled"] + settings["num_unscaled"] == 7 * 3
    assert settings["num_scaled"] > 10


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


def test_too_little_data_is_refused(run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_data, "FEWEST", 10**6)
    with pytest.raises(
        ModelError, match=r"18 rows of its training data have \d+ tokens in all, too"
    ):
        export_quantized(run_folder, tmp_path / "o", quantize="w4a16", options=AWQ)
    assert not list(tmp_path.iterdir())


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
def test_folded_scales_leave_the_logits_of_every_architecture(name, tmp_path):
    """All layers of a model are folded at random; transformers then computes the same."""
    model = build(name)
    model.save_pretrained(tmp_path)
    source = open_folder(tmp_path)
    try:
        found = open_layerwise(source, (tmp_path / "config.json").read_text(), name)
        layers = find_linear_layers(found.model, source.shapes(), name)
        hidden, calls = found.record([list(range(5, 45))])
    except ModelError as error:
        assert name not in ODD
        pytest.skip(str(error))
    folded, generator = 0, torch.Generator().manual_seed(0)
    changed = {}
    for place in range(len(found.layers)):
        with found.loaded(place) as (prefix, layer):
            matrices = matrices_of(layer, prefix, layers, source.dtypes())
            wanted = {
                id(p)
                for p in layer.parameters()
                if p.untyped_storage()._cdata in {one.place[0] for one in matrices}
            }
            for one in find_foldings(layer, hidden[0], calls[place][0], found.head_size, wanted):
                shape = one.num_experts, one.num_scales
                one.fold(0.5 + torch.rand(shape, generator=generator))
                folded += 1
            hidden = [run(layer, hidden[0], calls[place][0])]
            changed |= {f"{prefix}.{n}": p.detach().clone() for n, p in layer.named_parameters()}
    ids = torch.randint(5, 60, (3, 40), generator=generator)
    expected = model(ids).logits
    for parameter, values in changed.items():
        model.get_parameter(parameter).copy_(values)
    error = (model(ids).logits - expected).norm() / expected.norm()
    assert error < 1e-4
    assert folded or name not in ODD
