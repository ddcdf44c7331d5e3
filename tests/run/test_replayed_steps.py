"""Steps that are computed again are those of the run to the bit, or it is said what differs; the
run is only read."""

import json
import shutil
import signal
import subprocess
import time
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import surefoot
from project import Project, metrics, start
from project import surefoot as command
from stage_data import DATASETS, SETTINGS, written
from surefoot.cli.main import main
from surefoot.methods import METHODS
from surefoot.run.surroundings import launches_in
from surefoot.run.training_run import LoopFollower
from surefoot.stages import STAGES
from surefoot.training import TrainerCallback

PROOF = pytest.mark.proof
LORA = {"lora": {"rank": 2, "dropout": 0.1}}
METHOD = {"lora": LORA, "badam": {"badam": {"switch_interval": 2}}, "full": "full"}


def replayed(run, *words):
    done = CliRunner().invoke(main, ["replay", str(run), *map(str, words)])
    assert not done.exception or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


def seen(run):
    """Names, sizes, times, and bytes of all below a folder, and how many names files have."""
    paths = sorted([run, *run.rglob("*")])
    return [
        (p, s.st_size, s.st_mtime_ns, s.st_nlink, p.read_bytes() if p.is_file() else None)
        for p in paths
        for s in [p.stat()]
    ]


def trained(folder, **sections):
    project = Project(folder, **{"checkpoint": {"save_steps": 4, "keep": None}, **sections})
    project.sections["train"] |= {"max_steps": 8}
    project.write()
    surefoot.train(project.recipe)
    return project


def assert_replays(run, words, num_lines, begins="checkpoint-4"):
    code, said = replayed(run, *words)
    assert code == 0, said
    assert f"replayed from {begins}: " in said
    assert f"{num_lines} logged lines: equal to the bit" in said
    return said


CASES = {
    "sft, lora, padded with dropout": {"method": LORA, "data": {"packing": False}},
    "dpo, full": {"method": "full", "stage": "dpo", "data": {"datasets": ["pairs"]}},
    "grpo, badam": {"method": METHOD["badam"], "stage": written("grpo")},
}


@pytest.mark.parametrize("name", CASES)
def test_a_replay_is_the_log_and_the_next_checkpoint_and_only_reads(name, tmp_path):
    project = trained(tmp_path, **CASES[name])
    before = seen(project.run)
    said = assert_replays(project.run, ["--step", 6, "--to", 8], 4)
    assert "checkpoint-8: " in said
    assert "tensors: equal to the bit" in said.replace("checkpoint-8: ", "")
    assert_replays(project.run, ["--step", 2, "--to", 4], 4, "the beginning of the run")
    assert seen(project.run) == before
    assert sorted(p.name for p in tmp_path.iterdir() if ".part" in p.name) == []


@PROOF
@pytest.mark.parametrize("method", [name for name in METHODS.own if name in METHOD])
@pytest.mark.parametrize("stage", STAGES.own)
def test_every_stage_and_method_is_replayed(stage, method, tmp_path):
    reward = "reward" in SETTINGS.get(stage, {})
    settings = written(stage) if reward else {stage: SETTINGS.get(stage, {})}
    data = {"datasets": [DATASETS.get(stage, "sums")]}
    project = trained(tmp_path, stage=settings, method=METHOD[method], data=data)
    said = assert_replays(project.run, ["--step", 7, "--to", 8], 4)
    assert "tensors: equal to the bit" in said


@PROOF
@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"streaming": True, "buffer_size": 8}},
        {"train": {"eval_steps": 2}, "data": {"val_size": 4}},
        {"train": {"log_minutes": 0.001, "log_steps": None}},
    ],
    ids=["streamed", "evaluated", "logged by the clock"],
)
def test_other_runs_are_replayed(sections, tmp_path):
    project = trained(tmp_path, method=LORA, **sections)
    code, said = replayed(project.run, "--step", 5, "--to", 8)
    assert code == 0, said
    assert "tensors: equal to the bit" in said


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    return trained(folder, method=LORA, train={"log_steps": 3})


@pytest.fixture
def copy(project, tmp_path):
    """The run in another folder, to be changed."""
    return shutil.copytree(project.run, tmp_path / "run")


def test_nothing_to_compare_is_not_equal(project):
    code, said = replayed(project.run, "--step", 5)
    assert code == 1
    assert "nothing was compared" in said
    assert "the next line is of step 6: add --to 6" in said
    assert "equal to the bit" not in said


