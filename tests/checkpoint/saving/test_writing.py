"""Files that did not change are shared with the parent; every checkpoint is whole without it."""

import errno
import shutil
from dataclasses import replace

import pytest
import torch

from crash.system import System, fails
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.saving._writer_process import Background
from surefoot.checkpoint.saving._writing import write
from surefoot.checkpoint.saving.preparation import prepare, save
from surefoot.checkpoint.verification import verify
from surefoot.storage import files

from ..sample import Holder

FROZEN, TRAINED = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def states(step):
    """Half of the weights are frozen: the optimizer has nothing for them."""
    torch.manual_seed(0)
    frozen = {f"layers.{i}.weight": torch.randn(64, 64) for i in range(3)}
    torch.manual_seed(step)
    trained = {f"layers.{i}.weight": torch.randn(64, 64) for i in range(3, 6)}
    moments = {name: {"exp_avg": torch.randn(64, 64)} for name in trained}
    return {"model": Holder({**trained, **frozen}), "optimizer": Holder(moments)}


def directly(root, step, made, parent):
    return save(root, step, made, parent=parent)


def in_the_background(root, step, made, parent):
    background = Background()
    background.start(*prepare(root, step, made, parent=parent))
    saved = background.wait()
    background.close()
    return saved.path


@pytest.fixture(params=[directly, in_the_background], ids=lambda f: f.__name__)
def saved(request, tmp_path):
    def act(step, made=None, parent=None):
        return request.param(tmp_path, step, made or states(step), parent)

    return act


def loads(folder, step):
    into = states(0)
    load(folder, into)
    found, expected = into["model"].state, states(step)["model"].state
    return all(torch.equal(found[name], expected[name]) for name in expected)


def is_shared(a, b, name):
    return (a / name).samefile(b / name)


def test_frozen_weights_share_the_parents_file(saved):
    first, second = saved(1), saved(2, parent="checkpoint-1")
    if not is_shared(first, second, FROZEN):
        pytest.skip("this file system clones instead of linking")
    assert not is_shared(first, second, TRAINED)
    for step, folder in ((1, first), (2, second)):
        assert verify(folder, full=True).ok
        assert loads(folder, step)


@pytest.mark.parametrize("gone", [0, 1])
def test_each_is_whole_without_the_other(saved, gone):
    both = [saved(1), saved(2, parent="checkpoint-1")]
    shutil.rmtree(both[gone])
    left = both[1 - gone]
    assert verify(left, full=True).ok
    assert loads(left, 2 - gone)


def test_a_frozen_weight_that_did_change_is_not_shared(saved):
    first, other = saved(1), states(1)
    other["model"].state["layers.1.weight"].view(-1)[7] += 1e-6
    second = saved(2, other, parent="checkpoint-1")
    assert not is_shared(first, second, FROZEN)
    into = states(0)
    load(second, into)
    expected = other["model"].state["layers.1.weight"]
    assert torch.equal(into["model"].state["layers.1.weight"], expected)


def test_damage_to_the_parent_is_not_inherited(saved):
    first = saved(1)
    with (first / FROZEN).open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\xff\x00\xff")
    second = saved(2, parent="checkpoint-1")
    assert not verify(first, full=True).ok
    assert verify(second, full=True).ok


@pytest.mark.parametrize("damage", ["manifest.json", FROZEN])
def test_a_parent_that_lost_a_file_is_no_hindrance(saved, damage):
    first = saved(1)
    (first / damage).unlink()
    assert verify(saved(2, parent="checkpoint-1"), full=True).ok
    assert verify(saved(3, parent="checkpoint-77"), full=True).ok


def test_where_links_are_refused_the_file_is_written(tmp_path, monkeypatch):
    first = directly(tmp_path, 1, states(1), None)
    system = System(calls=("link",))
    system.fault, system.at = fails(errno.EPERM), 0
    monkeypatch.setattr(files, "os", system)
    second = directly(tmp_path, 2, states(2), "checkpoint-1")
    assert system.seen in (["link"], [])  # none where there are clones
    assert not is_shared(first, second, FROZEN)
    assert verify(second, full=True).ok


def test_sharing_can_be_turned_off(tmp_path):
    first = directly(tmp_path, 1, states(1), None)
    job, live = prepare(tmp_path, 2, states(2), parent="checkpoint-1")
    saved = write(replace(job, share=False), live)
    assert saved.num_shared == 0
    assert not is_shared(first, saved.path, FROZEN)


def test_the_bytes_that_are_shared_are_counted(tmp_path):
    directly(tmp_path, 1, states(1), None)
    saved = write(*prepare(tmp_path, 2, states(2), parent="checkpoint-1"))
    assert saved.num_shared == (saved.path / FROZEN).stat().st_size
    assert saved.num_bytes > saved.num_shared


def test_weights_that_all_learn_stay_in_one_file(tmp_path):
    made = states(1)
    made["optimizer"] = Holder({n: {"exp_avg": t} for n, t in made["model"].state.items()})
    assert (directly(tmp_path, 1, made, None) / "model.safetensors").is_file()
