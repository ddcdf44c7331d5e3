"""Muon against torch's, its division of a model's parameters, and its fused matrices."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

import ranks
import tiny
from each import some
from spread import learn, trainer
from surefoot.errors import RecipeError
from surefoot.methods import LoRA
from surefoot.network._parameter_names import kinds_of
from surefoot.optim._rules import orthogonalization
from surefoot.optim._rules.orthogonalization import (
    BATCH,
    balanced,
    newton_schulz,
    on_owners,
    orthogonalized,
)
from surefoot.optim._rules.sharded import buckets, size_of_part
from surefoot.optim._variants.muon import Muon
from surefoot.optim.state_tensor import ParameterKind
from surefoot.optim.trained import TrainedParameters
from surefoot.parallel.world import ALONE


def parameters(**shapes):
    torch.manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def train(optimizers, named, steps=4):
    for step in range(steps):
        for name, p in named.items():
            p.grad = torch.sin(p.detach() * (step + 1) + len(name))
        for optimizer in optimizers:
            optimizer.step()


class TorchInFloat64:
    """torch, whose bfloat16 is float64."""

    bfloat16 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def iterate_in_float64(monkeypatch):
    """Both iterations, torch's and Surefoot's, to compare them closely."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)  # up to torch 2.14
    monkeypatch.setattr("torch.optim._muon.torch", TorchInFloat64())  # from 2.15 on
    monkeypatch.setattr(orthogonalization, "NS_DTYPE", torch.float64)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_are_updated_as_by_torch_and_the_rest_by_adamw(scale, nesterov, monkeypatch):
    iterate_in_float64(monkeypatch)
    shapes = {"wide": (6, 20), "tall": (20, 6), "norm": (20,), "embed": (30, 6)}
    ours, theirs = parameters(**shapes), parameters(**shapes)
    layouts = {"wide": ParameterKind(is_matrix=True), "tall": ParameterKind(is_matrix=True)}
    ways = {"momentum": 0.9, "nesterov": nesterov, "lr_scale": scale}
    others = {"adamw_learning_rate": 3e-3, "adamw_beta2": 0.95}
    optim = Muon(learning_rate=0.02, weight_decay=0.1, **ways, **others)
    train([TrainedParameters(optim, ours, layouts=layouts).optimizer], ours)
    matrices, others = ([theirs[n] for n in names] for names in (("wide", "tall"), ("embed",)))
    usual = {"lr": 3e-3, "betas": (0.9, 0.95)}
    expected = torch.optim.Muon(
        matrices, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale
    )
    decayed = torch.optim.AdamW(others, weight_decay=0.1, **usual)
    train([expected, decayed, torch.optim.AdamW([theirs["norm"]], weight_decay=0, **usual)], theirs)
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=1e-6, msg=name)


