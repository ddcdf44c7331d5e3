"""What LoRA adapts in mixtures and state-space models, and what it says of the rest."""

import pytest
import torch
from peft import PeftModel
from torch import nn

import mixtures
import tiny
from surefoot.errors import RecipeError
from surefoot.methods import LoRA
from surefoot.model.lora_layers import enable_fused_lora
from surefoot.model.weight_matrices import READ, ROUTER, adapted, matrices

IDS = torch.arange(3, 63).view(4, 15)
FEW = ["qwen2_moe", "deepseek_v3", "hunyuan_v1_moe", "longcat_flash", "phimoe", "jamba", "mamba"]
KINDS = [k if k in FEW else pytest.param(k, marks=pytest.mark.proof) for k in mixtures.KINDS]
# Linear layers that `all` leaves out, beside the head.
ROUTERS = {
    "hunyuan_v1_moe": {"gate.wg"},
    "afmoe": {"router.gate"},
    "longcat_flash": {"router.classifier"},
    "jetmoe": {"router.layer"},
    "phimoe": {"mlp.router"},
    "llama4_text": {"feed_forward.router"},
    "doge": {"mlp.router_gate"},
}
PAST = {  # whose weight the layer around it reads itself
    "granitemoehybrid": {"out_proj"},
    "jamba": {"dt_proj"},
    "bamba": {"out_proj"},
    "mamba": {"x_proj", "dt_proj", "out_proj"},
    "mamba2": {"out_proj"},
    "falcon_mamba": {"x_proj", "dt_proj", "out_proj"},
    "falcon_h1": {"out_proj"},
    "nemotron_h": {"out_proj"},
}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def ending(name, endings):
    return next((e for e in endings if name.endswith(f".{e}.weight")), None)


@pytest.mark.parametrize("kind", KINDS)
def test_all_is_every_linear_map_and_every_expert_but_routers(kind):
    """By an independent count: every parameter of a linear layer, and all with three dimensions
    but convolutions."""
    model = mixtures.model(kind)
    head = model.get_output_embeddings()
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    experts = {n for n, p in model.named_parameters() if p.ndim == 3 and "conv" not in n}
    routers, past = ROUTERS.get(kind, set()), PAST.get(kind, set())
    left = {n for n in linear if ending(n, routers | past)}
    assert {ending(n, routers | past) for n in left} == routers | past
    why = {m.name: m.left_out for m in matrices(model) if m.left_out in (ROUTER, READ)}
    assert why == {n: ROUTER if ending(n, routers) else READ for n in left}
    assert set(adapted(LoRA(rank=2).apply(model))) == linear - left | experts


@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_gets_a_gradient_and_fused_ones_compute_what_peft_does(kind):
    model = LoRA(rank=2).apply(mixtures.model(kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    expected = model(input_ids=IDS, use_cache=False).logits
    enable_fused_lora(model)
    found = model(input_ids=IDS, use_cache=False).logits
    assert torch.allclose(found, expected, atol=3e-6)
    found.sin().sum().backward()
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert not [n for n, p in learning.items() if p.grad is None or not p.grad.any()]


def test_names_mean_linear_layers_and_experts_alike():
    """PEFT itself would take them for the experts alone, and drop dense and shared layers."""
    named = LoRA(rank=2, targets=("gate_proj", "up_proj", "down_proj"))
    found = set(adapted(named.apply(mixtures.model("deepseek_v3"))))
    assert {name.removeprefix("model.layers.") for name in found} == {
        "0.mlp.gate_proj.weight",
        "0.mlp.up_proj.weight",
        "0.mlp.down_proj.weight",
        "1.mlp.experts.gate_up_proj",
        "1.mlp.experts.down_proj",
        "1.mlp.shared_experts.gate_proj.weight",
        "1.mlp.shared_experts.up_proj.weight",
        "1.mlp.shared_experts.down_proj.weight",
    }


@pytest.mark.parametrize(
    ("kind", "targets", "found"),
    [
        ("mixtral", ("experts.down_proj",), {"mlp.experts.down_proj"}),
        ("mixtral", ("w1", "w3"), {"mlp.experts.gate_up_proj"}),
        ("mixtral", ("gate",), {"mlp.gate.weight"}),
        ("lfm2_moe", ("w1",), {"feed_forward.w1.weight"}),
        ("jamba", ("mamba.in_proj",), {"mamba.in_proj.weight"}),
        ("qwen2_moe", ("embed_tokens",), {"embed_tokens.weight"}),
    ],
)
def test_a_target_is_the_end_of_a_name(kind, targets, found):
    if (kind, targets) == ("lfm2_moe", ("w1",)):
        targets = ("feed_forward.w1",)
    names = adapted(LoRA(rank=2, targets=targets).apply(mixtures.model(kind)))
    assert {n.removeprefix("model.").split(".", 2 * n.count("layers"))[-1] for n in names} == found


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("mixtral", {"targets": ("w1",)}, "w1 is one matrix with w3 in memory; name w1 and w3"),
        ("mixtral", {"targets": ("mlp",)}, "'mlp' is no linear layer; expected all"),
        ("mixtral", {"targets": ("w9",)}, "'w9' is not in the model; expected all"),
        ("phimoe", {"targets": ("router",)}, "router cannot have an adapter in this model"),
        ("mamba", {"targets": ("out_proj",)}, "out_proj cannot have an adapter .* past any"),
        ("mamba", {"targets": ("conv1d",)}, "PEFT cannot adapt this model: .* incompatible"),
        ("mixtral", {"dropout": 0.1}, r"lora.dropout: PEFT has none for .*experts"),
        ("mixtral", {"dora": True}, r"lora.dora: PEFT has none for .*experts"),
        ("mixtral", {"targets": ("q_proj",), "modules_to_save": ("self_attn",)}, "nothing to"),
    ],
)
def test_what_cannot_be_adapted_is_refused_in_a_sentence(kind, settings, words):
    with pytest.raises(RecipeError, match=words):
        LoRA(rank=2, **settings).apply(mixtures.model(kind))


