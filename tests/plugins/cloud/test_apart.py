"""Machines that have nothing in common but a bucket: what they saved, any others go on from."""

import random
import re
import signal
import threading
import time

import pytest
from click.testing import CliRunner
from peft import PeftModel
from transformers import AutoModelForCausalLM

from disks import small_disk
from project import Project, model_folder
from surefoot.checkpoint.verification import verify
from surefoot.cli.main import main

from .machines import Launch
from .stores import Bucket, point_at, request

OPTIM = {"adamw": {"learning_rate": 0.003, "schedule": "constant"}}
SAVES = "checkpoint.save_steps=2"
CLOSE = 2e-5  # of losses after some steps of Adam: sums in another order


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project") / "p"
    return Project(folder, optim=OPTIM, train={"max_steps": 6}, parallel={"dp_shard": 2})


class Fleet:
    """Launches of one project, each on machines that nobody has used before."""

    def __init__(self, project, bucket, folder):
        self.project, self.bucket, self.folder, self.count = project, bucket, folder, 0

    def launch(self, *overrides, ranks=(1, 1), places=None, **options):
        if places is None:
            self.count += 1
            places = [self.folder / f"{self.count}{name}" for name in "abcd"[: len(ranks)]]
        return Launch(self.project, self.bucket.url, places, ranks, SAVES, *overrides, **options)

    def run(self, *overrides, code=0, **options):
        launch = self.launch(*overrides, **options)
        codes = launch.wait()
        assert set(codes) == {code}, launch.logs()
        return launch


@pytest.fixture
def fleet(project, bucket, tmp_path):
    return Fleet(project, bucket, tmp_path)


@pytest.fixture(scope="module")
def whole(project, running, tmp_path_factory):
    """The losses of a run that nothing has disturbed, by step."""
    with pytest.MonkeyPatch.context() as patch:
        running.is_well()
        point_at(patch, running.port)
        return Fleet(project, Bucket(running.port), tmp_path_factory.mktemp("whole")).run().losses()


def stored(bucket):
    """The folders of committed checkpoints."""
    names = [name for name in bucket.names() if name.endswith("/manifest.json")]
    return {name.partition("/")[0] for name in names}


def test_two_machines_without_a_common_disk_and_two_others_go_on_to_the_bit(
    fleet, bucket, whole, tmp_path
):
    first = fleet.run("train.max_steps=4")
    assert f"saved {bucket.url}/checkpoint-4" in first.logs()
    second = fleet.run()
    assert second.losses() == whole
    names = {"checkpoint-2", "checkpoint-4", "checkpoint-6.launch-2"}
    assert stored(bucket) == names
    bucket.download(tmp_path / "copy")
    for name in names:  # whose bytes are all that the manifest says, for any reader
        copied = tmp_path / "copy" / name
        copied.rename(copied.with_name(name.partition(".")[0]))
        assert verify(copied.with_name(name.partition(".")[0]), full=True).ok
    url = f"{bucket.url}/checkpoint-6"
    assert CliRunner().invoke(main, ["ckpt", "verify", url]).exit_code == 0


def test_what_was_uploaded_and_not_committed_is_committed_by_the_next_launch(
    fleet, bucket, server, whole
):
    launch = fleet.launch()
    stop_at(server, launch, "PUT", r"/checkpoint-4/manifest\.json$", is_done=False)
    launch.wait()
    server.is_well()
    assert stored(bucket) == {"checkpoint-2"}
    second = fleet.run()
    assert "checkpoint-4 was uploaded but not committed" in second.logs()
    assert "resuming from checkpoint-4 at step 4" in second.logs()
    assert second.losses() == whole


@pytest.mark.proof
def test_a_report_that_is_damaged_is_named_and_the_one_before_is_taken(
    fleet, bucket, server, whole
):
    launch = fleet.launch()
    stop_at(server, launch, "PUT", r"/checkpoint-4/manifest\.json$", is_done=False)
    launch.wait()
    server.is_well()
    report = next(n for n in bucket.names() if n.startswith("checkpoint-4/.reports/00001"))
    damaged(bucket, report)
    second = fleet.run()
    assert "checkpoint-4 cannot be committed" in second.logs()
    assert "resuming from checkpoint-2 at step 2" in second.logs()
    assert second.losses() == whole