def test_the_iteration_is_torchs_in_bfloat16_and_beyond(monkeypatch):
    from torch.optim._muon import _zeropower_via_newtonschulz as theirs

    matrix = torch.randn(7, 12, generator=torch.Generator().manual_seed(1))
    for one in (matrix, matrix.T, matrix @ matrix.T):
        bits = theirs(one, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert torch.equal(newton_schulz(one, 5), bits)
    iterate_in_float64(monkeypatch)
    expected = theirs(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    torch.testing.assert_close(newton_schulz(matrix, 5), expected)
    batch = torch.stack([matrix, 3 * matrix.roll(1, 0)])
    both = newton_schulz(batch, 5)
    torch.testing.assert_close(both[0], expected)
    torch.testing.assert_close(both[1], newton_schulz(batch[1], 5))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("layout", "pieces"),
    [
        (ParameterKind(is_matrix=True, parts=(6, 2, 2)), [range(6), range(6, 8), range(8, 10)]),
        (
            ParameterKind(is_matrix=True, parts=(6, 2, 2), num_groups=2),
            [[0, 1, 2, 5, 6, 7], [3, 8], [4, 9]],
        ),
        (
            ParameterKind(is_matrix=True, parts=(5, 5), num_groups=5),
            [range(0, 10, 2), range(1, 10, 2)],
        ),
    ],
)
def test_fused_matrices_are_orthogonalized_one_by_one(layout, pieces, is_transposed, monkeypatch):
    monkeypatch.setattr(orthogonalization, "NS_DTYPE", torch.float64)
    experts = torch.randn(3, 10, 4, generator=torch.Generator().manual_seed(1))
    layout = replace(layout, is_transposed=is_transposed)
    optim = Muon()
    found = orthogonalized(experts.mT if is_transposed else experts, layout, 5, optim.scale)
    found = found.mT if is_transposed else found
    for expert in range(3):
        for rows in pieces:
            one = experts[expert][list(rows)]
            expected = newton_schulz(one, 5) * 0.2 * max(one.shape) ** 0.5
            torch.testing.assert_close(
                found[expert][list(rows)].double(), expected, rtol=1e-5, atol=1e-6
            )


def layouts(model):
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    inner = getattr(model, "base_model", model)
    inner = inner.model if hasattr(inner, "peft_config") or hasattr(model, "peft_config") else model
    return kinds_of(inner, named)


def test_only_matrices_inside_layers_are_muons():
    found = layouts(tiny.model("qwen2"))
    assert {n.split(".")[-2] for n, one in found.items() if one.is_matrix} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    found = layouts(tiny.model("qwen3_moe"))
    fused = {n.split("mlp.")[-1] for n, one in found.items() if "mlp" in n and one.is_matrix}
    assert fused == {"experts.gate_up_proj", "experts.down_proj"}
    assert found["model.layers.0.mlp.experts.gate_up_proj"].parts == (24, 24)
    assert found["model.layers.0.self_attn.q_proj.weight"].head_size == 8
    found = layouts(LoRA(modules_to_save=("lm_head",)).apply(tiny.model()))
    assert found
    assert not any(one.is_matrix for one in found.values())


def test_fused_attention_and_gates_are_known():
    found = layouts(tiny.model("phi3"))
    assert found["model.layers.0.self_attn.qkv_proj.weight"].parts == (32, 16, 16)
    assert found["model.layers.0.mlp.gate_up_proj.weight"].parts == (48, 48)
    from transformers import GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM

    gpt2 = layouts(GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)))
    qkv = gpt2["transformer.h.0.attn.c_attn.weight"]
    assert (qkv.parts, qkv.is_transposed) == ((8, 8, 8), True)
    assert not gpt2["transformer.wpe.weight"].is_matrix
    config = GptOssConfig(**tiny.SIZES, num_local_experts=2, num_experts_per_tok=1)
    experts = layouts(GptOssForCausalLM(config))["model.layers.0.mlp.experts.gate_up_proj"]
    assert (experts.parts, experts.is_transposed, experts.num_groups) == ((48, 48), True, 48)


USUAL = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
SHORT = {"vocab_size": 20, "n_embd": 16, "n_layer": 1, "n_head": 4}
ONE = {"num_hidden_layers": 1}
LINEAR = {"layer_types": ["linear_attention"], **ONE, "head_dim": 4}
GATED = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 4}
GATED |= {"linear_value_head_dim": 8, **LINEAR, "num_key_value_heads": 2}
FUSED = [
    ("gpt_neox", {**USUAL, **ONE}),
    ("bloom", {"vocab_size": 20, "hidden_size": 16, "n_layer": 1, "n_head": 4}),
    ("falcon", {**USUAL, **ONE, "num_kv_heads": 2, "new_decoder_architecture": True}),
    ("falcon", {**USUAL, **ONE, "multi_query": True}),
    ("falcon", {**USUAL, **ONE, "multi_query": False}),
    ("persimmon", {**USUAL, **ONE}),
    ("codegen", {**SHORT, "rotary_dim": 4, "n_positions": 32}),
    ("gpt_bigcode", {**SHORT, "multi_query": True}),
    ("gpt_bigcode", {**SHORT, "multi_query": False}),
    ("gpt2", SHORT),
    ("openai-gpt", SHORT),
    ("mpt", {"vocab_size": 20, "d_model": 16, "n_layers": 1, "n_heads": 4}),
    ("phi3", {**USUAL, **ONE, "num_key_value_heads": 2, "pad_token_id": 0}),
    ("minimax", {**USUAL, **LINEAR, "num_key_value_heads": 2, "num_local_experts": 2}),
    ("qwen3_5_text", {**USUAL, **GATED}),
    (
        "qwen3_next",
        {**USUAL, **GATED, "num_experts": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 1},
    ),
]


