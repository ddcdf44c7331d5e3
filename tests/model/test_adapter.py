"""An adapter goes onto its own base and onto no other."""

import warnings
from shutil import copy

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny
from each import some
from folders import edit_json, save_adapter, save_model
from surefoot.checkpoint.layouts.adapter_merge import merged
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.sources import read_whole
from surefoot.errors import ModelError, SurefootError
from surefoot.model.adapter_files import (
    add_named,
    attach,
    attach_empty,
    is_addable,
    remove_named,
)

IDS = torch.arange(60, 76)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    save_model(folder / "base")
    save_model(folder / "deeper", num_hidden_layers=4)
    save_model(folder / "wider", intermediate_size=64)
    save_adapter(folder / "base", folder / "adapter")
    save_adapter(folder / "deeper", folder / "deep")
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def test_an_attached_adapter_is_pefts_own(folder):
    expected = PeftModel.from_pretrained(load(folder / "base"), folder / "adapter").eval()
    found = attach(load(folder / "base"), folder / "adapter").eval()
    assert torch.equal(found(IDS).logits, expected(IDS).logits)
    assert not any(p.requires_grad for p in found.parameters())


def test_one_to_go_on_from_can_learn(folder):
    found = attach(load(folder / "base"), folder / "adapter", trainable=True)
    assert all(("lora_" in n) == p.requires_grad for n, p in found.named_parameters())


@pytest.mark.parametrize(
    ("base", "adapter", "reason"),
    [
        ("wider", "adapter", r"size mismatch.*\[48.*\[64|size mismatch"),
        ("base", "deep", r"14 of its 56 tensors do not exist.*layers\.3"),
        ("deeper", "adapter", r"0 of its 42 tensors.*14 are missing.*layers\.3"),
    ],
)
def test_an_adapter_of_another_model_is_refused(folder, base, adapter, reason):
    with pytest.raises(
        ModelError, match=rf"an adapter of another model, not of .*{base}.*({reason})"
    ):
        attach(load(folder / base), folder / adapter)


def test_an_adapter_whose_modules_the_model_has_not_is_refused(folder, tmp_path):
    save_adapter(folder / "base", tmp_path)
    edit_json(tmp_path / "adapter_config.json", target_modules=["c_attn"])
    with pytest.raises(ModelError, match=r"another model.*c_attn.*not found"):
        attach(load(folder / "base"), tmp_path)


@pytest.mark.parametrize("tokens", [False, 3, [1.5], {"embed_tokens": "all"}])
def test_tokens_that_are_no_list_of_ids_are_refused(tokens, folder, tmp_path):
    save_adapter(folder / "base", tmp_path)
    edit_json(tmp_path / "adapter_config.json", trainable_token_indices=tokens)
    with pytest.raises(ModelError, match=r"trainable_token_indices is .* expected lists of token"):
        attach(load(folder / "base"), tmp_path)


def test_a_damaged_adapter_is_refused(folder, tmp_path):
    save_adapter(folder / "base", tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="damaged or truncated"):
        attach(load(folder / "base"), tmp_path)
    weights.unlink()
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(ModelError, match="a pickle, which is never read"):
        attach(load(folder / "base"), tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        attach(load(folder / "base"), tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        attach(load(folder / "base"), tmp_path)


def test_a_folder_without_an_adapter_is_refused_by_those_that_read_no_values_too(folder, tmp_path):
    with pytest.raises(ModelError, match=r"no adapter_config\.json; expected the local folder"):
        attach_empty(tiny.model("llama"), tmp_path)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"it contains several \(second\): name one"):
        attach_empty(tiny.model("llama"), tmp_path)


def default(name):
    for part in ("lora_A", "lora_B", "oft_R"):
        name = name.replace(f".{part}.weight", f".{part}.default.weight")
    return name


WRAPPED = {
    "the adapter's name": default,
    "another adapter's name": lambda name: default(name).replace(".default.", ".mine."),
    "no prefix": lambda name: name.removeprefix("base_model.model."),
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled inside": lambda name: name.replace(
        "base_model.model.", "base_model.model._orig_mod."
    ),
    "ddp": lambda name: f"module.{name}",
    "ddp inside, no prefix": lambda name: (
        f"module._orig_mod.{name.removeprefix('base_model.model.')}"
    ),
    "fsdp": lambda name: name.replace(".layers.0.", ".layers.0._fsdp_wrapped_module."),
    "checkpointed": lambda name: default(name).replace(
        ".self_attn.", "._checkpoint_wrapped_module.self_attn."
    ),
    "a module around it": lambda name: f"policy.{name}",
}


