"""Every tensor and state under one set of names, whatever the layout."""

import pytest
import torch
from safetensors.torch import save_file

from surefoot.checkpoint.layouts.detection import (
    open_contents,
    plain,
    states_of,
)
from surefoot.checkpoint.saving.preparation import save
from surefoot.checkpoint.sources import FolderSource
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Box

from ..sample import Holder, same_bits, sample_states


@pytest.fixture
def ours(tmp_path):
    return save(tmp_path / "run", 7, sample_states())


def test_all_tensors_of_ours_are_there(ours):
    contents = open_contents(ours)
    source, states = FolderSource(contents), sample_states()
    for name, tensor in states["model"].state.items():
        found = source.read(f"model/{name}", Box.whole(tuple(tensor.shape)))
        assert same_bits(found, tensor)
    moments = states["optimizer"].state["model.norm.weight"]["exp_avg"]
    found = source.read("optimizer/model.norm.weight.exp_avg", Box.whole((8,)))
    assert same_bits(found, moments)
    assert "state/random.torch" in contents.tensors
    assert len(open_contents(ours, ["state"]).tensors) == 1


def test_a_model_of_others_has_only_a_model(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(open_contents(tmp_path).tensors) == ["model/a"]
    assert open_contents(tmp_path, ["optimizer"]).tensors == {}
    assert states_of(tmp_path) == {}
    with pytest.raises(CheckpointError, match="does not exist"):
        open_contents(tmp_path / "none")


def test_states_are_plain_data_without_their_tensors(tmp_path):
    states = sample_states() | {"odd": Holder({3: (1, None), (1, 2): torch.ones(1), "e": {}})}
    folder = save(tmp_path, 1, states)
    found = plain(dict(states_of(folder)))
    assert found["optimizer"] == {"groups": [{"lr": 1e-4, "betas": [0.9, 0.999]}]}
    assert found["random"] == {"python": [3, [1, 2], None]}
    assert found["trainer"]["best_metric"] == "inf" and found["loader"]["seed"] == hex(2**63)
    assert found["odd"]["3"] == [1, None] and found["odd"]["e"] == {}


@pytest.mark.parametrize(
    "odd", [{"$dict": 3}, {"$dict": [[1], 2, []]}, {"$tuple": None}, {"$": 1}, [{"$x": {"$y": 1}}]]
)
def test_a_state_of_no_format_is_still_plain_data(odd):
    assert isinstance(plain({"a": odd}), dict)