@pytest.mark.parametrize(("kind", "sizes"), FUSED)
@torch.no_grad()
def test_queries_keys_and_values_are_told_apart(kind, sizes):
    """Without values, attention says nothing; without queries, keys do not matter, and so on."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    named = dict(model.named_parameters())
    ids = torch.arange(10)[None]

    def logits(matrices, number, other):
        matrices[number].zero_()
        if other is not None:
            matrices[other].add_(torch.randn(matrices[other].shape))
        return model(input_ids=ids, use_cache=False).logits

    name, layout = next(
        (n, k)
        for n, k in kinds_of(model, named).items()
        if len(k.parts) > 2 or (k.parts and "gate" not in n)
    )
    if name.replace("weight", "bias") in named:
        named[name.replace("weight", "bias")].zero_()
    weight, start = named[name], named[name].clone()
    matrices = layout.matrices(weight.T if layout.is_transposed else weight)
    order = (0, 2, 1) if kind == "codegen" else range(len(matrices))  # queries, values, keys
    query, key, value, *_ = order
    for number, without in ((query, {key}), (key, {query}), (value, {query, key})):
        expected = logits(matrices, number, None)
        for other in {*order} - {number}:
            weight.copy_(start)
            found = logits(matrices, number, other)
            is_same = torch.allclose(found, expected, atol=1e-6)
            is_nothing = number == value or "layer_types" in sizes  # linear: a product of all
            assert is_same == (other in without or is_nothing), (number, other)
        weight.copy_(start)


def test_attention_that_is_fused_in_an_unknown_order_is_refused(monkeypatch):
    model = tiny.model("phi3")
    named = dict(model.named_parameters())
    Muon().build(named.items(), kinds_of(model, named))
    attention = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "__module__", "transformers_modules.own.modeling_own")
    kinds = kinds_of(model, named)
    with pytest.raises(RecipeError, match=r"qkv_proj.weight is not known .* another optimizer"):
        Muon().build(named.items(), kinds)


def test_owners_share_the_work_and_each_rank_gets_its_parts():
    shapes = [(7, 5), (2, 9), (5, 5), (4, 6, 3), (4, 3, 6)]
    dims = [0, 0, 1, 1, 0]  # the last: whole experts
    full = [torch.arange(float(prod(shape))).view(shape).sin() for shape in shapes]

    def work(world):
        mesh = init_device_mesh("cpu", (world.size,))
        cut = [
            distribute_tensor(one, mesh, [Shard(dim)]) for one, dim in zip(full, dims, strict=True)
        ]
        done = []

        def compute(number, matrix):
            done.append(number)
            return matrix.double() * (number + 1)

        parts = [one.to_local() for one in cut]
        made = on_owners(parts, cut, compute)
        expected = [
            distribute_tensor(one * (n + 1), mesh, [Shard(dim)]).to_local()
            for n, (one, dim) in enumerate(zip(full, dims, strict=True))
        ]
        for ours, theirs in zip(made, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert [size_of_part(one) for one in cut][:2] == [12, 6]
        return done

    done = ranks.run(3, work)
    assert sorted(one for each in done for one in each) == [0, 1, 2, 3, 4, 4, 4]
    assert all(done)


def test_work_is_balanced():
    assert balanced([1.0, 8.0, 4.0, 3.0, 2.0], 2) == [0, 0, 1, 1, 1]
    assert [*buckets([BATCH, 3, BATCH - 3], int, BATCH)] == [[BATCH], [3, BATCH - 3]]


MESHES = [
    ({"dp_shard": 2}, "qwen3"),
    ({"dp_shard": 2, "tp": 2}, "llama"),
    ({"dp_shard": 2}, "qwen3_moe"),
]


@pytest.mark.parametrize(("mesh", "kind"), some(MESHES, MESHES[1:2]))
def test_a_mesh_learns_what_one_process_learns(mesh, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(orthogonalization, "NS_DTYPE", torch.float64)
    changes = {"kind": kind, "optim": Muon(learning_rate=5e-3), "dtype": torch.float64}
    if kind == "qwen3_moe":
        changes["dtype"] = torch.float32  # there are no experts in float64
    expected = learn(trainer(ALONE, tmp_path, **changes), 3)
    count = mesh["dp_shard"] * mesh.get("tp", 1)
    found = ranks.run(count, lambda world: learn(trainer(world, tmp_path, **changes), 3), **mesh)
    for one in found:
        for step, (ours, theirs) in enumerate(zip(one, expected, strict=True)):
            assert ours == pytest.approx(theirs, rel=1e-4 if "moe" in kind else 1e-6), step
