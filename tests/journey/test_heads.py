"""A run whose stage has a head saves, resumes and reshards it, and other tools never see it."""

import json
import os
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import surefoot
from each import some
from project import Project, checkpoints, in_child, losses
from surefoot.batch import Loss, OutputSpec
from surefoot.checkpoint.converting._resharding import reshard
from surefoot.checkpoint.layouts.detection import open_contents
from surefoot.checkpoint.sources import FolderSource, read_whole
from surefoot.checkpoint.verification import verify
from surefoot.cli.main import main
from surefoot.network.network import Network
from surefoot.parallel.sharding import Mesh
from surefoot.plugins.trainers.to_trainer import save_trainer_checkpoint
from surefoot.recipe.recipe import load
from surefoot.stages import SFT, STAGES
from surefoot.training.callback import TrainerCallback

METHODS = {"full": {"method": "full"}, "lora": {"method": {"lora": {"rank": 2}}}}
HEAD = "value_head/value_head.weight"
STEPS, SAVED = 7, 3


@dataclass(frozen=True, kw_only=True)
class Valued(SFT):
    """Likelihood, and a value of each token that is to be how likely it was."""

    heads = {"values": 1}
    spec = OutputSpec(("logps", "values"))
    eval_spec = spec

    def loss(self, role, outputs, batch):
        errors = (outputs.values - outputs.logps.detach().exp()).square()
        total = errors.sum() - outputs.logps.sum()
        return Loss(total, total.new_tensor(errors.numel()), {"error": errors.sum()})


@pytest.fixture(autouse=True)
def _stage(monkeypatch):
    monkeypatch.setitem(STAGES.own, "valued", Valued)


@dataclass
class Ends(TrainerCallback):
    """Ends the process by a signal after step 5, when step 3 has been saved."""

    signal: signal.Signals

    def on_step_end(self, args, state, control):
        if state.global_step == SAVED + 2:
            while not checkpoints(args.output_dir):
                time.sleep(0.01)
            os.kill(os.getpid(), self.signal)


def project(folder, **sections):
    train = {"max_steps": STEPS, "micro_batch_size": 1}
    sections = {"stage": "valued", "train": train, "checkpoint": {"save_steps": SAVED}, **sections}
    return Project(folder, **sections)


def contents(folder):
    """Every tensor of a checkpoint, whoever has written it, but for the random generators."""
    source = FolderSource(open_contents(folder))
    names = [name for name in source.shapes() if not name.startswith("state/")]
    return {name: read_whole(source, name) for name in names}


def assert_same(one, other):
    ours, theirs = contents(one), contents(other)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
    moments = "value_head_optimizer/value_head.weight.exp_avg"
    assert float(ours[HEAD].norm()) > 0 < float(ours[moments].norm())
    assert not [n for n in ours if "value_head" in n and n.startswith(("model/", "optimizer/"))]


def together(count, made, callbacks=(), **overrides):
    """The ranks of a run of ``count`` processes, forked, so that they know the stage."""
    overrides["parallel"] = {"num_processes": count, "dp_shard": count}
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    pids = []
    for rank in range(count):
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 1
            try:
                own = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank}
                os.environ.update(place, **{name: str(value) for name, value in own.items()})
                surefoot.train(made.recipe, callbacks=callbacks, **overrides)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run a method that nothing has ended; the last checkpoint of each."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STAGES.own, "valued", Valued)
        for name, method in METHODS.items():
            found[name] = project(tmp_path_factory.mktemp(name), **method)
            assert in_child(lambda name=name: surefoot.train(found[name].recipe)) == 0
    return found


@pytest.mark.parametrize("method", some(METHODS, ["lora"]))
def test_a_killed_run_resumes_with_its_head_bitwise(whole, method, tmp_path):
    made = project(tmp_path, **METHODS[method])
    kills = [Ends(signal.SIGKILL)]
    assert in_child(lambda: surefoot.train(made.recipe, callbacks=kills)) == -signal.SIGKILL
    assert len(checkpoints(made.run)) == 1
    assert in_child(lambda: surefoot.train(made.recipe)) == 0
    assert_same(checkpoints(made.run)[-1], checkpoints(whole[method].run)[-1])
    assert losses(made.run) == losses(whole[method].run)