def rewrite(source, folder, renamed):
    """The adapter of ``source`` in ``folder``, under other names."""
    folder.mkdir()
    copy(source / "adapter_config.json", folder)
    tensors = load_file(source / "adapter_model.safetensors")
    save_file(
        {renamed(name): t for name, t in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def shift_tokens(folder):
    """Let the rows of tokens differ from those of the base."""
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in tensors:
        if name.endswith("trainable_tokens_delta"):
            tensors[name] += torch.arange(len(tensors[name]))[:, None] + 0.5
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", some(WRAPPED, [*WRAPPED][1::2]))
def test_names_of_wrappers_in_an_adapter_change_nothing(kind, folder, tmp_path):
    wrapped = rewrite(folder / "adapter", tmp_path / "wrapped", WRAPPED[kind])
    expected = PeftModel.from_pretrained(load(folder / "base"), folder / "adapter").eval()
    expected = expected(IDS).logits
    found = attach(load(folder / "base"), wrapped, trainable=True).eval()
    assert torch.equal(found(IDS).logits, expected)
    assert is_addable(wrapped)
    served = add_named(load(folder / "base"), "one", wrapped)
    assert torch.equal(served(IDS).logits, expected)
    source = merged(open_folder(folder / "base"), wrapped)
    merged_model = load(folder / "base")
    merged_model.load_state_dict({n: read_whole(source, n) for n in source.shapes()}, strict=False)
    assert torch.allclose(merged_model(IDS).logits, expected, atol=1e-5)


def test_an_active_adapter_is_removed_without_a_warning(folder):
    """Warnings are errors here, and one that PEFT raised would leave half of it behind."""
    served = add_named(load(folder / "base"), "one", folder / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT's, about a second adapter
        served = add_named(served, "two", folder / "adapter")
    served.base_model.set_adapter("one")
    remove_named(served, "one")
    assert served.base_model.active_adapters == ["two"]
    served.base_model.disable_adapter_layers()
    assert torch.equal(served(IDS).logits, load(folder / "base")(IDS).logits)


TOKENS = {"embed_tokens": [3, 5], "lm_head": [3, 5]}
HEAD_OF_ITS_OWN = {"embed_tokens": [3, 5], "lm_head": [7]}


@pytest.mark.parametrize(
    ("settings", "is_tied"),
    [
        ({"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, False),
        *(
            ({"trainable_token_indices": tokens, "target_modules": ["q_proj"]}, is_tied)
            for tokens in ([3, 5], TOKENS, HEAD_OF_ITS_OWN)
            for is_tied in (True,)
        ),
        *(
            pytest.param(
                {"trainable_token_indices": tokens, "target_modules": ["q_proj"]},
                False,
                marks=pytest.mark.proof,
            )
            for tokens in ([3, 5], TOKENS, HEAD_OF_ITS_OWN)
        ),
    ],
)
def test_the_live_state_of_an_adapter_is_read_as_its_file(settings, is_tied, folder, tmp_path):
    save_model(tmp_path / "base", tie_word_embeddings=is_tied)
    save_adapter(tmp_path / "base", tmp_path / "adapter", **settings)
    shift_tokens(tmp_path / "adapter")
    model = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter").eval()
    live = rewrite(tmp_path / "adapter", tmp_path / "live", str)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    save_file(state, live / "adapter_model.safetensors")
    found = attach(load(tmp_path / "base"), live).eval()
    assert torch.equal(found(IDS).logits, model(IDS).logits)
    served = add_named(load(tmp_path / "base"), "one", live)
    assert torch.equal(served(IDS).logits, model(IDS).logits)
    if is_tied and settings.get("trainable_token_indices") == HEAD_OF_ITS_OWN:
        with pytest.raises(SurefootError, match=r"rows of tied embeddings, and differ; merge it"):
            merged(open_folder(tmp_path / "base"), live)
        return
    one, other = (
        merged(open_folder(tmp_path / "base"), each) for each in (live, tmp_path / "adapter")
    )
    assert one.shapes() == other.shapes()
    assert all(torch.equal(read_whole(one, n), read_whole(other, n)) for n in one.shapes())


def test_the_rows_of_a_tied_head_that_differ_are_named(tmp_path):
    save_model(tmp_path / "base", tie_word_embeddings=True)
    settings = {"trainable_token_indices": [3, 5], "target_modules": ["q_proj"]}
    save_adapter(tmp_path / "base", tmp_path / "adapter", **settings)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    rows = next(name for name in tensors if name.endswith("trainable_tokens_delta"))
    more = {rows.replace("model.embed_tokens", "lm_head"): tensors[rows] + 1}
    save_file({**tensors, **more}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"1 of its .* does not exist in the model .*lm_head"):
        attach(load(tmp_path / "base"), tmp_path / "adapter")
    with pytest.raises(SurefootError, match="lm_head"):
        merged(open_folder(tmp_path / "base"), tmp_path / "adapter")


def test_two_adapters_in_one_file_are_named(folder, tmp_path):
    both = rewrite(folder / "adapter", tmp_path / "both", default)
    tensors = load_file(both / "adapter_model.safetensors")
    more = {name.replace(".default.", ".other."): t.clone() for name, t in tensors.items()}
    save_file({**tensors, **more}, both / "adapter_model.safetensors")
    for read in (lambda: attach(load(folder / "base"), both), lambda: open_folder(both)):
        with pytest.raises(
            SurefootError, match=r"other\.weight' are both .* expected one model or"
        ):
            read()
