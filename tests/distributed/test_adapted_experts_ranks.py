"""Adapters of mixtures over ranks learn what one learns, or are refused in a sentence."""

import pytest

import folders
import mixtures
import ranks
from each import some
from spread import learn, save
from surefoot.errors import RecipeError
from surefoot.methods import LoRA
from surefoot.parallel.world import ALONE
from test_experts import in_files
from test_startup import begun

CLOSE = 1e-5
SHARED = (
    "o_proj",
    "shared_experts.gate_proj",
    "shared_experts.up_proj",
    "shared_experts.down_proj",
)
KINDS = some(mixtures.KINDS, ["deepseek_v3"])
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def save_base(folder, kind):
    known = folders.tokenizer()
    sizes = {"vocab_size": len(known), "eos_token_id": known.eos_token_id}
    mixtures.model(kind, **sizes).save_pretrained(folder)
    known.save_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_two_shards_learn_what_one_rank_does_and_save_one_adapter(kind, tmp_path):
    save_base(tmp_path, kind)
    method = LoRA(rank=2)
    alone = begun(ALONE, tmp_path, method=method)
    expected = learn(alone, 2)
    mine = in_files(save(alone, tmp_path / "alone"))

    def work(world):
        made = begun(world, tmp_path, method=method)
        return learn(made, 2), save(made, tmp_path / "two")

    found, path = ranks.run(2, work, dp_shard=2)[0]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)
    theirs = in_files(path)
    assert {n: t.shape for n, t in theirs.items()} == {n: t.shape for n, t in mine.items()}


def test_tensor_parallelism_takes_shared_experts_and_refuses_routed_ones(tmp_path):
    save_base(tmp_path, "deepseek_v3")
    method = LoRA(rank=2, targets=SHARED)
    expected = learn(begun(ALONE, tmp_path, method=method), 2)

    def work(world):
        with pytest.raises(RecipeError, match=r"experts covers all .*targets can leave it out"):
            begun(world, tmp_path, method=LoRA(rank=2, targets=("o_proj", "experts.down_proj")))
        return learn(begun(world, tmp_path, method=method), 2)

    for ours, theirs in zip(ranks.run(2, work, tp=2)[0], expected, strict=True):
        assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)
