"""Parts of fused parameters: where transformers takes them from."""

import pytest
import torch

import tiny
from surefoot.errors import ModelError
from surefoot.model import weights
from surefoot.model.weights import FullWeights


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_each_part_is_where_transformers_finds_it(kind):
    model = tiny.model(kind, num_hidden_layers=2)
    files, parameters = FullWeights(model).state_dict(), dict(model.named_parameters())
    found = weights.places(model)
    assert {name for name in files if ".experts." in name} == set(found)
    for name, at in found.items():
        (expert, row, column), (height, width) = at.start, at.shape
        part = parameters[at.fused][expert, row : row + height, column : column + width]
        assert torch.equal(part, files[name]), name
        assert at.whole == tuple(parameters[at.fused].shape)


def test_a_model_without_fused_parameters_has_no_parts():
    assert weights.places(tiny.model("qwen2")) == {}


def test_parts_that_are_not_rows_in_their_order_are_refused(monkeypatch):
    def backwards(model, state):
        return {f"{name}.part": tensor[0].flip(0) for name, tensor in state.items()}

    monkeypatch.setattr(weights, "revert_weight_conversion", backwards)
    with pytest.raises(ModelError, match=r"part: transformers does more than split .* into rows"):
        weights.places(tiny.model("mixtral"))
