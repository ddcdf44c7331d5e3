import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.sources import TensorsInMemory, read_whole
from surefoot.errors import CheckpointError
from surefoot.model.weights import FullWeights
from surefoot.parallel.sharding import Box
from surefoot.plugins.mindspore.naming import (
    FAMILIES,
    AttentionHeads,
    DeinterleavedSource,
    InterleavedSource,
    family_of,
    heads_of,
    to_huggingface,
    to_mindspore,
    turns_of,
    usual,
)
from tiny import model

HEADS = AttentionHeads(4, 2)
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LATENT += ("q_a_layernorm", "kv_a_layernorm")
EXPERT = ("gate_proj", "up_proj", "down_proj")
DEEPSEEK = [f"model.layers.3.self_attn.{module}.weight" for module in LATENT]
DEEPSEEK += [f"model.layers.3.mlp.experts.{i}.{m}.weight" for i in (0, 10) for m in EXPERT]
DEEPSEEK += [f"model.layers.3.mlp.shared_experts.{module}.weight" for module in EXPERT]
DEEPSEEK += [f"model.layers.0.mlp.{module}.weight" for module in EXPERT]
DEEPSEEK += [f"model.layers.3.mlp.gate.{kind}" for kind in ("weight", "e_score_correction_bias")]
DEEPSEEK += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def weights(kind="qwen2"):
    torch.manual_seed(0)
    if kind == "deepseek":
        return {name: torch.randn(6, 4) for name in DEEPSEEK}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made = FullWeights(model(kind, **sizes)).state_dict()
    return {name: torch.randn_like(tensor) for name, tensor in made.items()}


def kinds(family):
    if family == "mcore-mla":
        return "deepseek"
    return "qwen3" if family.startswith("mcore") else "qwen2"


def named(family, tensors):
    source = to_mindspore(TensorsInMemory(tensors), family, HEADS)
    return {name: read_whole(source, name) for name in source.shapes()}


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bitwise(family):
    tensors = weights(kinds(family))
    there = named(family, tensors)
    assert there.keys().isdisjoint(tensors.keys() - {"lm_head.weight"})
    back = to_huggingface(TensorsInMemory(there), family, HEADS)
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
    back = to_huggingface(TensorsInMemory(model), family_of({n: t.shape for n, t in model.items()}))
    assert "model.layers.1.self_attn.q_proj.weight" in back.shapes()
    again = to_mindspore(back, "legacy")
    assert again.shapes().keys() == model.keys()


def test_a_model_with_norms_of_queries_is_named_as_mcore():
    assert usual(dict.fromkeys(weights("qwen3"))) == "mcore"
    assert usual(dict.fromkeys(weights("qwen2"))) == "legacy"


@pytest.mark.parametrize(
    ("name", "family", "problem"),
    [
        ("model.layers.0.mlp.experts.0.up_proj.weight", "mcore-v1", "has no name in MindSpore"),
        ("model.layers.61.eh_proj.weight", "mcore-mla", "has no name in MindSpore"),
        ("model.layers.0.self_attn.q_norm.weight", "legacy", "--names keep leaves names"),
        ("model.layers.x.input_layernorm.weight", "legacy", "has no name in MindSpore"),
    ],
)
def test_a_name_without_another_is_refused(name, family, problem):
    with pytest.raises(CheckpointError, match=problem):
        to_mindspore(TensorsInMemory({name: torch.ones(1)}), family)


def test_fused_heads_need_their_number():
    there = TensorsInMemory(named("legacy-fused", weights()))
    with pytest.raises(CheckpointError, match=r"is in config.json; name the model with --base"):
        to_huggingface(there, "legacy-fused").shapes()
    with pytest.raises(CheckpointError, match=r"128 rows cannot be split|no equal groups"):
        to_huggingface(there, "legacy-fused", AttentionHeads(7, 5)).shapes()


def test_the_number_of_heads_is_in_the_configuration(tmp_path):
    assert heads_of(tmp_path) is None
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8}')
    assert heads_of(tmp_path) == AttentionHeads(8, 8)
    (tmp_path / "config.json").write_text(
        '{"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2}}'
    )
    assert heads_of(tmp_path) == AttentionHeads(8, 2)


MIXTURES = [("qwen3_moe", "mcore"), ("qwen3_moe", "mcore-fused"), ("mixtral", "legacy")]


@pytest.mark.parametrize(("kind", "family"), MIXTURES)
def test_a_mixture_goes_there_and_back_bitwise(kind, family):
    tensors = weights(kind)
    assert usual({name: tuple(t.shape) for name, t in tensors.items()}) == family.split("-")[0]
    there = named(family, tensors)
    assert family_of({name: tuple(t.shape) for name, t in there.items()}) == family
    back = to_huggingface(TensorsInMemory(there), family, HEADS)
    assert back.shapes() == {name: tuple(t.shape) for name, t in tensors.items()}
    assert all(torch.equal(read_whole(back, name), t) for name, t in tensors.items())


