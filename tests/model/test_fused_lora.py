"""LoRA in one pass gives what PEFT gives, gradients too."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear

import tiny
from surefoot.methods import LoRA
from surefoot.model import lora_layers
from surefoot.model.lora_layers import enable_fused_lora

IDS = torch.tensor([[5, 9, 11, 7, 8, 3], [4, 6, 21, 30, 31, 2]])


def adapted(kind="qwen2", dtype=torch.float64, **options):
    """PEFT's model and ours, of the same values; B is not zero, as it is at the start."""
    theirs = tiny.model(kind, dtype=dtype)
    config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", **options)
    torch.manual_seed(5)
    theirs = get_peft_model(theirs, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    ours = copy.deepcopy(theirs)
    enable_fused_lora(ours)
    return theirs, ours


def learnt(model, **arguments):
    torch.manual_seed(1)
    logits = model(input_ids=IDS, **arguments).logits
    logits.sin().sum().backward()
    return logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def distance(found, exact):
    return float((found.double() - exact).detach().norm())


def alone(layer, x):
    """What one layer gives, and the gradients of x, A and B."""
    x = x.clone().requires_grad_()
    found = layer(x)
    learning = [p for p in layer.parameters() if p.requires_grad]
    return found, torch.autograd.grad(found.sin().sum(), [x, *learning])


def passes(monkeypatch):
    """Counts the passes of ours."""
    found = []
    own = lora_layers._LowRank.apply
    monkeypatch.setattr(lora_layers._LowRank, "apply", lambda *a: found.append(a) or own(*a))
    return found


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_results_and_gradients_are_pefts(kind, options, monkeypatch):
    dtype = torch.float32 if kind == "gemma2" else torch.float64
    theirs, ours = adapted(kind, dtype, **options)
    counted = passes(monkeypatch)
    (expected, of_theirs), (found, of_ours) = learnt(theirs), learnt(ours)
    assert len(counted) == 3 * 7
    bound = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 0, "atol": 1e-3}
    torch.testing.assert_close(found, expected, **bound)
    assert of_ours.keys() == of_theirs.keys()
    torch.testing.assert_close(of_ours, of_theirs, **bound)


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"lora_dropout": 0.3}, {"lora_bias": True}], ids=str
)
@pytest.mark.filterwarnings("ignore:.*lora_bias=True")
def test_what_is_more_than_plain_is_pefts_own(options, monkeypatch):
    theirs, ours = (model.train() for model in adapted(**options))
    counted = passes(monkeypatch)
    (expected, of_theirs), (found, of_ours) = learnt(theirs), learnt(ours)
    assert not counted
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(of_ours, of_theirs)


def test_dropout_that_is_off_takes_nothing_away(monkeypatch):
    theirs, ours = (model.eval() for model in adapted(lora_dropout=0.3))
    counted = passes(monkeypatch)
    torch.testing.assert_close(learnt(ours), learnt(theirs))
    assert counted


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_under_autocast_all_is_cast_as_pefts(base, adapters, monkeypatch):
    theirs, ours = adapted(dtype=base)
    for model in (theirs, ours):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(adapters)
    theirs, ours = (next(m for m in w.modules() if isinstance(m, Linear)) for w in (theirs, ours))
    x = torch.randn(50, theirs.in_features)
    exact, of_exact = alone(copy.deepcopy(theirs).double(), x.double())
    counted = passes(monkeypatch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (expected, of_theirs), (found, of_ours) = alone(theirs, x), alone(ours, x)
    assert len(counted) == 1
    assert found.dtype == expected.dtype
    assert [g.dtype for g in of_ours] == [torch.float32, adapters, adapters]
    assert distance(found, exact) < 1.1 * distance(expected, exact)
    for our, their, right in zip(of_ours, of_theirs, of_exact, strict=True):
        assert distance(our, right) < 1.1 * distance(their, right)


def test_adapters_in_single_beside_a_base_in_half_are_added_in_single():
    theirs, ours = adapted(dtype=torch.bfloat16)
    for model in (theirs, ours):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    exact = learnt(copy.deepcopy(theirs).double())[0]
    expected, found = learnt(theirs)[0], learnt(ours)[0]
    assert distance(found, exact) < 1.2 * distance(expected, exact)


def test_an_adapter_that_is_off_or_merged_is_seen():
    theirs, ours = adapted()
    for model in (theirs, ours):
        model.eval()
    with theirs.disable_adapter(), ours.disable_adapter():
        torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits)
    before = ours(IDS).logits
    ours.merge_adapter()
    torch.testing.assert_close(ours(IDS).logits, before)
    ours.unmerge_adapter()
    torch.testing.assert_close(ours.merge_and_unload()(IDS).logits, before)


def test_what_our_method_wraps_computes_so(monkeypatch):
    counted = passes(monkeypatch)
    model = LoRA(rank=2).apply(tiny.model())
    enable_fused_lora(model)
    learnt(model)
    layers = [m for m in model.modules() if isinstance(m, Linear)]
    assert len(counted) == len(layers) > 0


def test_x_is_saved_once_for_both_products():
    model = LoRA(rank=2).apply(tiny.model(dtype=torch.float64))
    enable_fused_lora(model)
    layer = next(m for m in model.modules() if isinstance(m, Linear))
    x = torch.randn(1, 7, layer.in_features, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert [t.shape for t in saved].count(x.shape) == 1
    assert len(saved) == 5  # and W, A, B, A x


def test_a_model_without_memory_can_be_asked():
    with torch.device("meta"):
        model = LoRA(rank=2).apply(tiny.model())
        assert model(IDS).logits.is_meta


def test_a_frozen_a_keeps_no_input_for_the_backward_pass():
    model = LoRA(rank=2, freeze_a=True).apply(tiny.model(dtype=torch.float64))
    enable_fused_lora(model)
    layer = next(m for m in model.modules() if isinstance(m, Linear))
    x = torch.randn(1, 7, layer.in_features, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert x.shape not in [t.shape for t in saved]


def test_several_adapters_of_one_scale_are_computed_as_one(monkeypatch):
    results = []
    for is_fused in (False, True):
        torch.manual_seed(2)
        model = LoRA(rank=2, init="pissa").apply(tiny.model(dtype=torch.float64))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_()
        counted = passes(monkeypatch)
        if is_fused:
            enable_fused_lora(model)
        results.append(learnt(model))
        assert bool(counted) == is_fused
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)
