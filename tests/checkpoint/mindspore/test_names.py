import pytest
import torch

from surefoot.checkpoint.mindspore.names import (
    FAMILIES,
    Heads,
    family_of,
    heads_of,
    to_huggingface,
    to_mindspore,
    usual,
)
from surefoot.checkpoint.source import Memory, read_whole
from surefoot.errors import CheckpointError
from tiny import model

HEADS = Heads(4, 2)


def weights(kind="qwen2"):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made = model(kind, **sizes).state_dict()
    return {name: torch.randn_like(tensor) for name, tensor in made.items()}


def kinds(family):
    return "qwen3" if family.startswith("mcore") else "qwen2"


def named(family, tensors):
    source = to_mindspore(Memory(tensors), family, HEADS)
    return {name: read_whole(source, name) for name in source.shapes()}


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bitwise(family):
    tensors = weights(kinds(family))
    there = named(family, tensors)
    assert there.keys().isdisjoint(tensors.keys() - {"lm_head.weight"})
    back = to_huggingface(Memory(there), family, HEADS)
    assert back.shapes() == {name: tuple(t.shape) for name, t in tensors.items()}
    assert all(torch.equal(read_whole(back, name), t) for name, t in tensors.items())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mcore-contiguous"])
def test_a_family_is_known_by_its_names(family):
    there = named(family, weights(kinds(family)))
    assert family_of({name: tuple(t.shape) for name, t in there.items()}) == family
    assert family_of({"model.norm.weight": (1,)}) is None


def test_the_fused_projections_are_those_of_mindspore():
    """Their own formula, in plain torch."""
    tensors = weights()
    there = named("legacy-fused", tensors)
    for kind, inner in (("weight", 64), ("bias", 1)):
        q, k, v = (tensors[f"model.layers.0.self_attn.{n}_proj.{kind}"] for n in "qkv")
        inner = q.shape[1] if kind == "weight" else 1
        groups = [part.reshape(HEADS.keys, -1, inner) for part in (q, k, v)]
        expected = torch.cat(groups, 1).reshape(-1, inner)
        found = there[f"model.layers.0.attention.w_qkv.{kind}"]
        assert torch.equal(found.reshape(-1, inner), expected)
    gate, up = (tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    expected = torch.stack([gate, up], 1).reshape(-1, gate.shape[1])
    assert torch.equal(there["model.layers.1.feed_forward.w_gate_hidden.weight"], expected)


def test_contiguous_ones_lie_end_to_end():
    tensors = weights("qwen3")
    there = named("mcore-contiguous", tensors)
    parts = [tensors[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qkv"]
    assert torch.equal(there["decoder.layers.0.self_attention.linear_qkv.weight"], torch.cat(parts))
    parts = [tensors[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    assert torch.equal(there["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat(parts))


def test_moments_change_as_their_weights_do():
    tensors = weights()
    moments = {f"adam_m.{name}": tensor * 2 for name, tensor in tensors.items()}
    there = named("legacy-fused", {**tensors, **moments})
    own = {name: tensor for name, tensor in there.items() if not name.startswith("adam_m.")}
    assert len(there) == 2 * len(own)
    assert all(torch.equal(there[f"adam_m.{name}"], tensor * 2) for name, tensor in own.items())


def test_the_real_names_are_those_of_the_legacy_family(truth):
    model = {name: tensor for name, tensor in truth.items() if not name.startswith("adam")}
    back = to_huggingface(Memory(model), family_of({n: t.shape for n, t in model.items()}))
    assert "model.layers.1.self_attn.q_proj.weight" in back.shapes()
    again = to_mindspore(back, "legacy")
    assert again.shapes().keys() == model.keys()


def test_a_model_with_norms_of_queries_is_named_as_mcore():
    assert usual(dict.fromkeys(weights("qwen3"))) == "mcore"
    assert usual(dict.fromkeys(weights("qwen2"))) == "legacy"


@pytest.mark.parametrize(
    ("name", "family", "problem"),
    [
        ("model.layers.0.mlp.experts.0.up_proj.weight", "mcore", "has no name in MindSpore"),
        ("model.layers.0.self_attn.q_norm.weight", "legacy", "--names keep leaves names"),
        ("model.layers.x.input_layernorm.weight", "legacy", "has no name in MindSpore"),
    ],
)
def test_a_name_without_another_is_refused(name, family, problem):
    with pytest.raises(CheckpointError, match=problem):
        to_mindspore(Memory({name: torch.ones(1)}), family)


def test_fused_heads_need_their_number():
    there = Memory(named("legacy-fused", weights()))
    with pytest.raises(
        CheckpointError, match=r"a config.json must say; name the model with --base"
    ):
        to_huggingface(there, "legacy-fused").shapes()
    with pytest.raises(CheckpointError, match=r"128 rows cannot be taken apart|no equal groups"):
        to_huggingface(there, "legacy-fused", Heads(7, 5)).shapes()


def test_the_number_of_heads_is_in_the_configuration(tmp_path):
    assert heads_of(tmp_path) is None
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8}')
    assert heads_of(tmp_path) == Heads(8, 8)
    (tmp_path / "config.json").write_text(
        '{"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2}}'
    )
    assert heads_of(tmp_path) == Heads(8, 2)
