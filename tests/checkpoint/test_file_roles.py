"""Every network of a run has files of its own; today's checkpoints keep every byte."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from damage import flip
from surefoot.checkpoint.converting._resharding import reshard
from surefoot.checkpoint.disk.folder import open_checkpoint
from surefoot.checkpoint.layouts.detection import open_contents
from surefoot.checkpoint.layouts.opening import open_folder
from surefoot.checkpoint.loading import load
from surefoot.checkpoint.looking.diff import compare_tensors, compare_values
from surefoot.checkpoint.looking.summary import summarise
from surefoot.checkpoint.saving.preparation import WriterGroup, save
from surefoot.checkpoint.state.roles import FileRole
from surefoot.checkpoint.state.states import FileState, UnshardedState
from surefoot.checkpoint.verification import verify
from surefoot.cli.main import main
from surefoot.errors import CheckpointError
from surefoot.parallel.sharding import Mesh

from .sample import Holder, same

# Of all files of these checkpoints as version 0.1 wrote them, without times and versions.
GOLDEN = {
    "full": "57fc4763c4679a92",
    "distributed": "0c7665db5ebe20d8",
    "adapter": "c91ed54ed788ded3",
    "resharded": "0ac6266be4247ece",
    "cast": "597ef33e538e8081",
}
FILES = {"value.safetensors", "value_optimizer.safetensors"}


def moments(weights):
    return {
        name: {"exp_avg": t.float() / 2, "exp_avg_sq": t.float() * 2, "step": torch.tensor(3.0)}
        for name, t in weights.items()
        if "0" not in name
    }


def model_states():
    weights = {f"model.layers.{i}.weight": torch.arange(24.0).reshape(6, 4) + i for i in range(3)}
    weights["model.norm.weight"] = torch.arange(4).bfloat16()
    random = {"torch": torch.arange(9, dtype=torch.uint8), "python": (3, (1, 2))}
    return {
        "model": Holder(weights),
        "optimizer": Holder(moments(weights)),
        "random": Holder(random),
        "trainer": Holder({"global_step": 7}),
    }


def filed(state):
    return FileState(UnshardedState(Holder(state)))


def value_states(change=0.0):
    weights = {
        "score.weight": torch.arange(4.0).reshape(1, 4) + change,
        "score.bias": torch.ones(3),
    }
    return {"value": filed(weights), "value_optimizer": filed(moments(weights))}


def digest(folder):
    found = hashlib.sha256()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.name == "manifest.json":
            told = json.loads(data)
            kept = {n: v for n, v in told.items() if n not in ("created", "versions", "seal")}
            data = json.dumps(kept, sort_keys=True).encode()
        found.update(path.relative_to(folder).as_posix().encode() + data)
    return found.hexdigest()[:16]


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path / "run", 7, {**model_states(), **value_states()})


def is_there(folder):
    """Whether the value network and all the rest can be loaded from ``folder``."""
    fresh, expected = {**model_states(), **value_states(9.0)}, {**model_states(), **value_states()}
    load(folder, fresh)
    return all(same(fresh[name].state_dict(), expected[name].state_dict()) for name in expected)


def test_checkpoints_of_one_network_are_what_they_were_to_the_byte(tmp_path):
    full = save(tmp_path / "full", 7, model_states(), max_shard_size=150)
    spread = {"layout": "distributed", "mesh": Mesh(dp_shard=3, tp=2)}
    found = {
        "full": full,
        "distributed": save(tmp_path / "b", 7, model_states(), writers=WriterGroup("distributed")),
        "adapter": save(tmp_path / "c", 7, model_states(), kind="adapter"),
        "resharded": reshard(full, tmp_path / "d", **spread).path,
        "cast": reshard(full, tmp_path / "e", dtype="bfloat16").path,
    }
    assert {name: digest(folder) for name, folder in found.items()} == GOLDEN


def test_a_second_network_has_files_of_its_own(saved):
    assert set(open_checkpoint(saved).manifest.files) > FILES
    assert load_file(saved / "value.safetensors").keys() == {"score.weight", "score.bias"}
    assert "score.weight.exp_avg" in load_file(saved / "value_optimizer.safetensors")
    assert not [n for n in load_file(saved / "state.safetensors") if "value" in n]
    assert is_there(saved)


def test_a_plain_state_stays_in_the_file_of_all_others(tmp_path):
    states = {**model_states(), "value": Holder({"score.weight": torch.ones(3)})}
    saved = save(tmp_path, 7, states)
    assert not FILES & set(open_checkpoint(saved).manifest.files)
    assert "value.score.weight" in load_file(saved / "state.safetensors")


def test_weights_that_its_optimizer_does_not_move_have_a_file_of_their_own(tmp_path):
    weights = {"frozen.0": torch.ones(64), "score": torch.ones(64)}
    states = {"value": filed(weights), "value_optimizer": filed(moments(weights))}
    saved = save(tmp_path, 7, {**model_states(), **states})
    first = saved / "value-00001-of-00002.safetensors"
    assert load_file(first).keys() == {"frozen.0"}
    assert (saved / "value.safetensors.index.json").exists()


@pytest.mark.parametrize("mesh", [Mesh(2, 1), Mesh(1, 3), Mesh(2, 2)], ids=str)
def test_it_is_resharded_like_the_model(mesh, saved, tmp_path):
    spread = reshard(saved, tmp_path / "spread", layout="distributed", mesh=mesh).path
    assert verify(spread, full=True).ok
    assert any(name.endswith("/value.safetensors") for name in summarise(spread).files)
    assert is_there(spread)
    back = reshard(spread, tmp_path / "back").path
    assert digest(back) == digest(reshard(saved, tmp_path / "again").path)


def test_a_cast_rounds_all_weights_and_no_optimizer(saved, tmp_path):
    cast = reshard(saved, tmp_path / "cast", dtype="bfloat16").path
    types = {name: t.dtype for name, t in load_file(cast / "value.safetensors").items()}
    assert set(types.values()) == {torch.bfloat16}
    moments_of = load_file(cast / "value_optimizer.safetensors")
    assert moments_of["score.weight.exp_avg"].dtype == torch.float32


def test_a_flipped_bit_in_it_is_found(saved):
    flip(saved / "value_optimizer.safetensors")
    report = verify(saved, full=True)
    assert not report.ok
    assert "value_optimizer" in report.problems[0]


def test_differences_are_told_by_role(saved, tmp_path):
    other = save(tmp_path / "other", 7, {**model_states(), **value_states(1.0)})
    odd = [change for change in compare_tensors(saved, other) if change.verdict != "equal"]
    assert {change.role for change in odd} == {"value", "value_optimizer"}
    only = list(compare_tensors(saved, other, roles=["model"]))
    assert {change.role for change in only} == {"model", "value"}
    assert not any(compare_values(saved, other).values())


def test_commands_show_it_and_a_model_is_written_without_it(saved, tmp_path):
    run = CliRunner().invoke
    shown = json.loads(run(main, ["ckpt", "show", str(saved), "--json"]).stdout)
    roles = [group["role"] for group in shown["groups"]]
    assert roles == ["model", "optimizer", "state", "value", "value_optimizer"]
    listed = json.loads(run(main, ["ckpt", "ls", str(saved.parent), "--json"]).stdout)
    assert listed[0]["problem"] is None
    assert run(main, ["ckpt", "verify", str(saved)]).exit_code == 0
    assert run(main, ["ckpt", "diff", str(saved), str(saved)]).exit_code == 0
    made = run(main, ["ckpt", "convert", str(saved), str(tmp_path / "dcp"), "--to", "dcp"])
    assert made.exit_code == 0, made.output
    assert not [name for name in open_folder(tmp_path / "dcp").shapes() if "score" in name]
    assert not [name for name in open_folder(saved).shapes() if "score" in name]
    assert "value/score.weight" in open_contents(saved).tensors


def test_names_that_files_cannot_have_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="'state' is the file of all other states"):
        save(tmp_path, 7, {**model_states(), "state": filed({})})


def test_a_checkpoint_without_it_says_so(tmp_path):
    saved = save(tmp_path, 7, model_states())
    with pytest.raises(
        CheckpointError,
        match=r"another value, with 0 tensors where this run has 2: missing in it: score.weight",
    ):
        load(saved, value_states(), only=["value"])
    with pytest.raises(CheckpointError, match="contains no state 'value_optimizer'"):
        load(saved, value_states(), only=["value_optimizer"])


def test_a_role_says_what_it_contains():
    assert [FileRole(n).optimizer for n in ("model", "value")] == ["optimizer", "value_optimizer"]
    assert FileRole("model", "adapter").stem == "adapter_model"
    assert FileRole("value", "adapter").stem == "value"