def stop_at(server, launch, method, pattern, *, is_done, machine=None, number=signal.SIGKILL):
    """Kill (or stop) a machine at the first request like this: before it is done, or after that,
    before its answer comes."""
    happened = threading.Event()

    def rule(request, path, _count):
        if happened.is_set() or request != method or not re.search(pattern, path):
            return None
        happened.set()
        launch.kill(machine, number)
        return "deaf" if is_done else "drop"

    server.rule = rule
    return happened


# Of the first launch; of the second one, which resumes, the last four. A request is stopped before
# it is done, or behind that.
POINTS = {
    "before a file of rank 0": ("PUT", r"/checkpoint-4/rank_00000/model", False),
    "after it": ("PUT", r"/checkpoint-4/rank_00000/model", True),
    "before a file of rank 1": ("PUT", r"/checkpoint-4/rank_00001/optimizer", False),
    "after it, as its last": ("PUT", r"/checkpoint-4/rank_00001/optimizer", True),
    "before the small files": ("PUT", r"/checkpoint-4/state\.json", False),
    "before the report of rank 1": ("PUT", r"/checkpoint-4/\.reports/00001", False),
    "after it, of rank 1": ("PUT", r"/checkpoint-4/\.reports/00001", True),
    "before the report of rank 0": ("PUT", r"/checkpoint-4/\.reports/00000", False),
    "after it, of rank 0": ("PUT", r"/checkpoint-4/\.reports/00000", True),
    "before the files of the run": ("PUT", r"/tiny/metrics\.jsonl", False),
    "before the commit": ("PUT", r"/checkpoint-4/manifest\.json", False),
    "after the commit": ("PUT", r"/checkpoint-4/manifest\.json", True),
    "in a deletion": ("DELETE", r"/checkpoint-2/manifest\.json", True),
    "behind a deletion": ("DELETE", r"/checkpoint-2/rank_00001/model", True),
}
RESUMING = {
    "before the claim": ("PUT", r"/\.launches/00002\.json", False),
    "after the claim": ("PUT", r"/\.launches/00002\.json", True),
    "in the outline": ("GET", r"/checkpoint-4/tokenizer\.json", False),
    "in the reading of tensors": ("GET", r"/checkpoint-4/rank_0000\d/optimizer", True),
}
MACHINES = {"all": None, "the first": 0, "the second": 1}
KILLED = pytest.mark.parametrize("machine", MACHINES)


def followed(fleet, bucket, server, whole):
    """New machines go on; no step that was committed is lost, and the bits are the same."""
    server.is_well()
    before = (
        max(int(re.findall(r"\d+", name)[0]) for name in stored(bucket)) if stored(bucket) else 0
    )
    last = fleet.run("checkpoint.keep=1")
    begun = re.findall(r"resuming from checkpoint-(\d+)", last.logs())
    assert all(int(step) >= before for step in begun)
    assert before == 0 or begun
    assert last.losses() == whole


def killed_at(fleet, server, machine, point):
    """Start a launch, and kill its machine or all of them at a point."""
    launch = fleet.launch("checkpoint.keep=1")
    method, path, is_done = point
    happened = stop_at(server, launch, method, path, is_done=is_done, machine=MACHINES[machine])
    assert set(launch.wait()) != {0}
    assert happened.is_set()


@pytest.mark.proof
@KILLED
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_of_a_save_others_go_on(fleet, bucket, server, whole, point, machine):
    killed_at(fleet, server, machine, POINTS[point])
    followed(fleet, bucket, server, whole)


@pytest.mark.proof
@KILLED
@pytest.mark.parametrize("point", RESUMING)
def test_killed_at_any_point_of_a_resume_others_go_on(fleet, bucket, server, whole, point, machine):
    fleet.run("train.max_steps=4")
    killed_at(fleet, server, machine, RESUMING[point])
    followed(fleet, bucket, server, whole)


