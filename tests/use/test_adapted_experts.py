"""Adapters on experts merge into the files of their base, and open with plain PEFT and
transformers."""

import json
import re

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import commands
import mixtures
from each import some
from folders import tokenizer
from surefoot.checkpoint.converting.targets import PEFTAdapter
from surefoot.checkpoint.sources import silent
from surefoot.errors import CheckpointError, ModelError
from surefoot.methods import LoRA
from surefoot.model.weights import adapter_files
from surefoot.use import export, open_model
from surefoot.use.exporting.conversion import export_as

IDS = torch.arange(60, 100).view(4, 10)
FEW = ["mixtral", "deepseek_v3", "gpt_oss", "jetmoe", "llama4_text"]  # each has its own files
KINDS = some(mixtures.KINDS, ["gpt_oss"])
SINGLE = ("qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "olmoe", "minimax_m2", "glm4_moe")
_, ok, refused = commands.of("export", "--to", "peft")
PATTERNS = "ignore:The following .*_pattern keys:RuntimeWarning"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def save_base(folder, kind):
    known = tokenizer()
    sizes = {"vocab_size": len(known), "eos_token_id": known.eos_token_id}
    mixtures.model(kind, **sizes).save_pretrained(folder)
    known.save_pretrained(folder)
    return folder


def save_adapted(base, folder, **settings):
    """A random adapter as the recipe makes it; returns its logits, too."""
    torch.manual_seed(1)
    model = LoRA(**{"rank": 3, "alpha": 5, **settings}).apply(opened(base)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return logits(model)


def opened(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def assert_same(found, expected):
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_of_all_targets_merges_and_opens_elsewhere(kind, tmp_path):
    base, folder = save_base(tmp_path / "base", kind), tmp_path / "adapter"
    expected = save_adapted(base, folder)
    assert (expected - logits(opened(base))).abs().max() > 1e-2, "the adapter does something"
    theirs = PeftModel.from_pretrained(opened(base), folder).eval()
    assert_same(logits(theirs), expected)
    out = export(folder, tmp_path / "out")
    assert_same(logits(opened(out)), logits(theirs.merge_and_unload()))
    plain = opened(base)
    plain.load_adapter(folder)
    assert_same(logits(plain), expected)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_rank_stabilized_adapters_of_some_experts_matrices_merge(kind, tmp_path):
    base, folder = save_base(tmp_path / "base", kind), tmp_path / "adapter"
    expected = save_adapted(base, folder, targets=("down_proj", "q_proj"), rslora=True)
    assert_same(logits(opened(export(folder, tmp_path / "out"))), expected)


def test_equal_adapters_write_equal_settings(tmp_path):
    """PEFT keeps targets as sets, whose order changes from process to process."""
    model = LoRA(rank=2).apply(mixtures.model("deepseek_v3"))
    config = json.loads(adapter_files(model)["adapter_config.json"])
    assert config["target_parameters"] == [
        "down_proj",
        "down_proj.weight",
        "gate_proj.weight",
        "gate_up_proj",
        "up_proj.weight",
    ]


@pytest.mark.filterwarnings(PATTERNS)
@pytest.mark.parametrize("kind", some(["qwen3_moe", "mixtral"], ["qwen3_moe"]))
def test_an_adapter_on_single_experts_opens_as_in_peft(kind, tmp_path):
    """As transformers 4 and PEFT wrote it, under the names of the base's files."""
    base, folder = save_base(tmp_path / "base", kind), tmp_path / "adapter"
    tensors, generator = {}, torch.Generator().manual_seed(1)
    weights = load_file(base / "model.safetensors")
    for name, weight in weights.items():
        if ".experts." in name or name.endswith("q_proj.weight"):
            place = f"base_model.model.{name.removesuffix('.weight')}"
            for half, shape in (("A", (3, weight.shape[1])), ("B", (weight.shape[0], 3))):
                values = torch.randn(shape, generator=generator) * 0.1
                tensors[f"{place}.lora_{half}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    experts = ["w1", "w2", "w3"] if kind == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6}
    settings |= {"target_modules": [*experts, "q_proj"], "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    theirs = logits(PeftModel.from_pretrained(opened(base), folder).eval())
    assert (theirs - logits(opened(base))).abs().max() > 1e-2
    mine = open_model(folder, dtype="float32")
    assert_same(logits(mine.model), theirs)
    assert_same(logits(opened(export(folder, tmp_path / "out"))), theirs)
    del tensors[min(tensors)]
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"cannot add this adapter|adapter of another model"):
        open_model(folder)


def modules_in_vllm(folder, base):
    """The factors by module, as vLLM's ``LoRAModel`` reads a folder: of each tensor the module by
    the dots of its name; of experts what begins with ``experts`` must be a module that it has, an
    expert's matrix as the base's files name it; of other modules the last part; no ``base_layer``
    passes as an expert's; one rank and one scale for all."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA" and not settings.get("use_dora")
    assert not settings.get("rank_pattern") and not settings.get("alpha_pattern")
    scale, found = settings["lora_alpha"] / settings["r"], {}
    with safe_open(base / "model.safetensors", "pt") as file:
        names = [n.removesuffix(".weight") for n in file.keys()]  # noqa: SIM118
    experts = {n[n.index(".experts.") + 1 :] for n in names if ".experts." in n}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        assert match, name
        module, half = match.groups()
        if ".experts" in module:
            assert module[module.index(".experts") + 1 :] in experts, module
        assert module in names
        assert tensor.shape[half == "B"] == settings["r"]
        found.setdefault(module, {})[half] = tensor
    return {module: scale * halves["B"] @ halves["A"] for module, halves in found.items()}


def exported(folder, out, **options):
    return export_as(folder, out, PEFTAdapter(experts="single", **options), silent)[0]


@pytest.mark.filterwarnings(PATTERNS)
@pytest.mark.parametrize("kind", some(SINGLE, ["qwen3_moe", "deepseek_v3"]))
def test_each_expert_s_factors_are_read_by_vllm_s_names_and_by_peft(kind, tmp_path):
    base, folder = save_base(tmp_path / "base", kind), tmp_path / "adapter"
    expected = save_adapted(base, folder)
    written = exported(folder, tmp_path / "out")
    deltas = modules_in_vllm(written, base)
    weights = load_file(base / "model.safetensors")
    assert {m for m in deltas if ".experts." in m} == {
        n.removesuffix(".weight") for n in weights if ".experts." in n
    }
    merged = PeftModel.from_pretrained(opened(base), folder).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for name, weight in load_file(tmp_path / "merged" / "model.safetensors").items():
        delta = deltas.get(name.removesuffix(".weight"), torch.zeros(()))
        assert torch.allclose(weight, weights[name] + delta, atol=1e-6), name
    if kind != "qwen2_moe":  # PEFT 0.21.2 does not convert the names of this one
        assert_same(logits(PeftModel.from_pretrained(opened(base), written).eval()), expected)


def test_a_command_writes_it_and_says_what_it_cannot(tmp_path):
    base, folder = save_base(tmp_path / "base", "qwen3_moe"), tmp_path / "adapter"
    save_adapted(base, folder, rank=2)
    ok(folder, tmp_path / "out", "--experts", "single")
    assert modules_in_vllm(tmp_path / "out", base)
    words = refused(folder, tmp_path / "no", "--base", base)
    assert "--base of an adapter by itself needs --experts single" in words
    save_adapted(base, tmp_path / "q", targets=("q_proj",))
    with pytest.raises(CheckpointError, match="has no experts that are single matrices"):
        exported(tmp_path / "q", tmp_path / "no")
    save_adapted(base, tmp_path / "ranks", rank_pattern={"q_proj": 2})
    with pytest.raises(CheckpointError, match="has rank_pattern, which servers do not read"):
        exported(tmp_path / "ranks", tmp_path / "no")
    with pytest.raises(CheckpointError, match="contains no adapter"):
        exported(base, tmp_path / "no")
    fused = save_base(tmp_path / "fused", "gpt_oss")
    save_adapted(fused, tmp_path / "g")
    with pytest.raises(CheckpointError, match="has no experts that are single matrices"):
        exported(tmp_path / "g", tmp_path / "no")
    assert not (tmp_path / "no").exists()
