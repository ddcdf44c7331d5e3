"""An adapter folded in by us is the adapter folded in by PEFT, for every kind that we fold in."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import tiny
from damage import flip
from surefoot.checkpoint.layouts.adapter_merge import merged
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.sources import CastSource, TensorsInMemory, copy, read_whole
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box

from ..sample import Holder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft.*")  # its advice about merging


def llama(dtype=torch.float32, **changes):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "attention_bias": True}
    return tiny.model(dtype=dtype, **{**sizes, **changes})


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, bos_token_id=0, eos_token_id=0)
    )


def train(model, folder, dtype=None, **settings):
    """A base and an adapter on disk, as if trained; the PEFT model."""
    model.save_pretrained(folder / "base")
    tuned = get_peft_model(model.eval(), LoraConfig(**{"r": 4, "lora_alpha": 7, **settings}))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
                parameter.data = parameter.data.to(dtype or parameter.dtype)
    tuned.save_pretrained(folder / "adapter")
    return tuned


def ours(folder):
    return merged(open_folder(folder / "base"), folder / "adapter")


KINDS = {
    "lora on everything": (llama, {"target_modules": "all-linear"}),
    "rank-stabilised, ranks and alphas by module": (
        llama,
        {
            "target_modules": ["q_proj", "down_proj"],
            "use_rslora": True,
            "rank_pattern": {"down_proj": 8},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 3, "down_proj": 11},
        },
    ),
    "dora": (llama, {"target_modules": "all-linear", "use_dora": True}),
    "embeddings": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "dora on embeddings": (llama, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "whole modules": (
        llama,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "trained biases": (llama, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "all biases": (llama, {"target_modules": ["q_proj"], "bias": "all"}),
    "low-rank biases": (llama, {"target_modules": ["q_proj"], "lora_bias": True}),
    "transposed weights": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "dora on transposed weights": (
        gpt2,
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_merging_is_what_peft_does(tmp_path, kind):
    make, settings = KINDS[kind]
    tuned = train(make(), tmp_path, **settings)
    found = ours(tmp_path)
    expected = tuned.merge_and_unload().state_dict()
    assert found.deltas
    for name in found.shapes():
        torch.testing.assert_close(read_whole(found, name), expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "kind", ["lora on everything", "dora", "dora on embeddings", "dora on transposed weights"]
)
def test_any_box_is_that_box_of_the_whole(tmp_path, kind):
    make, settings = KINDS[kind]
    train(make(), tmp_path, **settings)
    found = ours(tmp_path)
    for name in found.deltas:
        rows, columns = found.shapes()[name]
        whole = read_whole(found, name)
        for box in (
            Box((0, 0), (1, columns)),
            Box((rows // 2, 1), (3, 2)),
            Box((0, columns - 1), (rows, 1)),
        ):
            expected = whole[box.slices_in(Box.whole((rows, columns)))]
            for source in (found, ours(tmp_path)):  # also one that has read nothing before
                part = source.read(name, box)
                torch.testing.assert_close(part, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_gives_the_logits_of_base_and_adapter(tmp_path, tied):
    tuned = train(llama(tie_word_embeddings=tied), tmp_path, target_modules="all-linear")
    copy(ours(tmp_path), tmp_path / "new", max_shard_size=5000)
    (tmp_path / "new" / "config.json").write_bytes((tmp_path / "base" / "config.json").read_bytes())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    ids = torch.arange(20)[None]
    torch.testing.assert_close(again(ids).logits, tuned(ids).logits)


def test_low_precision_is_rounded_once(tmp_path):
    tuned = train(llama(torch.bfloat16), tmp_path, target_modules="all-linear", dtype=torch.float32)
    found = ours(tmp_path)
    layer = tuned.base_model.model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
    exact = layer.base_layer.weight.double() + 7 / 4 * (b @ a)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert found.dtypes()[name] == torch.bfloat16
    assert torch.equal(read_whole(found, name), exact.bfloat16())


def test_a_float64_base_is_merged_in_float64(tmp_path):
    torch.manual_seed(0)
    w, a, b = torch.randn(6, 4).double(), torch.randn(2, 4), torch.randn(6, 2)
    adapter = {"base_model.model.x.lora_A.weight": a, "base_model.model.x.lora_B.weight": b}
    write_adapter(tmp_path, adapter)
    found = merged(TensorsInMemory({"x.weight": w}), tmp_path)
    assert torch.equal(read_whole(found, "x.weight"), w + 2.0 * (b.double() @ a.double()))


def test_views_compose_over_a_merge(tmp_path):
    train(llama(), tmp_path, target_modules=["q_proj"])
    view = CastSource(ours(tmp_path), torch.float16)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(read_whole(view, name), read_whole(ours(tmp_path), name).half())


def test_an_adapter_checkpoint_of_ours_is_merged_and_its_hashes_are_checked(tmp_path):
    train(llama(), tmp_path, target_modules=["q_proj"])
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = (tmp_path / "adapter" / "adapter_config.json").read_bytes()
    folder = save(
        tmp_path,
        1,
        {"model": Holder(weights)},
        kind="adapter",
        companions={"adapter_config.json": config},
    )
    base = open_folder(tmp_path / "base")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(read_whole(merged(base, folder), name), read_whole(ours(tmp_path), name))
    flip(folder / "adapter_model.safetensors")
    damaged = merged(base, folder)
    with pytest.raises(CheckpointError, match="damaged"):
        for name in damaged.shapes():
            read_whole(damaged, name)


def grown(tmp_path, **changes):
    """An adapter trained after the vocabulary grew; the base on disk still has the old one."""
    model = llama(**changes)
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(40)
    tuned = get_peft_model(model.eval(), LoraConfig(r=4, target_modules=["q_proj"]))
    tuned.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    return tuned


@pytest.mark.parametrize("tied", [True, False])
def test_grown_embeddings_replace_those_of_the_base(tmp_path, tied):
    tuned = grown(tmp_path, tie_word_embeddings=tied)
    found = ours(tmp_path)
    assert found.shapes()["model.embed_tokens.weight"] == (40, 16)
    assert ("lm_head.weight" in found.shapes()) == (not tied)
    expected = tuned.merge_and_unload().state_dict()
    assert all(torch.equal(read_whole(found, n), expected[n]) for n in found.shapes())


def test_a_tied_head_that_was_trained_alone_becomes_a_tensor_of_its_own(tmp_path):
    tuned = train(
        llama(tie_word_embeddings=True),
        tmp_path,
        target_modules=["q_proj"],
        modules_to_save=["lm_head"],
    )
    found = ours(tmp_path)
    head = tuned.base_model.model.lm_head.modules_to_save["default"].weight
    assert torch.equal(read_whole(found, "lm_head.weight"), head)
    embeddings = load_file(tmp_path / "base" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(read_whole(found, "model.embed_tokens.weight"), embeddings)


def test_a_tied_head_that_was_tuned_becomes_a_tensor_of_its_own(tmp_path):
    tuned = train(llama(tie_word_embeddings=True), tmp_path, target_modules=["lm_head"])
    ids = torch.arange(20)[None]
    expected = tuned(ids).logits
    copy(ours(tmp_path), tmp_path / "new")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "new" / "config.json").write_text(
        json.dumps({**config, "tie_word_embeddings": False})
    )
    torch.testing.assert_close(
        AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()(ids).logits, expected
    )


CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
PREFIX = "base_model.model.x."
GOOD = {f"{PREFIX}lora_A.weight": torch.ones(2, 4), f"{PREFIX}lora_B.weight": torch.ones(6, 2)}
BASE = TensorsInMemory({"x.weight": torch.ones(6, 4), "x.bias": torch.ones(6)})


def write_adapter(folder, tensors, **config):
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))


def without(name):
    return {key: t for key, t in GOOD.items() if name not in key}


def other(**tensors):
    """The good adapter with some tensors otherwise; dots are spelled as double underscores."""
    return {
        **GOOD,
        **{name.replace("__", "."): torch.ones(shape) for name, shape in tensors.items()},
    }


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (
            {key.replace(".x.", ".y."): t for key, t in GOOD.items()},
            r"belongs to y\.weight, which the",
        ),
        (
            other(base_model__model__new__weight=(1,)),
            r"another model: base_model\.model\.new\.weight",
        ),
        (
            other(base_model__model__x__bias=(6,), base_model__model__new__weight=(1,)),
            r"another model: base_model\.model\.new\.weight",
        ),
        (
            other(base_model__model__x__lora_B__weight=(7, 2)),
            r"gives \[7, 4\], but x\.weight of the",
        ),
        (other(base_model__model__x__lora_A__weight=(3, 4)), r"has shapes \[3, 4\] and \[6, 2\]"),
        (
            other(base_model__model__x__lora_A__weight=(2, 4, 1, 1)),
            "only linear and embedding layers",
        ),
        (without("lora_B"), "half of the adapter of x is missing"),
        (without("lora_A"), "half of the adapter of x is missing"),
        (other(base_model__model__z__lora_B__bias=(6,)), "another model"),
        (other(base_model__model__x__lora_C__weight=(1,)), "this cannot merge; merge it with peft"),
        (other(base_model__model__x__token_adapter__delta=(1,)), "is a tensor this cannot merge"),
        (other(x__weight=(6, 4)), "is a tensor this cannot merge"),
    ],
    ids=range(12),
)
def test_an_adapter_of_another_model_is_named(tmp_path, tensors, why):
    write_adapter(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=why):
        merged(BASE, tmp_path)


def test_a_bias_for_a_layer_without_one_is_named(tmp_path):
    write_adapter(tmp_path, {**GOOD, f"{PREFIX}lora_B.bias": torch.ones(6)})
    assert merged(BASE, tmp_path).added
    with pytest.raises(
        CheckpointError, match=r"\(lora_bias\) cannot be merged into x\.weight: .* has no bias"
    ):
        merged(TensorsInMemory({"x.weight": torch.ones(6, 4)}), tmp_path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "LOHA"}, "peft_type LOHA cannot be merged here; merge it with peft's own"),
        ({"peft_type": None}, "peft_type None"),
        ({"target_parameters": ["x"]}, "an adapter with target_parameters cannot be merged"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights 'pissa_niter_4' changed the base",
        ),
        ({"r": "8"}, "r must be a number, found '8'"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"(": 1}}, r"alpha_pattern '\(': "),
    ],
)
def test_an_adapter_of_a_kind_that_is_no_sum_is_named(tmp_path, config, why):
    write_adapter(tmp_path, GOOD, **config)
    with pytest.raises(CheckpointError, match=why):
        merged(BASE, tmp_path)


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal", "eva"])
def test_an_adapter_that_left_its_base_alone_is_merged(tmp_path, init):
    write_adapter(tmp_path, GOOD, init_lora_weights=init)
    assert merged(BASE, tmp_path).deltas["x.weight"].scale == 2.0


def test_a_square_weight_is_transposed_only_if_the_adapter_says_so(tmp_path):
    tensors = {
        f"{PREFIX}lora_A.weight": torch.randn(2, 4),
        f"{PREFIX}lora_B.weight": torch.randn(4, 2),
    }
    base = TensorsInMemory({"x.weight": torch.zeros(4, 4)})
    update = 2.0 * tensors[f"{PREFIX}lora_B.weight"] @ tensors[f"{PREFIX}lora_A.weight"]
    write_adapter(tmp_path, tensors)
    torch.testing.assert_close(read_whole(merged(base, tmp_path), "x.weight"), update)
    write_adapter(tmp_path, tensors, fan_in_fan_out=True)
    torch.testing.assert_close(read_whole(merged(base, tmp_path), "x.weight"), update.T)


def test_a_folder_that_is_no_adapter_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter_config.json: it does not exist"):
        merged(BASE, tmp_path)