def test_what_is_trained_in_full_has_no_adapter():
    model = LoRA(rank=2, modules_to_save=("shared_experts",)).apply(mixtures.model("deepseek_v3"))
    assert not [n for n in adapted(model) if "shared_experts" in n]
    assert any("shared_experts" in n and p.requires_grad for n, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe"])
def test_chosen_layers_alone_are_adapted_and_peft_opens_them_so(kind, tmp_path):
    model = mixtures.model(kind)
    every = set(adapted(LoRA(rank=2, targets=("all",)).apply(mixtures.model(kind))))
    wrapped = LoRA(rank=2, layers=(-1,)).apply(model)
    last = f"model.layers.{model.config.num_hidden_layers - 1}."
    assert set(adapted(wrapped)) == {n for n in every if n.startswith(last)}
    wrapped.save_pretrained(tmp_path)
    opened = PeftModel.from_pretrained(mixtures.model(kind), tmp_path)
    assert set(adapted(opened)) == set(adapted(wrapped))


def test_ranks_and_alphas_by_pattern_are_those_of_peft(tmp_path):
    settings = {"rank_pattern": {"q_proj": 4, r"layers\.1\..*": 3}, "alpha_pattern": {"o_proj": 9}}
    wrapped = LoRA(rank=2, targets=("q_proj", "o_proj"), **settings).apply(tiny.model())
    found = {
        n.split("layers.")[1]: (m.r["default"], m.scaling["default"])
        for n, m in adapted(wrapped).items()
    }
    assert found == {
        "0.self_attn.q_proj.weight": (4, 4 / 4),
        "0.self_attn.o_proj.weight": (2, 9 / 2),
        "1.self_attn.q_proj.weight": (4, 4 / 4),
        "1.self_attn.o_proj.weight": (3, 9 / 3),
        "2.self_attn.q_proj.weight": (4, 4 / 4),
        "2.self_attn.o_proj.weight": (2, 9 / 2),
    }
    expected = wrapped(input_ids=IDS).logits
    enable_fused_lora(wrapped)
    torch.testing.assert_close(wrapped(input_ids=IDS).logits, expected)


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_without_effect_or_sense_is_refused(name):
    words = rf"^method\.lora\.{name}: 'k_proj' is none of the modules that are adapted, such as"
    with pytest.raises(RecipeError, match=words):
        LoRA(rank=2, targets=("q_proj",), **{name: {"k_proj": 4}}).apply(tiny.model())
    with pytest.raises(ValueError, match=rf"{name} must be positive, got 0 for q_proj"):
        LoRA(**{name: {"q_proj": 0}})
    with pytest.raises(ValueError, match=rf"{name}: '\(' is no regular expression"):
        LoRA(**{name: {"(": 1}})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": (2,)}, r"^method\.lora\.layers: the model has 2 layers, 0 to 1, not 2$"),
        ({"layers": (0, -3)}, "0 to 1, not -3"),
        ({"layers": (0,), "targets": ("embed_tokens",)}, "none of them is in method.lora.layers"),
    ],
)
def test_layers_that_are_not_there_are_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        LoRA(rank=2, **settings).apply(mixtures.model("deepseek_v3"))


def test_a_rank_above_the_shorter_side_of_all_matrices_is_refused():
    with pytest.raises(RecipeError, match=r"rank: 33 .* 21 matrices of 21.*set 32 or less"):
        LoRA(rank=33).apply(tiny.model())
    with pytest.raises(RecipeError, match=r"rank: 99 .* 3 matrices of 3.*set 32 or less"):
        LoRA(targets=("q_proj",), rank_pattern={"q_proj": 99}).apply(tiny.model())


def test_a_rank_above_the_shorter_side_of_some_matrices_is_said_once(caplog):
    LoRA(rank=20).apply(tiny.model())
    (record,) = caplog.records
    assert "rank: 20 is more than the shorter side of 6 matrices of 21" in record.message
    caplog.clear()
    LoRA(rank=20, rank_pattern={"k_proj": 16, "v_proj": 16}).apply(tiny.model())
    assert not caplog.records
