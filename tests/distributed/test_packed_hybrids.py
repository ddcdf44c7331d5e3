"""Packed rows of models with a state, over ranks and resumes."""

import pytest
import torch
from safetensors.torch import load_file

import folders
import mixtures
import ranks
import surefoot
from each import some
from spread import learn
from surefoot.errors import ModelError
from surefoot.methods import Full, LoRA
from surefoot.parallel.world import ALONE
from test_adapted_experts_ranks import save_base
from test_startup import begun

CLOSE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("kind", some(("lfm2_moe", "mamba2", "qwen3_next"), ["lfm2_moe"]))
@pytest.mark.parametrize("method", [Full(), pytest.param(LoRA(rank=2), marks=pytest.mark.proof)])
def test_two_shards_learn_of_packed_rows_what_one_rank_does(kind, method, tmp_path):
    """They find the layers with a state in the sharded model, with its values."""
    if kind == "mamba2" and isinstance(method, LoRA):
        pytest.skip("PEFT refuses its layers")
    save_base(tmp_path, kind)
    expected = learn(begun(ALONE, tmp_path, method=method, packing=True), 2)

    def work(world):
        return learn(begun(world, tmp_path, method=method, packing=True), 2)

    for found in ranks.run(2, work, dp_shard=2):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)


def test_a_pipeline_refuses_to_pack_them(tmp_path):
    save_base(tmp_path, "lfm2")

    def work(world):
        with pytest.raises(ModelError, match=r"see each other; set data\.packing: false"):
            begun(world, tmp_path, packing=True)

    ranks.run(2, work, pp=2)


def test_a_cut_run_on_packed_rows_resumes_bitwise(tmp_path):
    known = folders.tokenizer()
    sizes = {"vocab_size": len(known), "eos_token_id": known.eos_token_id}
    mixtures.model("lfm2_moe", **sizes).save_pretrained(tmp_path / "model")
    known.save_pretrained(tmp_path / "model")
    folders.save_data(tmp_path / "data")
    recipe = folders.save_recipe(
        tmp_path,
        data={"packing": True},
        optim={"adamw": {"learning_rate": 0.03, "schedule": "constant"}},
        method={"lora": {"rank": 2}},
    )
    surefoot.train(recipe)
    surefoot.train(recipe, **{"train.output_dir": str(tmp_path / "cut"), "train.max_steps": 2})
    surefoot.train(recipe, **{"train.output_dir": str(tmp_path / "cut")})
    one, two = (
        load_file(tmp_path / name / "checkpoint-4" / "adapter_model.safetensors")
        for name in ("run", "cut")
    )
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
