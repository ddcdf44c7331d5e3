"""A model that starts on the meta device has the buffers that it has when it is read in full."""

import pytest
import torch

from surefoot.model.loading import fill_buffers, load_model
from surefoot.model.section import ModelSection
from surefoot.network.shard_loading import init_on_meta
from zoo import architectures


def stored(model):
    return {name: torch.empty_like(t, device="meta") for name, t in model.state_dict().items()}


@pytest.mark.parametrize("name", ["falcon_h1", "ctrl", "gpt_neo", "gemma3_text", "llama"])
def test_buffers_in_no_file_are_those_of_the_model_read_as_a_whole(name, tmp_path):
    architectures.build(name).save_pretrained(tmp_path)
    section = ModelSection(path=str(tmp_path))
    whole = load_model(tmp_path, section, dtype=torch.float32)
    start = init_on_meta(tmp_path, section, dtype=torch.float32)
    expected = dict(whole.named_non_persistent_buffers())
    assert start is not None
    found = dict(start.model.named_non_persistent_buffers())
    assert found.keys() == expected.keys() and found
    for buffer in expected:
        assert torch.equal(found[buffer], expected[buffer]), buffer


def test_a_model_with_a_buffer_that_nothing_initializes_is_read_as_a_whole(
    tmp_path, monkeypatch, caplog
):
    made = architectures.build("llama")
    made.save_pretrained(tmp_path)

    def forgetful(own, config):
        initialize(own, config)
        own.model.register_buffer("forgotten", torch.zeros(4), persistent=False)

    cls = type(made)
    initialize = cls.__init__
    monkeypatch.setattr(cls, "__init__", forgetful)
    section = ModelSection(path=str(tmp_path))
    with caplog.at_level("INFO"):
        assert init_on_meta(tmp_path, section, dtype=torch.float32) is None
    assert "model.forgotten" in caplog.text
    empty = load_model(tmp_path, section, dtype=torch.float32, weights=stored(made))
    assert fill_buffers(empty) == "model.forgotten"
