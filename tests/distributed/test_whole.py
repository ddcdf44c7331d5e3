"""Layout full, written by several processes at once: the files that one process would write."""

import json
from dataclasses import replace
from math import prod

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ranks
import tiny
from each import some
from spread import UNEVEN, learn, resume, save, trainer, writers
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.saving._writer_process import Background
from surefoot.checkpoint.saving.preparation import prepare
from surefoot.checkpoint.verification import verify
from surefoot.methods import Freeze, LoRA
from surefoot.parallel.world import ALONE

ONES = {"global_batch_size": 8, "micro_batch_size": 1}
FULL = {"kind": "qwen2", "train": ONES, **UNEVEN}  # tied, biases, nothing divides
ADAPTER = {"method": LoRA(rank=3, alpha=8.0), "train": ONES, **UNEVEN}
PAIRS = [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}]
FOURS = [
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_shard": 4},
]
ALL = [*((2, mesh) for mesh in PAIRS), *((4, mesh) for mesh in FOURS)]
MESHES = some(ALL, [(2, {"tp": 2})])


def states_of(made):
    return {name: state for name, state in made.states.items() if name != "random"}


def save_in_background(made, group, flight, parent=None):
    """As the loop does: a snapshot, and a process beside that writes it."""
    step = made.state.global_step
    folder, kind = made.saver.root, made.saver.kind
    job, live = prepare(folder, step, states_of(made), kind=kind, writers=group, parent=parent)
    flight.start(job, live)
    return job