@pytest.mark.proof  # tests/distributed does it in forked processes
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_resume_bitwise_and_one_goes_on_from_them(whole, method, tmp_path):
    spread = {"checkpoint": {"save_steps": SAVED, "layout": "distributed"}}
    ran, stopped = (project(tmp_path / n, **METHODS[method], **spread) for n in ("ran", "stopped"))
    assert together(2, ran) == [0, 0]
    assert together(2, stopped, [Ends(signal.SIGTERM)]) == [0, 0]
    newest = checkpoints(stopped.run)[-1]
    assert SAVED < int(newest.name.rpartition("-")[2]) < STEPS
    assert verify(newest, full=True).ok
    alone = project(tmp_path / "alone", **METHODS[method], **spread)
    changes = {"checkpoint.resume": str(newest)}
    assert in_child(lambda: surefoot.train(alone.recipe, **changes)) == 0
    assert together(2, stopped) == [0, 0]
    assert_same(checkpoints(stopped.run)[-1], checkpoints(ran.run)[-1])
    expected = contents(checkpoints(whole[method].run)[-1])
    for made in (alone, ran):
        found = contents(checkpoints(made.run)[-1])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_head_is_resharded(whole, tmp_path):
    saved = checkpoints(whole["full"].run)[-1]
    cut = reshard(saved, tmp_path / "cut", layout="distributed", mesh=Mesh(dp_shard=2)).path
    assert verify(cut, full=True).ok
    assert_same(cut, saved)


@pytest.mark.parametrize("method", some(METHODS, ["full"]))
def test_a_new_run_starts_with_the_head_of_the_model_it_opens(whole, method, tmp_path):
    saved = checkpoints(whole[method].run)[-1]
    is_adapter = method == "lora"
    section = {"adapter": str(saved)} if is_adapter else {"path": str(saved)}
    still = {"optim": {"adamw": {"learning_rate": 1e-30}}, **METHODS[method]}
    made = project(tmp_path, **still, model=section)
    if is_adapter:
        assert in_child(lambda: surefoot.train(made.recipe)) == 0
    else:
        assert together(2, made) == [0, 0]
    found = contents(checkpoints(made.run)[-1])
    assert torch.equal(found[HEAD], contents(saved)[HEAD])


@dataclass
class Keeps(TrainerCallback):
    """Keeps the network that is trained."""

    network: Network | None = None

    def on_train_begin(self, args, state, control):
        self.network = args.learner.network


def test_a_run_ends_with_the_head_of_the_best_checkpoint(tmp_path):
    first = {"greater_is_better": True, "load_best_model_at_end": True}  # losses sink
    train = {"max_steps": 4, "micro_batch_size": 2, "eval_steps": 2, **first}
    made, kept = project(tmp_path, train=train, data={"val_size": 4}), Keeps()
    made.sections["checkpoint"]["save_steps"] = 2
    made.write()
    state = surefoot.train(made.recipe, callbacks=[kept])
    assert state.best_global_step == 2
    best, last = (contents(folder)[HEAD] for folder in checkpoints(made.run))
    assert torch.equal(kept.network.heads.values.weight, best)
    assert not torch.equal(best, last)


def test_commands_list_it_and_other_tools_never_see_it(whole, tmp_path):
    saved = {name: checkpoints(made.run)[-1] for name, made in whole.items()}
    _, told = AutoModelForCausalLM.from_pretrained(saved["full"], output_loading_info=True)
    assert not told["unexpected_keys"]
    assert not told["missing_keys"]
    run = CliRunner().invoke
    for name, stem in (("full", "model"), ("lora", "adapter_model")):
        folder = saved[name]
        weights = load_file(folder / f"{stem}.safetensors")
        assert not [tensor for tensor in weights if "value_head" in tensor]
        shown = json.loads(run(main, ["ckpt", "show", str(folder), "--json"]).stdout)
        assert {"value_head", "value_head_optimizer"} <= {g["role"] for g in shown["groups"]}
        assert run(main, ["ckpt", "verify", str(folder)]).exit_code == 0
        before = str(checkpoints(whole[name].run)[0])
        told = run(main, ["ckpt", "diff", before, str(folder), "--json"]).stdout
        assert "value_head" in told
        told = run(main, ["export", str(folder), str(tmp_path / name)])
        assert "its value_head is not exported" in told.output
        assert {*Path(tmp_path / name).glob("*.safetensors")} == {
            tmp_path / name / "model.safetensors"
        }
    args = save_trainer_checkpoint(
        saved["full"], tmp_path / "trainer", run=load(whole["full"].recipe)
    )
    assert args
    moments = torch.load(tmp_path / "trainer" / "optimizer.pt", weights_only=True)
    assert len(moments["state"]) == len(load_file(saved["full"] / "model.safetensors"))
