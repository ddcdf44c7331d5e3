"""What gets no gradient from text has no adapter, in the models that also read pictures."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from each import some
from surefoot.errors import RecipeError
from surefoot.methods import Full, LoRA
from surefoot.network._coverage import coverage

TEXT = {**tiny.SIZES, "num_hidden_layers": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
AUDIO = {"hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 4}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
SETTINGS = {
    "gemma3": {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
    "gemma4": {
        # its own table of embeddings for each layer has 262,144 rows otherwise
        "text_config": {**TEXT, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
        "vision_config": {**VISION, "head_dim": 8},
    },
    "git": {
        **{name: TEXT[name] for name in TEXT if name not in ("num_key_value_heads", "head_dim")},
        "vision_config": VISION,
    },
    "got_ocr2": {
        "text_config": TEXT,
        "vision_config": {**VISION, "image_size": 64, "global_attn_indexes": [1]},
    },
    "mllama": {
        "text_config": {**TEXT, **ROPE, "cross_attention_layers": [1]},
        "vision_config": VISION,
    },
    "phi4_multimodal": {
        **TEXT,
        "vision_config": {**VISION, "crop_size": 28},
        "audio_config": AUDIO,
    },
    "llama": TEXT,
}


def model(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SETTINGS[kind])).eval()


def backward(module):
    """Gradients of a row of text."""
    ids = torch.arange(20, 28)[None]
    found = module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    found.logits.float().logsumexp(-1).sum().backward()


@pytest.mark.parametrize("kind", some(SETTINGS, ["gemma3", "git", "mllama", "llama"]))
def test_every_adapter_of_a_model_that_reads_pictures_learns_from_text(kind):
    module = LoRA(rank=2).apply(model(kind))
    backward(module)
    adapters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert adapters
    assert [name for name, p in adapters.items() if p.grad is None] == []


@pytest.mark.parametrize("kind", SETTINGS)
def test_the_table_says_that_what_gets_no_gradient_is_not_trained(kind):
    module = Full().apply(inner := model(kind))
    backward(module)
    sizes = {True: 0, False: 0}
    for parameter in inner.parameters():
        sizes[parameter.grad is not None] += parameter.numel()
    shares = {True: 0.0, False: 0.0}
    for row in coverage(module, inner):
        assert row.trained in ("yes", "yes, by rows with more than text")
        shares[row.trained == "yes"] += row.share
    assert shares[False] == pytest.approx(sizes[False] / sum(sizes.values()))
    assert (shares[False] == 0) == (kind == "llama")


def test_a_name_that_the_tower_shares_is_that_of_the_text_model():
    module = LoRA(rank=2, targets=("q_proj",)).apply(model("gemma3"))
    adapted = {
        name.partition(".lora_")[0] for name, _ in module.named_parameters() if ".lora_" in name
    }
    assert len(adapted) == 2
    assert not any("vision" in name for name in adapted)
    with pytest.raises(RecipeError, match=r"fc1 cannot have an adapter .*: text does not pass"):
        LoRA(rank=2, targets=("fc1",)).apply(model("gemma3"))