def tensors_of(folder):
    """The bytes of every file of tensors, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


CASES = {"full": FULL, "lora": ADAPTER}
FEW = [("full", PAIRS[2])]
MANY = [(case, mesh) for case in CASES for mesh in [*PAIRS, *FOURS] if (case, mesh) not in FEW]


@pytest.mark.parametrize(
    ("case", "mesh"),
    [*FEW, *(pytest.param(*both, marks=pytest.mark.proof) for both in MANY)],
    ids=str,
)
def test_the_files_are_those_that_one_process_writes(case, mesh, tmp_path):
    changes = CASES[case]

    def work(world):
        made = trainer(world, tmp_path / "many", **changes)
        learn(made, 2)
        flight = Background()
        job = save_in_background(made, writers(world), flight)
        learn(made, 1)  # the snapshot does not mind
        flight.wait()
        world.wait()
        flight.close()
        return job.target

    saved = ranks.run(prod(mesh.values()), work, **mesh)[0]
    assert verify(saved, full=True).ok
    assert not list(saved.glob("rank_*"))
    assert not list(saved.glob(".*"))
    alone = resume(trainer(ALONE, tmp_path / "one", **changes), saved)
    again = save(alone, tmp_path / "one")
    ours, theirs = tensors_of(saved), tensors_of(again)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    told = [json.loads((path / "state.json").read_text()) for path in (saved, again)]
    assert told[0]["optimizer"] == told[1]["optimizer"]


@pytest.mark.parametrize(("count", "mesh"), MESHES, ids=str)
def test_from_pretrained_opens_it_as_it_lies(count, mesh, tmp_path):
    def work(world):
        made = trainer(world, tmp_path, **FULL)
        return save(made, tmp_path), world.is_main and made.policy.module.config.to_json_string()

    (saved, config), *_ = ranks.run(count, work, **mesh)
    (saved / "config.json").write_text(config)
    opened = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    expected = resume(trainer(ALONE, tmp_path, **FULL), saved).policy.module.state_dict()
    assert all(torch.equal(opened[name], tensor) for name, tensor in expected.items())
    assert load_file(saved / "model.safetensors").keys() <= expected.keys()


def test_peft_opens_an_adapter_as_it_lies(tmp_path):
    def work(world):
        return save(trainer(world, tmp_path, **ADAPTER), tmp_path)

    saved = ranks.run(2, work, tp=2)[0]
    made = resume(trainer(ALONE, tmp_path, **ADAPTER), saved)
    made.policy.module.peft_config["default"].save_pretrained(saved)
    opened = PeftModel.from_pretrained(tiny.model(num_hidden_layers=2, **UNEVEN), saved).eval()
    ids = torch.arange(3, 20)[None]
    found = made.policy.module.eval()(ids).logits  # with our products, as in training
    torch.testing.assert_close(opened(ids).logits, found, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("count", "mesh"), MESHES, ids=str)
def test_none_writes_much_more_than_another(count, mesh, tmp_path):
    def work(world):
        made = trainer(world, tmp_path, **{**FULL, "hidden_size": 64})
        learn(made, 1)
        _, live = prepare(tmp_path, 1, states_of(made), writers=writers(world))
        groups = [tensors for role, tensors in live.groups.items() if role != "state"]
        return sum(t.numel() * t.element_size() for group in groups for t in group.values())

    sizes, alone = ranks.run(count, work, **mesh), work(ALONE)
    assert sum(sizes) == alone
    if "dp_shard" not in mesh:  # cut by ceilings, a vocabulary of 97 is 25, 25, 25, 22
        assert max(sizes) <= 1.02 * alone / count
    assert max(sizes) <= 1.1 * alone / count


@pytest.mark.parametrize("layout", ["full", pytest.param("distributed", marks=pytest.mark.proof)])
def test_frozen_weights_share_the_file_of_the_checkpoint_before(layout, tmp_path):
    """The second save finds them equal in all processes; what was said once is not said again."""

    def work(world):
        made = trainer(world, tmp_path, method=Freeze(num_layers=1), train=ONES)
        said = []

        def exchange(value):
            said.append(value)
            return world.gathered(value)

        group = writers(world, layout, exchange)
        flight, found = Background(), []
        for parent in (None, "checkpoint-1", "checkpoint-2"):
            learn(made, 1)
            save_in_background(made, group, flight, parent)
            found.append(flight.wait())
            world.wait()
        flight.close()
        return found, len(said)

    (found, num_said), _ = ranks.run(2, work, dp_shard=2)
    assert num_said == 4  # once in full, then three short ones
    for saved in found:
        assert verify(saved.path, full=True).ok
    assert [saved.num_shared > 0 for saved in found] == [False, True, True]
    manifest = open_checkpoint(found[1].path).manifest
    largest = max((n for n in manifest.files if "model" in n), key=manifest.files.get)
    inodes = {(saved.path / largest).stat().st_ino for saved in found}
    assert len(inodes) == 1 or found[1].num_shared


def test_other_numbers_of_processes_write_frozen_weights_anew(tmp_path):
    changes = {"method": Freeze(num_layers=1), "train": ONES}

    def work(world, parent=None):
        made = trainer(world, tmp_path, **changes)
        if parent is not None:
            resume(made, tmp_path / parent)
        learn(made, 1)
        flight = Background()
        save_in_background(made, writers(world), flight, parent)
        found = flight.wait()
        world.wait()
        flight.close()
        return found

    ranks.run(2, work, dp_shard=2)
    alone = work(ALONE, "checkpoint-1")
    again, _ = ranks.run(2, lambda world: work(world, "checkpoint-2"), tp=2)
    for saved in (alone, again):
        assert saved.num_shared == 0
        assert verify(saved.path, full=True).ok


def test_one_that_cannot_reserve_the_space_stops_all_before_a_byte_is_written(tmp_path):
    def work(world):
        made = trainer(world, tmp_path, **FULL)
        job, live = prepare(tmp_path, 1, states_of(made), writers=writers(world))
        shards = [
            replace(shard, plan=replace(shard.plan, header=replace(h, file_size=1 << 43)))
            for shard in job.shards
            for h in [shard.plan.header]
        ]
        job = replace(job, shards=shards if world.is_main else job.shards)
        Background(is_off=True).save(job, live)

    with pytest.raises(AssertionError, match=r"the disk is full"):
        ranks.run(2, work, dp_shard=2)
    assert [path.name for path in tmp_path.iterdir() if "checkpoint" in path.name] == []
