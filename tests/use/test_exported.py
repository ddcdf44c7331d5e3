"""What is exported opens with transformers alone and says just what base and adapter said."""

import json
import shutil

import peft
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)

import pictures
import surefoot
from each import some
from folders import CHATML, edit_json, save_adapter, save_model, save_recipe
from surefoot.checkpoint.converting.targets import HuggingFaceModel
from surefoot.errors import CheckpointError, ModelError
from surefoot.use import export, open_model

IDS = torch.arange(60, 92)[None]
EMBEDDINGS = ["embed_tokens", "lm_head"]
CASES = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 7},
    "dora": {"use_dora": True},
    "one target": {"target_modules": ["v_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "modules_to_save": {"modules_to_save": EMBEDDINGS},
    "input embeddings saved": {"modules_to_save": ["embed_tokens"]},
    "head saved": {"modules_to_save": ["lm_head"]},
    "layer norms saved": {"modules_to_save": ["input_layernorm", "norm"]},
    "lora on embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora on the head": {"target_modules": ["q_proj", "lm_head"]},
    "dora and modules_to_save": {"use_dora": True, "modules_to_save": EMBEDDINGS},
}
TIED = {
    "tied by peft": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "lora tied by peft": {
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
    },
}
FEW = ["patterns", "dora and modules_to_save", "input embeddings saved"]
FEW += ["lora on embeddings", "lora on the head"]
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def base(request, tmp_path_factory):
    """An untied and a tied model."""
    return save_model(tmp_path_factory.mktemp(request.param) / "base", request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama") / "base")


@torch.no_grad()
def logits(folder, ids=IDS):
    return AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits


@torch.no_grad()
def pefts_logits(base, adapter, ids=IDS, *, grow_to=None):
    model = AutoModelForCausalLM.from_pretrained(base)
    if grow_to:
        old = model.get_input_embeddings().num_embeddings
        model.resize_token_embeddings(grow_to, mean_resizing=False)
        for module in {model.get_input_embeddings(), model.get_output_embeddings()}:
            module.weight[old:] = module.weight[:old].mean(0)
    return PeftModel.from_pretrained(model, adapter).eval()(ids).logits


def assert_same(found, expected):
    """Equal up to roundings of float32, which the layers amplify, at the scale of the logits."""
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("case", some(CASES, FEW))
def test_the_merge_gives_the_logits_of_base_and_adapter(base, case, tmp_path):
    save_adapter(base, tmp_path / "adapter", **CASES[case])
    out = export(tmp_path / "adapter", tmp_path / "out")
    expected = pefts_logits(base, tmp_path / "adapter")
    assert not torch.allclose(expected, logits(base), atol=1e-3)
    assert_same(logits(out), expected)


@pytest.mark.parametrize("case", TIED)
def test_embeddings_that_peft_keeps_tied_stay_right(tmp_path, case):
    base = save_model(tmp_path / "base", "qwen2")
    save_adapter(base, tmp_path / "adapter", **TIED[case])
    out = export(tmp_path / "adapter", tmp_path / "out")
    assert_same(logits(out), pefts_logits(base, tmp_path / "adapter"))


def test_untouched_tied_embeddings_stay_tied(tmp_path):
    base = save_model(tmp_path / "base", "qwen2")
    save_adapter(base, tmp_path / "adapter")
    out = export(tmp_path / "adapter", tmp_path / "out")
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize(
    "saved", [EMBEDDINGS, pytest.param(["embed_tokens"], marks=pytest.mark.proof)]
)
def test_grown_embeddings_come_out_whole(base, saved, tmp_path):
    settings = {"extra": ["<new>", "<newer>"], "template": CHATML, "modules_to_save": saved}
    save_adapter(base, tmp_path / "adapter", **settings)
    out = export(tmp_path / "adapter", tmp_path / "out")
    known = AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([[60, *known.convert_tokens_to_ids(["<new>", "<newer>"]), 61]])
    assert_same(logits(out, ids), pefts_logits(base, tmp_path / "adapter", ids, grow_to=len(known)))
    assert json.loads((out / "config.json").read_text())["vocab_size"] == len(known)


@pytest.mark.proof
def test_other_architectures_merge_too(tmp_path):
    for kind in ("qwen3", "mistral"):
        base = save_model(tmp_path / kind, kind)
        save_adapter(base, tmp_path / f"{kind}-adapter", use_dora=True)
        out = export(tmp_path / f"{kind}-adapter", tmp_path / f"{kind}-out")
        assert_same(logits(out), pefts_logits(base, tmp_path / f"{kind}-adapter"))


def test_a_trained_run_is_exported_as_chat_opens_it(tmp_path):
    recipe = save_recipe(tmp_path, method={"lora": {"rank": 2}})
    surefoot.train(recipe)
    out = export(recipe, tmp_path / "out")
    opened = open_model(tmp_path / "run")
    assert_same(logits(out), opened.model(IDS).logits)
    known = AutoTokenizer.from_pretrained(out)
    assert known.chat_template == CHATML
    ends = GenerationConfig.from_pretrained(out).eos_token_id
    assert known.convert_tokens_to_ids("<|im_end|>") in ends
    assert set(opened.stop_token_ids) == set(ends)
    names = {path.name for path in out.iterdir()}
    assert not names & {"manifest.json", "adapter_config.json", "recipe.yaml", "trainer_state.json"}


def test_a_full_checkpoint_is_copied_bit_by_bit(tmp_path):
    recipe = save_recipe(tmp_path)
    surefoot.train(recipe)
    out = export(tmp_path / "run", tmp_path / "out")
    saved = load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors")
    found = load_file(out / "model.safetensors")
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], found[name]) for name in saved)
    assert open_model(out).stop_token_ids == open_model(tmp_path / "run").stop_token_ids


