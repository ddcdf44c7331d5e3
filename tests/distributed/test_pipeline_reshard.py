"""Stages of a pipeline save what they have; any mesh goes on from it, to the bit after loading."""

import pytest

import ranks
from each import some
from kept import assert_bitwise, assert_peft_opens, assert_written_once, go_on, start, together
from spread import UNEVEN, learn, resume, trainer
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.sources import read_whole
from surefoot.checkpoint.verification import verify
from surefoot.methods import Freeze, LoRA
from surefoot.parallel.world import ALONE

CLOSE = 2e-5  # of losses after some steps of Adam: sums in another order
ADAPTER = LoRA(rank=3, alpha=8.0)
QWEN = {"kind": "qwen2", "num_hidden_layers": 3, "train": {"micro_batch_size": 1}, **UNEVEN}
LLAMA = {**QWEN, "kind": "llama"}
FREEZE = {**LLAMA, "method": Freeze(num_layers=1, modules=("mlp",))}  # the first stage learns not
TWICE = {**QWEN, "num_hidden_layers": 4, "parallel": {"pp_schedule": "interleaved"}}
CASES = {"full": QWEN, "lora": {**LLAMA, "method": ADAPTER}, "freeze": FREEZE}
FULL_AND_FREEZE = [pytest.param(case, marks=pytest.mark.proof) for case in ("full", "freeze")]
MESHES = [(1, {}), (2, {"dp_shard": 2}), (2, {"tp": 2}), (3, {"pp": 3}), (2, {"pp": 2})]


@pytest.mark.parametrize(
    ("case", "meshes"),
    some([("lora", MESHES[2:4]), *((case, MESHES) for case in CASES)], [("lora", MESHES[2:4])]),
    ids=["lora on some", *CASES],
)
def test_what_a_pipeline_saved_is_the_same_on_any_mesh(case, meshes, tmp_path):
    changes = CASES[case]
    saved = ranks.run(2, lambda w: start(w, tmp_path, **changes), pp=2)
    path, expected, losses = saved[0][0], together(one for _, one, _ in saved), saved[0][2]
    assert verify(path, full=True).ok
    assert_written_once(path)
    source = open_folder(path)  # as a conversion does, without any process
    weights = {f"model/{name}": read_whole(source, name) for name in source.shapes()}
    assert_bitwise(weights, {n: t for n, t in expected.items() if n.startswith("model/")})
    for count, parallel in meshes:
        back = ranks.run(count, lambda w: go_on(w, tmp_path, path, **changes), **parallel)
        assert_bitwise(together(one for _, one, _ in back), expected)
    *_, more = ranks.run(4, lambda w: go_on(w, tmp_path, path, 1, **changes), pp=2, dp_shard=2)[0]
    alone = learn(trainer(ALONE, tmp_path, **changes), 3)
    for ours, theirs in zip([*losses, *more], alone, strict=True):
        assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)


@pytest.mark.parametrize(
    "case", [pytest.param("lora", marks=pytest.mark.proof), "interleaved", *FULL_AND_FREEZE]
)
def test_what_one_process_saved_a_pipeline_goes_on_from(case, tmp_path):
    changes = {**CASES, "interleaved": TWICE}[case]
    path, expected, _ = start(ALONE, tmp_path, **changes)
    found = ranks.run(4, lambda w: go_on(w, tmp_path, path, **changes), pp=2, dp_shard=2)
    assert_bitwise(together(one for _, one, _ in found), expected)


def test_a_pipeline_refuses_the_checkpoint_of_another_model_whatever_stage_it_differs_in(tmp_path):
    path, *_ = start(ALONE, tmp_path, **LLAMA)
    changes = {**LLAMA, "num_hidden_layers": 4}
    with pytest.raises(AssertionError, match="checkpoint of another model"):
        ranks.run(2, lambda w: go_on(w, tmp_path, path, **changes), pp=2)


@pytest.mark.proof
def test_an_adapter_of_a_pipeline_is_peft_s_file(tmp_path):
    changes = CASES["lora"]
    path, *_ = ranks.run(4, lambda w: start(w, tmp_path, **changes), pp=2, tp=2)[0]
    assert not list(path.glob("rank_*/adapter*"))
    made = resume(trainer(ALONE, tmp_path, **changes), path)
    assert_peft_opens(made, path, num_hidden_layers=3, **UNEVEN)