@pytest.mark.proof
@pytest.mark.parametrize("point", [p for p, (method, *_) in POINTS.items() if method == "PUT"])
def test_what_is_stopped_and_taken_over_harms_nothing(fleet, bucket, server, whole, point):
    launch = fleet.launch("checkpoint.keep=1")
    method, path, is_done = POINTS[point]
    happened = stop_at(server, launch, method, path, is_done=is_done, number=signal.SIGSTOP)
    assert happened.wait(60)
    server.is_well()
    last = fleet.run("checkpoint.keep=1")
    assert last.losses() == whole
    names = stored(bucket)
    launch.kill(number=signal.SIGCONT)
    assert set(launch.wait()) & {1, 2}, launch.logs()
    assert names <= stored(bucket)
    code = CliRunner().invoke(main, ["ckpt", "verify", f"{bucket.url}/checkpoint-6"]).exit_code
    assert code == 0
    again = fleet.run("train.max_steps=6")
    assert "this run is complete" in again.logs()


def damaged(bucket, key):
    data = bytearray(bucket.get(key))
    data[-5] ^= 1
    bucket.put(key, bytes(data))


@pytest.mark.proof
@pytest.mark.parametrize(
    "file", ["rank_00001/optimizer.safetensors", "state.json", "manifest.json"]
)
def test_damage_that_one_rank_finds_is_damage_for_all(fleet, bucket, whole, file):
    fleet.run("train.max_steps=4")
    damaged(bucket, f"checkpoint-4/{file}")
    second = fleet.run()
    assert "checkpoint-4 is skipped" in second.logs()
    assert file in second.logs()
    assert "resuming from checkpoint-2 at step 2" in second.logs()
    assert second.losses() == whole
    steps = {name.partition(".")[0] for name in stored(bucket) if not name.endswith("-4")}
    assert steps == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}


@pytest.mark.proof
@pytest.mark.parametrize("counts", [[(2, 2), (1, 1), (1, 1, 1), (2, 2)], [(1, 1), (3,), (2, 1)]])
def test_any_number_of_machines_and_ranks_goes_on(bucket, server, tmp_path, counts):
    project = Project(
        tmp_path / "p", optim=OPTIM, train={"global_batch_size": 12, "micro_batch_size": 1}
    )
    fleet = Fleet(project, bucket, tmp_path)
    for number, ranks in enumerate(counts, 1):
        launch = fleet.run(f"train.max_steps={2 * number}", ranks=ranks)
    last = f"train.max_steps={2 * len(counts)}"
    alone = Fleet(project, Bucket(server.port), tmp_path / "alone").run(last, ranks=(1,))
    found, expected = launch.losses(), alone.losses()
    assert found.keys() == expected.keys()
    assert all(found[step] == pytest.approx(expected[step], abs=CLOSE) for step in expected)


ADAPTER = {"method": {"lora": {"rank": 2}}, "optim": OPTIM, "parallel": {"dp_shard": 2}}


@pytest.mark.proof
def test_an_adapter_is_one_file_that_peft_opens(bucket, server, tmp_path):
    project = Project(tmp_path / "p", **ADAPTER)
    fleet = Fleet(project, bucket, tmp_path)
    fleet.run("train.max_steps=2")
    bucket.download(tmp_path / "copy")
    copied = tmp_path / "copy" / "checkpoint-2"
    assert verify(copied, full=True).ok
    assert not list(copied.glob("rank_*/adapter_model.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "p" / "model")
    PeftModel.from_pretrained(base, copied)
    whole = Fleet(project, Bucket(server.port), tmp_path / "whole").run("train.max_steps=4")
    assert fleet.run("train.max_steps=4").losses() == whole.losses()


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["checkpoint.layout=full"], "leave it unset"),
        pytest.param(*(["train.push_to_hub=me/model"], "`surefoot push`"), marks=pytest.mark.proof),
    ],
)
def test_what_needs_a_common_folder_is_refused(fleet, overrides, why):
    launch = fleet.run(*overrides, code=2)
    assert "have no folder in common" in launch.logs()
    assert why in launch.logs()