@pytest.mark.parametrize(
    "around",
    some(
        ["_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."],
        ["module._orig_mod."],
    ),
)
def test_full_weights_saved_with_their_wrappers_are_those_of_the_model(base, around, tmp_path):
    wrapped = shutil.copytree(base, tmp_path / "wrapped")
    weights = wrapped / "model.safetensors"
    inside = {
        name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."): tensor
        for name, tensor in load_file(weights).items()
    }
    save_file({f"{around}{name}": tensor for name, tensor in inside.items()}, weights)
    assert torch.equal(open_model(wrapped).model(IDS).logits, logits(base))
    assert torch.equal(logits(export(wrapped, tmp_path / "out")), logits(base))
    save_adapter(base, tmp_path / "adapter")
    edit_json(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(wrapped))
    expected = pefts_logits(base, tmp_path / "adapter")
    assert_same(logits(export(tmp_path / "adapter", tmp_path / "merged")), expected)
    assert_same(open_model(tmp_path / "adapter").model(IDS).logits, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.proof)])
def test_another_dtype_rounds_once_and_is_named(llama, tmp_path, dtype):
    save_adapter(llama, tmp_path / "adapter")
    exact = load_file(export(tmp_path / "adapter", tmp_path / "exact") / "model.safetensors")
    out = export(tmp_path / "adapter", tmp_path / "out", HuggingFaceModel(dtype=dtype))
    found = load_file(out / "model.safetensors")
    wanted = getattr(torch, dtype)
    assert all(torch.equal(found[name], exact[name].to(wanted)) for name in exact)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert AutoModelForCausalLM.from_pretrained(out).dtype == wanted


def test_the_base_decides_the_dtype_of_a_merge(tmp_path):
    base = save_model(tmp_path / "base", dtype=torch.bfloat16)
    save_adapter(base, tmp_path / "adapter")
    out = export(tmp_path / "adapter", tmp_path / "out")
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


def test_progress_counts_every_byte(llama, tmp_path):
    told = []
    export(llama, tmp_path / "out", progress=told.append)
    size = sum(t.nbytes for t in load_file(tmp_path / "out" / "model.safetensors").values())
    assert sum(told) == size
    assert len(told) > 1


def test_nothing_is_ever_overwritten(llama, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ModelError, match="nothing is overwritten"):
        export(llama, tmp_path / "out")
    with pytest.raises(ModelError, match="nothing is overwritten"):
        export(llama, llama)
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="nothing is overwritten"):
        export(llama, tmp_path / "file")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_empty_folder_is_filled(llama, tmp_path):
    (tmp_path / "out").mkdir()
    export(llama, tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(llama))