def test_the_experts_are_those_of_mindspore():
    """Their own formula: stacked, turned, gates before ups."""
    tensors, layer = weights("qwen3_moe"), "model.layers.1.mlp.experts"
    parts = {m: torch.stack([tensors[f"{layer}.{i}.{m}.weight"] for i in range(4)]) for m in EXPERT}
    turned = {name: part.transpose(1, 2) for name, part in parts.items()}
    both = torch.cat([turned["gate_proj"], turned["up_proj"]], 2)
    there = named("mcore-fused", tensors)
    assert torch.equal(there["decoder.layers.1.mlp.experts.weight1"], both.flatten(0, 1))
    down = turned["down_proj"].flatten(0, 1)
    assert torch.equal(there["decoder.layers.1.mlp.experts.weight2"], down)
    assert there["decoder.layers.1.mlp.router.weight"] is not None
    source = to_mindspore(TensorsInMemory(tensors), "mcore-fused", HEADS)
    box = Box((20, 10), (50, 30))  # over two experts, gates and ups
    found = source.read("decoder.layers.1.mlp.experts.weight1", box)
    assert torch.equal(found, both.flatten(0, 1)[20:70, 10:40])


def test_mixtrals_experts_are_a_dimension():
    tensors = weights("mixtral")
    names = [f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight" for i in range(4)]
    found = named("legacy", tensors)["model.layers.0.feed_forward.ffn.w2.weight"]
    assert torch.equal(found, torch.stack([tensors[name] for name in names]))


def test_the_latent_attention_of_deepseek_has_its_own_names():
    there = named("mcore-mla", weights("deepseek"))
    assert "decoder.layers.3.self_attention.linear_kv_down_proj.weight" in there
    assert "decoder.layers.3.mlp.experts.10.gating.weight" in there
    assert "decoder.layers.3.mlp.shared_experts.hidden.weight" in there
    assert "decoder.layers.3.mlp.router.expert_bias" in there


def test_experts_that_are_not_all_there_are_refused():
    tensors = weights("qwen3_moe")
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"experts.2.up_proj.weight' is missing, so the"):
        named("mcore-fused", tensors)
    there = named("mcore-fused", weights("qwen3_moe"))
    del there["decoder.layers.0.mlp.router.weight"]
    with pytest.raises(CheckpointError, match="whose router is missing, cannot be split"):
        to_huggingface(TensorsInMemory(there), "mcore-fused", HEADS)


@st.composite
def fused(draw):
    """Tensors, how many rows they give at a time, and the fused tensor by plain torch."""
    groups = draw(st.integers(1, 5))
    rows = draw(st.lists(st.sampled_from([1, 2, 3, 17]), min_size=1, max_size=3))
    inner = draw(st.sampled_from([(), (3,)]))
    parts = {f"p{i}": torch.randn(groups * n, *inner) for i, n in enumerate(rows)}
    shaped = [part.reshape(groups, -1, *inner) for part in parts.values()]
    return parts, rows, torch.cat(shaped, 1).reshape(-1, *inner)


@given(fused(), st.data())
def test_any_rows_of_the_fused_tensor_are_those_of_its_parts(found, data):
    parts, rows, whole = found
    turns = {"f": turns_of([*parts], rows)}
    source = InterleavedSource(TensorsInMemory({**parts, "other": torch.ones(2)}), turns)
    assert source.shapes() == {"other": (2,), "f": tuple(whole.shape)}
    assert torch.equal(read_whole(source, "f"), whole)
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    columns = [data.draw(st.integers(0, 2))] * (whole.ndim - 1)
    box = Box((first, *[1] * (whole.ndim - 1)), (last - first, *columns))
    assert torch.equal(source.read("f", box), whole[box.slices_in(Box.whole(tuple(whole.shape)))])


@given(fused(), st.data())
def test_any_rows_of_a_part_come_back(found, data):
    parts, rows, whole = found
    turns = dict(zip(parts, turns_of(["f"] * len(parts), rows), strict=True))
    source = DeinterleavedSource(TensorsInMemory({"f": whole, "other": torch.ones(2)}), turns)
    assert source.shapes() == {"other": (2,)} | {n: tuple(p.shape) for n, p in parts.items()}
    for name, part in parts.items():
        assert torch.equal(read_whole(source, name), part)
        start = data.draw(st.integers(0, len(part)))
        stop = data.draw(st.integers(start, len(part)))
        columns = [data.draw(st.integers(0, 3))] * (part.ndim - 1)
        box = Box((start, *[0] * (part.ndim - 1)), (stop - start, *columns))
        assert torch.equal(source.read(name, box), part[start:stop, *map(slice, columns)])
    assert torch.equal(read_whole(source, "other"), torch.ones(2))