@pytest.mark.proof
def test_the_best_weights_are_loaded_and_a_rollback_goes_back_on_all(bucket, tmp_path):
    evaluated = {"eval_steps": 2, "load_best_model_at_end": True, "max_steps": 6}
    optim = {"adamw": {"learning_rate": 0.5, "schedule": "constant"}}  # which diverges
    data = {"datasets": ["sums"], "eval_datasets": ["sums"]}
    project = Project(
        tmp_path / "p", optim=optim, train=evaluated, data=data, parallel={"dp_shard": 2}
    )
    launch = Fleet(project, bucket, tmp_path).run()
    best = re.search(r"best: checkpoint-(\d+)", launch.logs())
    assert best and int(best[1]) < 6


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [(1, 1), None], ids=["two machines", "one to four"])
@pytest.mark.parametrize("seed", range(4))
def test_killed_again_and_again_behind_a_bad_store(bucket, server, tmp_path, seed, ranks):
    """25 kills of one machine or all, at any request; each launch is on machines that nobody has
    used. Of 16 requests one fails, is cut off, or is done without an answer."""
    sizes = {"global_batch_size": 12, "micro_batch_size": 1, "max_steps": 40}
    project = Project(tmp_path / "p", optim=OPTIM, train=sizes)
    fleet, rng = Fleet(project, bucket, tmp_path), random.Random(seed)
    for _ in range(25):
        chosen = ranks or rng.choice([(1,), (1, 1), (2, 1), (1, 1, 1), (1, 1, 1, 1)])
        launch = fleet.launch("checkpoint.keep=2", ranks=chosen)
        server.is_well()
        server.rule = bad(rng, launch, rng.choice([None, *range(len(chosen))]))
        if set(launch.wait()) == {0}:
            break  # it was faster
    server.rule = bad(rng)
    last = fleet.run("checkpoint.keep=2", ranks=ranks or (2, 1))
    server.is_well()
    alone = Fleet(project, Bucket(server.port), tmp_path / "alone").run(ranks=ranks or (1,))
    found, expected = last.losses(), alone.losses()
    assert found.keys() == expected.keys()
    allowed = 0.0 if ranks else 20 * CLOSE
    assert all(abs(found[step] - expected[step]) <= allowed for step in expected)


def bad(rng, launch=None, machine=None):
    """A rule by which requests fail, and a launch is killed at one of them."""
    last = rng.randint(1, 150)

    def rule(_method, _path, count):
        if launch is not None and count == last:
            launch.kill(machine)
        return rng.choice([None] * 45 + [503, "drop", "deaf"])

    return rule


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [(1, 1), (1, 1, 1), (2, 2)])
def test_a_rank_reads_and_sends_what_is_its_own(bucket, tmp_path, ranks):
    model = {"hidden_size": 512, "intermediate_size": 2048}
    sizes = {"global_batch_size": 12, "micro_batch_size": 1}
    project = Project(tmp_path / "p", optim=OPTIM, train=sizes)
    model_folder(tmp_path / "p" / "model", **model)
    fleet = Fleet(project, bucket, tmp_path)
    fleet.run("train.max_steps=2")
    logs = fleet.run("train.max_steps=4", ranks=ranks).logs()
    figures = re.findall(
        r"checkpoint-2: ([\d.]+) (\w+) of its tensors are needed here, ([\d.]+) \2", logs
    )
    assert len(figures) == 1, logs  # rank 0 logs
    needed, came = float(figures[0][0]), float(figures[0][2])
    assert came <= 1.05 * needed


@pytest.mark.proof
def test_a_machine_without_permission_ends_the_save_of_all_with_its_reason(fleet, server):
    launch = fleet.launch()
    server.rule = lambda method, path, _count: (
        403 if method == "PUT" and "/rank_00001/" in path else None
    )
    codes = launch.wait()
    assert 2 in codes
    assert "no permission" in launch.logs()
    server.is_well()


@pytest.mark.proof
@pytest.mark.parametrize("late", [86400, -86400], ids=["a day late", "a day early"])
def test_a_machine_whose_clock_is_wrong_loses_nothing(fleet, bucket, whole, late):
    kept = ["checkpoint.keep=1", "checkpoint.keep_hours=1"]
    fleet.run("train.max_steps=4", *kept, late=late)
    assert stored(bucket) == {"checkpoint-2", "checkpoint-4"}
    second = fleet.run(*kept, late=-late)
    assert "resuming from checkpoint-4 at step 4" in second.logs()
    assert second.losses() == whole


@pytest.mark.proof
def test_a_bucket_that_keeps_versions_serves_as_well(fleet, bucket, server, whole):
    body = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    request(server.port, "PUT", f"/{bucket.name}?versioning", body)
    fleet.run("train.max_steps=4", "checkpoint.keep=1")
    assert stored(bucket) == {"checkpoint-4"}
    assert b"checkpoint-2/" in request(server.port, "GET", f"/{bucket.name}?versions")
    assert fleet.run("checkpoint.keep=1").losses() == whole