def test_a_planted_figure_is_found(copy):
    lines = metrics(copy)
    lines[1]["grad_norm"] *= 1 + 1e-7
    (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, said = replayed(copy, "--step", 6, "--to", 8)
    assert code == 1
    assert "equal up to rounding: largest difference 1e-07 of grad_norm, first at step 6" in said
    assert "nothing that is recorded is other than" in said


def test_another_seed_and_another_row_are_found(copy, project):
    recipe = copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("seed: 42", "seed: 43"))
    code, said = replayed(copy, "--step", 2, "--to", 4)
    assert code == 1
    assert "step 3 is the first that differs" in said
    assert "loss: logged " in said
    shutil.copy(project.run / "recipe.yaml", recipe)
    rows = project.folder / "data" / "sums.jsonl"
    text = rows.read_text()
    rows.write_text(text.replace("It is 3.", "It is 4."))
    try:
        code, said = replayed(copy, "--step", 2, "--to", 4)
    finally:
        rows.write_text(text)
    assert code == 1
    assert "step 3 is the first that differs" in said
    assert "training rows changed" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "0"], "0 is not in the range"),
        (["--step", "9"], "is at step 8, so there is no step 9 to replay"),
        (["--step", "6", "--to", "4"], "--to 4 is before --step 6"),
    ],
)
def test_steps_that_are_not_there_are_refused(words, message, project):
    code, said = replayed(project.run, *words)
    assert code == 2
    assert message in said


def test_other_folders_are_refused_by_name(project, tmp_path):
    code, said = replayed(project.run / "checkpoint-4", "--step", "2")
    assert (code, "is a checkpoint; name the folder of its run" in said) == (2, True)
    assert "no such folder" in replayed(tmp_path / "none", "--step", "2")[1]
    assert "not the folder of a run" in replayed(tmp_path, "--step", "2")[1]
    (tmp_path / "trainer_log.jsonl").write_text("{}\n")  # of LLaMA-Factory, which trains by it
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text('{"global_step": 3}')
    (tmp_path / "checkpoint-3" / "optimizer.pt").write_bytes(b"")
    (tmp_path / "checkpoint-3" / "model.safetensors").write_bytes(b"")
    assert "a run of the Hugging Face Trainer" in replayed(tmp_path, "--step", "2")[1]


def test_what_a_server_sampled_is_refused(copy):
    recipe = copy / "recipe.yaml"
    text = recipe.read_text().partition("stage:")[0]
    rest = recipe.read_text().partition("train:")[2]
    stage = written("grpo")["grpo"] | {"sampler": {"vllm": {"url": "http://127.0.0.1:9"}}}
    recipe.write_text(f"{text}stage: {json.dumps({'grpo': stage})}\ntrain:{rest}")
    code, said = replayed(copy, "--step", 2)
    assert code == 2
    assert "stage.grpo.sampler: a server has sampled the responses" in said


def test_a_run_that_did_not_record_its_surroundings_is_replayed_all_the_same(copy):
    rows = (copy / "launches.jsonl").read_text().splitlines()
    kept = [line for line in rows if '"surroundings"' not in line]
    assert len(kept) < len(rows)
    (copy / "launches.jsonl").write_text("".join(f"{line}\n" for line in kept))
    said = assert_replays(copy, ["--step", 6, "--to", 8], 2)
    assert "has not recorded its surroundings" in said
    (copy / "launches.jsonl").unlink()
    assert_replays(copy, ["--step", 6, "--to", 8], 2)


def test_without_a_checkpoint_before_and_not_from_the_seed_it_is_refused(project, tmp_path):
    later = tmp_path / "later"
    surefoot.train(
        project.recipe,
        **{"train.output_dir": str(later), "checkpoint.resume": str(project.run / "checkpoint-4")},
    )
    assert_replays(later, ["--step", 5, "--to", 8], 2)  # from the other run
    code, said = replayed(later, "--step", 3)
    assert code == 2
    assert "has not begun from its seed: it began from" in said
    assert "has later steps" in said


def test_a_damaged_checkpoint_is_skipped(copy):
    (copy / "checkpoint-4" / "state.safetensors").write_bytes(b"damaged")
    assert_replays(copy, ["--step", 6], 2, "the beginning of the run")


def test_each_launch_is_replayed_in_its_own_settings(tmp_path):
    """From a checkpoint before the change: its micro-batches, then those of the next launch."""
    project = trained(tmp_path, method=LORA)
    shutil.rmtree(project.run)
    sizes = {"train.max_steps": 8, "train.micro_batch_size": 4}
    project.sections["train"]["max_steps"] = 8
    project.write()

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control):
            if state.global_step == 5:
                control.stop_signal = signal.SIGTERM

    surefoot.train(project.recipe, callbacks=[Stop()])
    surefoot.train(project.recipe, **sizes)
    shutil.rmtree(project.run / "checkpoint-5")
    first, second = launches_in(project.run)
    assert (first.settings["train.micro_batch_size"], first.reached) == (2, 5)
    assert (second.settings["train.micro_batch_size"], second.start) == (4, 5)
    said = assert_replays(project.run, ["--step", 6, "--to", 8], 4)
    assert "tensors: equal to the bit" in said


