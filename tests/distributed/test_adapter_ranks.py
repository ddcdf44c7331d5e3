"""Adapters other than plain LoRA on two ranks: they learn what one learns, and resume exactly."""

import pytest
import torch

import folders
import ranks
from adapted import gpt2
from spread import learn, resume, save
from surefoot.methods import OFT, LoRA, VeRA
from surefoot.parallel.world import ALONE
from test_experts import in_files
from test_startup import begun

VERA = VeRA(rank=24)
BASE = {"base_model.vera_A", "base_model.vera_B"}  # which each layer shares


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("method", "axis", "shared"),
    [
        (VERA, "pp", BASE),
        pytest.param(OFT(block_size=4), "dp_shard", set(), marks=pytest.mark.proof),
        pytest.param(VERA, "dp_shard", BASE, marks=pytest.mark.proof),
    ],
    ids=["vera-pp", "oft-dp_shard", "vera-dp_shard"],
)
def test_two_ranks_train_what_one_does_and_resume_to_the_same_bits(method, axis, shared, tmp_path):
    folder = folders.save_model(tmp_path / "base", num_hidden_layers=2)
    expected = learn(begun(ALONE, folder, method=method), 2)

    def work(world):
        made = begun(world, folder, method=method)
        figures = learn(made, 2)
        halfway = save(made, tmp_path / "two")
        learn(made, 1)
        end = save(made, tmp_path / "two")
        other = resume(begun(world, folder, method=method), halfway)
        learn(other, 1)
        return figures, end, save(other, tmp_path / "resumed")

    figures, end, resumed = ranks.run(2, work, **{axis: 2})[0]
    one, other = in_files(resumed), in_files(end)
    assert one.keys() == other.keys() >= shared
    assert all(torch.equal(one[name], other[name]) for name in one)
    for ours, theirs in zip(figures, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out")
def test_shards_of_transposed_weights_start_with_the_same_magnitudes(tmp_path):
    gpt2(tmp_path / "model")

    def work(world):
        return save(
            begun(world, tmp_path / "model", method=LoRA(rank=3, dora=True)),
            tmp_path / f"{world.size}",
        )

    alone = in_files(work(ALONE))
    found = in_files(ranks.run(2, work, dp_shard=2)[0])
    assert found.keys() == alone.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)