def test_a_failed_export_leaves_nothing(llama, tmp_path):
    def fail(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(llama, tmp_path / "out", progress=fail)
    assert list(tmp_path.iterdir()) == []


def save_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


MISFITS = {
    "under other names": lambda stored: {f"net.{name}": value for name, value in stored.items()},
    "one is missing": lambda stored: {n: v for n, v in stored.items() if n != "lm_head.weight"},
    "one is of another model": lambda stored: {**stored, "extra.weight": torch.ones(2, 2)},
    "another shape": lambda stored: {**stored, "model.norm.weight": torch.ones(7)},
}


@pytest.mark.parametrize("case", MISFITS)
def test_weights_that_are_not_the_configurations_are_refused_before_anything_is_written(
    llama, case, tmp_path
):
    shutil.copytree(llama, tmp_path / "base")
    save_tensors(tmp_path / "base", MISFITS[case])
    (tmp_path / "new").mkdir()
    with pytest.raises(ModelError, match=r"base: \d+ tensors? (missing|unexpected|mismatched)"):
        export(tmp_path / "base", tmp_path / "new" / "out")
    save_adapter(llama, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(ModelError, match=r"base: \d+ tensors? (missing|unexpected|mismatched)"):
        export(
            tmp_path / "adapter",
            tmp_path / "new" / "out",
            HuggingFaceModel(base=str(tmp_path / "base")),
        )
    assert list((tmp_path / "new").iterdir()) == []


def test_a_configuration_that_transformers_does_not_know_is_refused(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "base")
    edit_json(tmp_path / "base" / "config.json", model_type="nothing_known", architectures=["X"])
    with pytest.raises(ModelError, match=r"base: cannot read the model: .*nothing_known"):
        export(tmp_path / "base", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_weights_of_an_adapter_are_no_model(llama, tmp_path):
    save_adapter(llama, tmp_path / "adapter")
    shutil.copy(llama / "config.json", tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"adapter: \d+ tensors missing"):
        export(tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_model_is_refused(llama, tmp_path):
    other = save_model(tmp_path / "other", hidden_size=64, head_dim=16)
    save_adapter(other, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="adapter of another model"):
        export(tmp_path / "adapter", tmp_path / "out", HuggingFaceModel(base=str(llama)))


def test_an_adapter_without_its_base_says_what_to_do(llama, tmp_path):
    save_adapter(llama, tmp_path / "adapter")
    edit_json(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path="/gone")
    with pytest.raises(ModelError, match="--base"):
        export(tmp_path / "adapter", tmp_path / "out")
    out = export(tmp_path / "adapter", tmp_path / "out", HuggingFaceModel(base=str(llama)))
    assert_same(logits(out), pefts_logits(llama, tmp_path / "adapter"))


def test_code_that_a_model_brings_goes_with_it(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "base")
    (tmp_path / "base" / "modeling_x.py").write_text("X = 1\n")
    out = export(tmp_path / "base", tmp_path / "out")
    assert (out / "modeling_x.py").read_text() == "X = 1\n"


def test_real_weights_merge_exactly(shared, tmp_path):
    base = shared / "models" / "stories260k"
    save_adapter(base, tmp_path / "adapter", use_dora=True)
    out = export(tmp_path / "adapter", tmp_path / "out")
    assert_same(logits(out), pefts_logits(base, tmp_path / "adapter"))
    assert "lm_head.weight" not in load_file(out / "model.safetensors")


@pytest.mark.parametrize("names", ["of the files", "of the modules"])
def test_a_model_of_pictures_is_exported_under_the_names_of_its_base(names, tmp_path):
    """State dicts, FSDP and DCP write a model's own names, and transformers opens both."""
    base = pictures.save_model(tmp_path / "base", "qwen2_vl")
    model = AutoModelForImageTextToText.from_pretrained(base)
    if names == "of the modules":
        state = {n: t.clone() for n, t in model.state_dict().items()}
        save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    stored = load_file(base / "model.safetensors")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(AutoModelForImageTextToText.from_pretrained(base), config)
    wrapped.save_pretrained(tmp_path / "adapter")
    out = export(tmp_path / "adapter", tmp_path / "out")
    assert load_file(out / "model.safetensors").keys() == stored.keys()
    found = AutoModelForImageTextToText.from_pretrained(out).eval()
    with torch.no_grad():
        assert_same(found(IDS).logits, wrapped.eval()(IDS).logits)