@pytest.mark.proof
def test_a_full_disk_on_one_machine_fails_the_save_of_all_and_no_step_is_lost(
    fleet, bucket, whole, tmp_path
):
    places = [tmp_path / "wide", tmp_path / "narrow"]
    with small_disk("size=400k") as disk:
        places[1].symlink_to(disk)
        launch = fleet.launch(places=places)
        codes, logs = launch.wait(), launch.logs()
        assert 2 in codes, logs
        assert re.search(r"cannot save .*the disk is full", logs), logs
        assert "Traceback" not in logs
        committed = stored(bucket)
        places[1].unlink()
    last = fleet.run(places=[places[0], tmp_path / "another"])
    if committed:
        assert "resuming from" in last.logs()
    assert last.losses() == whole


@pytest.mark.proof
def test_a_launch_on_the_same_machines_waits_for_what_they_upload(fleet, server, whole):
    """Those that train are killed, and those that write for them live, and upload slowly."""
    launch, began = fleet.launch("checkpoint.save_steps=4"), set()

    def rule(method, path, _count):
        if method == "PUT" and (match := re.search(r"/checkpoint-4/(rank_0000\d)/", path)):
            began.add(match[1])
            if len(began) == 2:
                for process in launch.ranks:
                    process.kill()
            time.sleep(1)

    server.rule = rule
    launch.wait()
    assert len(began) == 2
    second = fleet.run(places=launch.places)
    assert "resuming from checkpoint-4 at step 4" in second.logs()
    assert second.losses() == whole


@pytest.mark.proof
def test_weights_that_do_not_change_are_copied_inside_the_store(bucket, server, tmp_path):
    project = Project(
        tmp_path / "p", optim=OPTIM, method={"freeze": {"num_layers": 1}}, parallel={"dp_shard": 2}
    )
    fleet = Fleet(project, bucket, tmp_path)
    fleet.run("train.max_steps=4")
    assert {path.split("/")[-2] for path in server.copied} == {"rank_00000", "rank_00001"}
    bucket.download(tmp_path / "copy")
    assert verify(tmp_path / "copy" / "checkpoint-4", full=True).ok
    second = fleet.run("train.max_steps=6")
    whole = Fleet(project, Bucket(server.port), tmp_path / "whole").run("train.max_steps=6")
    assert second.losses() == whole.losses()


@pytest.mark.proof
def test_a_server_that_cannot_copy_gets_the_bytes(bucket, server, tmp_path):
    project = Project(
        tmp_path / "p", optim=OPTIM, method={"freeze": {"num_layers": 1}}, parallel={"dp_shard": 2}
    )
    server.is_strict = server.cannot_copy = True
    launch = Fleet(project, bucket, tmp_path).run("train.max_steps=4")
    assert "are uploaded with each checkpoint" in launch.logs()
    assert (bucket.committed(), server.refused) == ([2, 4], [])


@pytest.mark.proof
def test_ranks_that_are_dealt_to_machines_in_turn_find_the_outline_of_their_machine(
    bucket, server, tmp_path
):
    sizes = {"global_batch_size": 12, "micro_batch_size": 1}
    fleet = Fleet(Project(tmp_path / "p", optim=OPTIM, train=sizes), bucket, tmp_path)
    fleet.run("train.max_steps=2", ranks=(2, 2))
    cyclic = fleet.run("train.max_steps=4", ranks=(2, 2), is_cyclic=True)
    assert "resuming from checkpoint-2 at step 2" in cyclic.logs()


@pytest.mark.proof
@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_one_machine_has_saved_and_not_uploaded_counts_if_it_is_sound(
    bucket, server, tmp_path, is_damaged
):
    fleet = Fleet(Project(tmp_path / "p", optim=OPTIM), bucket, tmp_path)
    place = tmp_path / "here"
    first = fleet.run("train.max_steps=4", ranks=(1,), places=[place])
    for name in [name for name in bucket.names() if name.startswith("checkpoint-4/")]:
        bucket.delete(name)  # as if the machine had no network
    if is_damaged:
        path = first.folder() / "checkpoint-4" / "rank_00000" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    second = fleet.run("train.max_steps=6", places=[place, tmp_path / "there"])
    step = 2 if is_damaged else 4
    assert f"resuming from checkpoint-{step} at step {step}" in second.logs()