def test_a_killed_replay_leaves_nothing_in_the_run_and_the_next_one_cleans_up(tmp_path):
    project = trained(tmp_path, method=LORA)
    before = seen(project.run)
    process = start("replay", project.run, "--step", "2", "--to", "8")
    found = []
    while not found and process.poll() is None:
        found = list(tmp_path.glob(".run.replay.*.part/*"))
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert found
    assert list(tmp_path.glob(".run.replay.*.part"))
    assert seen(project.run) == before
    assert_replays(project.run, ["--step", 6], 2)
    assert not list(tmp_path.glob(".run.replay.*.part"))


def test_of_a_run_that_trains_the_checkpoints_are_held(tmp_path):
    project = trained(tmp_path, method=LORA)

    class Prune(TrainerCallback):
        said = None

        def on_step_end(self, args, state, control):
            if state.global_step == 9:
                process = start("replay", project.run, "--step", "5", "--to", "8")
                # written once both are held
                while process.poll() is None and not list(tmp_path.glob(".run.replay.*/rows.xxh")):
                    time.sleep(0.001)
                for step in (4, 8):
                    shutil.rmtree(project.run / f"checkpoint-{step}")
                Prune.said = process.communicate()[0]

    surefoot.train(project.recipe, callbacks=[Prune()], **{"train.max_steps": 10})
    assert "4 logged lines: equal to the bit" in Prune.said
    assert "tensors: equal to the bit" in Prune.said


def test_another_processor_is_named(project, monkeypatch):
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    words = ("replay", project.run, "--step", "6", "--to", "8")
    code, said, errors = command(*words, popen=subprocess.Popen)
    assert code == 1, errors
    assert "tensors: equal up to rounding: " in said
    assert "other than in launch 1, which computed these steps: processor: " in said
    assert "ATEN_CPU_CAPABILITY: not set -> default" in said


def test_a_resume_says_what_has_changed_and_what_that_means(project, tmp_path, caplog):
    caplog.set_level("INFO")
    copied = shutil.copytree(project.run, tmp_path / "run")
    shutil.rmtree(copied / "checkpoint-8")
    surefoot.train(copied)
    assert "changed since step 4: nothing that bits depend on; from here on equal to the bit" in (
        caplog.text
    )
    shutil.rmtree(copied / "checkpoint-8")
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr("surefoot.run._launch.hash_of_code", lambda: "another")
        surefoot.train(copied)
    line = "changed since step 4: Surefoot's code changed; from here on equal up to rounding only"
    assert line in caplog.text
    *_, last = launches_in(copied)
    assert last.surroundings["changed"] == ["Surefoot's code changed"]
    assert (copied / "checkpoint-8").exists()


MESHES = [{"num_processes": 2}]
MESHES += [pytest.param({axis: 2}, marks=PROOF, id=axis) for axis in ("dp_shard", "tp", "pp")]


@pytest.mark.parametrize("mesh", MESHES)
def test_two_ranks_are_replayed_on_two(mesh, tmp_path):
    project = Project(tmp_path, method=LORA, parallel=mesh)
    project.sections["train"]["max_steps"] = 4
    project.sections["checkpoint"]["save_steps"] = 2
    project.write()
    code, _, errors = command("train", project.recipe)
    assert code == 0, errors
    code, said, errors = command("replay", project.run, "--step", "3", "--to", "4")
    assert code == 0, said + errors
    assert "2 logged lines: equal to the bit" in said
    assert "tensors: equal to the bit" in said


class ShortOfMemory(LoopFollower):
    """Memory does not suffice for the first pass of a step."""

    def follow(self, loop):
        def check(module, inputs, output):
            if loop.state.global_step == 5 and not loop.state.fitted.micro_batch_size:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to")

        loop.policy.network.inner.get_decoder().register_forward_hook(check)


class Poisoned(LoopFollower):
    """The window with this index has a loss that is not a number."""

    def follow(self, loop):
        compute, stage = loop.policy.step.run_window, loop.windows

        def run_window(window, *given, **named):
            losses = compute(window, *given, **named)
            if stage._turn.place == (0, 5):
                losses[0] = replace(losses[0], total=losses[0].total * float("nan"))
            return losses

        loop.policy.step.run_window = run_window


@pytest.mark.parametrize(
    ("planted", "option"),
    [(ShortOfMemory(), {}), (Poisoned(), {"on_nan": "rollback"})],
    ids=["split memory", "rollback"],
)
def test_what_a_run_has_met_after_a_checkpoint_is_known_to_its_replay(planted, option, tmp_path):
    project = Project(tmp_path, method=LORA, train={"max_steps": 8, **option})
    project.sections["checkpoint"] = {"save_steps": 4, "keep": None}
    project.write()
    surefoot.train(project.recipe, callbacks=[planted])
    last = project.run / "checkpoint-8" / "state.json"
    state = json.loads(last.read_text())["trainer"]
    assert state["fitted"]["micro_batch_size"] or state["skipped_windows"]
    said = assert_replays(project.run, ["--step", 5, "--to", 8], 4)
    assert "tensors: equal to the bit" in said
