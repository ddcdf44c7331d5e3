"""Adapters that start from the weights, and frozen ones below them, over ranks and through kills:
as on one rank, and resumed on any mesh to the same bits."""

import pytest
import torch

import folders
import ranks
from spread import learn, resume, save
from surefoot.errors import ModelError, RecipeError
from surefoot.methods import LoRA
from surefoot.parallel.world import ALONE
from test_experts import in_files
from test_startup import UNEVEN, begun

CLOSE = 1e-5
PISSA = LoRA(rank=3, init="pissa", alpha=4.0)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stacked")
    folders.save_model(folder, **UNEVEN)
    few = {"target_modules": ["q_proj", "up_proj"], "r": 3, "lora_alpha": 5}
    folders.save_adapter(folder, folder / "below", **few)
    return folder


def start(world, folder, case):
    below = {"frozen_adapters": (folder / "below",)}
    method, model = {
        "pissa": (PISSA, None),
        "olora": (LoRA(rank=2, init="olora", rslora=True, freeze_a=True), None),
        "below": (LoRA(rank=2, targets=("q_proj", "v_proj")), below),
    }[case]
    return begun(world, folder, method=method, model=model)


def same(one, other):
    one, other = in_files(one), in_files(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def close(figures, expected):
    for ours, theirs in zip(figures, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("pissa", marks=pytest.mark.proof),
        pytest.param("olora", marks=pytest.mark.proof),
        "below",
    ],
)
def test_two_shards_train_what_one_rank_does_and_resume_to_the_same_bits(case, folder, tmp_path):
    alone = start(ALONE, folder, case)
    first = save(alone, tmp_path / "alone")
    expected = learn(alone, 2)
    middle = save(alone, tmp_path / "alone")
    learn(alone, 1)
    last = save(alone, tmp_path / "alone")

    again = resume(start(ALONE, folder, case), middle)
    learn(again, 1)
    same(save(again, tmp_path / "again"), last)

    def work(world):
        made = start(world, folder, case)
        begins = save(made, tmp_path / "two")
        figures = learn(made, 2)
        halfway = save(made, tmp_path / "two")
        learn(made, 1)
        end = save(made, tmp_path / "two")
        other = resume(start(world, folder, case), halfway)
        learn(other, 1)
        return begins, figures, end, save(other, tmp_path / "resumed")

    begins, figures, end, resumed = ranks.run(2, work, dp_shard=2)[0]
    same(begins, first)
    same(resumed, end)
    close(figures, expected)


def test_tensor_parallelism_trains_the_same(folder, tmp_path):
    alone = start(ALONE, folder, "pissa")
    first, expected = save(alone, tmp_path / "alone"), learn(alone, 2)

    def work(world):
        made = start(world, folder, "pissa")
        return save(made, tmp_path / "two"), learn(made, 2)

    begins, figures = ranks.run(2, work, tp=2)[0]
    same(begins, first)
    close(figures, expected)


def test_a_pipeline_is_refused(folder):
    def work(world):
        with pytest.raises(RecipeError, match=r"parallel\.pp: .* frozen adapters"):
            start(world, folder, "pissa")

    ranks.run(2, work, pp=2)


def test_an_adapter_whose_base_peft_changes_is_refused_by_shards(folder, tmp_path):
    adapter = folders.save_adapter(folder, tmp_path / "adapter")
    folders.edit_json(adapter / "adapter_config.json", init_lora_weights="pissa")

    def work(world):
        with pytest.raises(ModelError, match="init_lora_weights pissa changed the base"):
            begun(world, folder, method=LoRA(), model={"adapter": adapter})

    ranks.run(2, work, dp_shard=2)
