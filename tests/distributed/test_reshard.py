"""What processes of one mesh have saved, those of any other go on from: to the bit after loading.

What is expected comes from torch's own gather (``full_tensor``), never from our boxes.
"""

import pytest

import ranks
from each import some
from kept import (
    assert_bitwise,
    assert_peft_opens,
    assert_written_once,
    everything,
    go_on,
    start,
)
from spread import UNEVEN, learn, resume, trainer
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.sources import read_whole
from surefoot.checkpoint.verification import verify
from surefoot.methods import LoRA
from surefoot.parallel.world import ALONE

CLOSE = 2e-5  # of losses after some steps of Adam: sums in another order
ADAPTER = LoRA(rank=3, alpha=8.0)
ONES = {"micro_batch_size": 1}  # for one, two and three shares of a batch
QWEN = {"kind": "qwen2", "train": ONES, **UNEVEN}  # tied, biases, nothing divides


MESHES = [(1, {}), (3, {"dp_shard": 3}), (2, {"tp": 2}), (4, {"tp": 4}), (4, {"tp": 2})]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    found = ranks.run(4, lambda world: start(world, folder, **QWEN), tp=2, dp_shard=2)
    assert verify(found[0][0], full=True).ok
    assert_written_once(found[0][0])
    return found[0]


@pytest.mark.parametrize(("count", "parallel"), some(MESHES, MESHES[:3]), ids=str)
def test_what_two_by_two_saved_is_the_same_on_any_mesh(count, parallel, saved, tmp_path):
    path, expected, _ = saved
    for _, found, _ in ranks.run(count, lambda w: go_on(w, tmp_path, path, **QWEN), **parallel):
        assert_bitwise(found, expected)


def test_the_manifest_tells_the_mesh(saved):
    manifest = open_checkpoint(saved[0]).manifest
    assert dict(manifest.mesh) == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 2}


def test_its_weights_are_read_without_any_process(saved):
    path, expected, _ = saved
    source = open_folder(path)
    found = {f"model/{name}": read_whole(source, name) for name in source.shapes()}
    assert_bitwise(found, {n: t for n, t in expected.items() if n.startswith("model/")})


@pytest.mark.proof  # ``test_meshes`` has another chain
def test_a_run_goes_from_mesh_to_mesh_as_one_process_would(saved, tmp_path):
    path, _, losses = saved
    alone = learn(trainer(ALONE, tmp_path, **QWEN), 7)
    for count, parallel in [
        (1, {}),
        (3, {"dp_shard": 3}),
        (2, {"tp": 2}),
        (4, {"tp": 2, "dp_replicate": 2}),
        (4, {"tp": 4}),
    ]:
        (path, _, more), *_ = ranks.run(
            count, lambda w, p=path: go_on(w, tmp_path, p, steps=1, **QWEN), **parallel
        )
        assert_written_once(path)
        losses = [*losses, *more]
    for step, (ours, theirs) in enumerate(zip(losses, alone, strict=True)):
        assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE), f"step {step}"


def test_the_same_mesh_goes_on_in_the_same_bits(saved, tmp_path):
    path, *_ = saved
    more = ranks.run(4, lambda w: go_on(w, tmp_path, path, 1, **QWEN)[1:], tp=2, dp_shard=2)

    def unbroken(world):
        made = trainer(world, tmp_path, **QWEN)
        return learn(made, 3)

    expected = ranks.run(4, unbroken, tp=2, dp_shard=2)
    assert more[0][1] == expected[0][2:]


@pytest.mark.parametrize(
    "meshes", some([MESHES[2:3], MESHES[1:4]], [MESHES[2:3]]), ids=["on two", "anywhere"]
)
def test_an_adapter_of_two_by_two_is_peft_s_file_and_goes_on(meshes, tmp_path):
    changes = {"method": ADAPTER, "train": ONES, **UNEVEN}
    path, expected, _ = ranks.run(4, lambda w: start(w, tmp_path, **changes), tp=2, dp_shard=2)[0]
    assert verify(path, full=True).ok
    assert_written_once(path)
    assert not list(path.glob("rank_*/adapter*"))
    for count, parallel in meshes:
        found = ranks.run(count, lambda w: go_on(w, tmp_path, path, **changes), **parallel)
        for _, one, _ in found:
            assert_bitwise(one, expected)
    made = resume(trainer(ALONE, tmp_path, **changes), path)
    assert_bitwise(everything(made), expected)
    assert_peft_opens(made, path, num_hidden_layers=2, **UNEVEN)


def test_what_one_process_saved_two_by_two_go_on_from(tmp_path):
    path, expected, _ = start(ALONE, tmp_path, **QWEN)
    for _, found, _ in ranks.run(4, lambda w: go_on(w, tmp_path, path, **QWEN), tp=2, dp_shard=2):
        assert_bitwise(found, expected)
