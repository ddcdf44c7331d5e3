"""Models that read pictures, opened as their files say; towers have an attention of their own."""

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

import pictures
from surefoot.batch import Batch, Probe
from surefoot.errors import ModelError
from surefoot.model.config import auto_class
from surefoot.model.isolation import unpacked, use_packed
from surefoot.model.loading import load_model
from surefoot.model.section import ModelSection

KINDS = list(pictures.CONFIGS)


@pytest.mark.parametrize("kind", KINDS)
def test_it_opens_from_its_folder_with_its_tower(kind, tmp_path):
    model = pictures.model(kind)
    model.save_pretrained(tmp_path)
    opened = load_model(tmp_path, ModelSection(path=str(tmp_path)), dtype=torch.float32)
    assert type(opened) is type(model)
    assert same_values(opened, model)


@pytest.mark.parametrize("kind", ["qwen3_5", "llama4", "mllama", "gemma3", "qwen2_vl"])
def test_a_model_is_opened_whole_where_transformers_has_a_class_for_its_language_model(kind):
    config = AutoConfig.for_model(kind)
    assert auto_class(config)._model_mapping[type(config)].config_class is type(config)


def same_values(one, two):
    values = dict(two.named_parameters())
    return all(torch.equal(p, values[name]) for name, p in one.named_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_language_model_alone_attends_by_document(kind):
    model = pictures.model(kind)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    towers = [part for part in parts if part.config is not model.config]
    towers = [part for part in towers if part.config is not model.config.get_text_config()]
    use_packed(model, 40)
    assert model.get_decoder().config._attn_implementation == "surefoot_packed_sdpa"
    assert {tower.config._attn_implementation for tower in towers} == {"sdpa"}
    with unpacked(model):
        assert {part.config._attn_implementation for part in parts} == {"sdpa"}


def test_a_probe_that_the_attention_computes_otherwise_is_refused():
    ids = torch.arange(20, 28)[None]
    positions = torch.arange(8)[None]
    bounds = torch.tensor([0, 4, 8], dtype=torch.int32)
    labels = torch.full_like(ids, -100)
    labels[:, [1, 2, 3, 5, 6, 7]] = ids[:, [1, 2, 3, 5, 6, 7]]
    together = Batch(ids, labels, positions % 4, cu_seqlens=bounds)
    alone = [Batch(ids[:, s : s + 4], labels[:, s : s + 4], positions[:, :4]) for s in (0, 4)]
    assert use_packed(pictures.model("llava"), probes=[Probe(together, alone)])
    other = [alone[0], Batch(ids[:, 4:] + 1, labels[:, 4:], positions[:, :4])]
    with pytest.raises(ModelError, match="other values than alone, if it has pictures"):
        use_packed(pictures.model("llava"), probes=[Probe(together, other)])
