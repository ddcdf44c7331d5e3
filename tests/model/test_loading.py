"""Loading pretrained models: whole, or a clear error and nothing else."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from surefoot.errors import ModelError
from surefoot.model.loading import (
    grow_embeddings,
    load_model,
    new_rows,
    resolve,
    training_dtype,
    upcast_trained,
)
from surefoot.model.section import ModelSection
from surefoot.model.tokenizer import _NEW


@pytest.fixture
def folder(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def opened(folder, **options):
    section = ModelSection(path=str(folder), **options)
    return load_model(resolve(section), section, dtype=training_dtype(section))


def test_the_model_is_loaded_whole(folder):
    ids = torch.arange(3, 12)[None]
    assert torch.equal(
        opened(folder)(input_ids=ids).logits, tiny.model("llama")(input_ids=ids).logits
    )


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_weights_are_an_error(folder):
    change_tensors(folder, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"missing.*model\.norm\.weight"):
        opened(folder)


def test_unexpected_weights_are_an_error(folder):
    change_tensors(folder, lambda t: t.update({"model.extra.weight": torch.zeros(2)}))
    with pytest.raises(ModelError, match=r"unexpected.*model\.extra\.weight"):
        opened(folder)


def test_weights_of_another_shape_are_an_error(folder):
    change_tensors(folder, lambda t: t.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        opened(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_file_is_an_error(keep, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=str(folder)):
        opened(folder)


def test_a_broken_config_is_an_error(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config"):
        opened(folder)


def test_an_architecture_that_is_not_a_language_model_is_an_error(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match=str(folder)):
        opened(folder)


def test_a_pickle_is_refused_with_the_command_that_converts_it(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, a pickle.*save_pretrained"):
        opened(folder)


def test_what_is_no_model_folder_is_named(folder, tmp_path):
    with pytest.raises(ModelError, match="no folder"):
        opened(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="is a file"):
        opened(folder / "config.json")
    with pytest.raises(ModelError, match=r"no config\.json"):
        opened(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="weights are missing"):
        opened(folder)
    (folder / "rank_0").mkdir()
    (folder / "rank_0" / "qwen_rank_0.ckpt").touch()
    with pytest.raises(ModelError, match=r"rank_0\.ckpt: .*mindspore\.ckpt_to_safetensors"):
        opened(folder)


def test_a_hub_model_that_cannot_be_fetched_is_named():
    with pytest.raises(ModelError, match="nobody/nothing"):
        opened("nobody/nothing")


def test_a_modelscope_model_that_cannot_be_fetched_is_named():
    with pytest.raises(ModelError, match=r"nobody/nothing (of ModelScope is not|is of ModelScope)"):
        opened("nobody/nothing", hub="modelscope")


def test_weights_come_in_the_type_asked_for(folder):
    assert opened(folder, dtype="bfloat16").dtype == torch.bfloat16
    assert opened(folder).dtype == torch.float32


def test_with_auto_what_learns_is_float32(folder):
    model = opened(folder, dtype="bfloat16").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    upcast_trained(model, ModelSection(path="", dtype="auto"))
    assert model.lm_head.weight.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


class Words:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_new_tokens_start_at_the_mean_and_old_ones_stay(kind):
    model = tiny.model(kind)
    before = {n: p.clone() for n, p in model.named_parameters() if "embed" in n or "lm_head" in n}
    assert grow_embeddings(model, Words(67))
    for name, old in before.items():
        new = dict(model.named_parameters())[name]
        assert torch.equal(new[:64], old)
        torch.testing.assert_close(new[64:], old.mean(0).expand(3, -1))
    assert model.config.vocab_size == 67


def test_new_tokens_in_the_padding_of_a_vocabulary_start_at_the_mean_of_the_known_ones():
    model, tokenizer = tiny.model(), Words(60)
    vars(tokenizer)[_NEW] = [58, 59]
    before = {n: p.clone() for n, p in model.named_parameters() if "embed" in n or "lm_head" in n}
    assert grow_embeddings(model, tokenizer)
    for name, old in before.items():
        new = dict(model.named_parameters())[name]
        assert torch.equal(new[:58], old[:58]) and torch.equal(new[60:], old[60:])
        torch.testing.assert_close(new[58:60], old[:58].mean(0).expand(2, -1))
    assert new_rows(model) == range(58, 60)


def test_embeddings_never_shrink():
    model = tiny.model()
    assert not grow_embeddings(model, Words(60))
    assert model.config.vocab_size == 64


def test_a_url_is_refused_with_the_command_that_makes_a_folder_of_it():
    with pytest.raises(ModelError, match=r"is a URL.*surefoot export s3://bucket/run FOLDER"):
        resolve(ModelSection(path="s3://bucket/run"))
