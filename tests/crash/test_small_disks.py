"""A disk that is full, or has no inodes left, under commands that write: an error in a sentence,
nothing half written, and the same command works once there is room."""

import json
import shutil
import subprocess

import pytest
from click.testing import CliRunner

import surefoot
from disks import small_disk
from project import Project, assert_same, checkpoints, final_weights
from surefoot.checkpoint.verification import verify
from surefoot.cli.main import main

FULL, CROWDED = "size=64k", "size=64m,nr_inodes=6"
DISKS = {FULL: "the disk is full; free some", CROWDED: "the disk has no inodes left for more files"}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A finished run of an adapter."""
    made = Project(tmp_path_factory.mktemp("disks"), method="lora", train={"max_steps": 3})
    surefoot.train(made.recipe)
    return made


def said(*words):
    """The message of a command that ends with an error for people."""
    done = CliRunner().invoke(main, list(map(str, words)))
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    text = " ".join(done.output.split())
    assert "Traceback" not in text
    assert len(text) < 2000
    return text


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "options", [FULL, pytest.param(CROWDED, marks=pytest.mark.proof)], ids=["no space", "no inodes"]
)
@pytest.mark.parametrize("command", ["export", "convert"])
def test_what_is_written_elsewhere_leaves_nothing_on_a_full_disk(command, options, project):
    source = checkpoints(project.run)[-1]
    words = {
        "export": ["export", project.run],
        "convert": ["ckpt", "convert", source, "--to", "mindspore"],
    }[command]
    if command == "convert":  # of a full model: an adapter is none of MindSpore's
        words[2] = project.folder / "model"
    with small_disk(options) as disk:
        place = [*words[:3], disk / "out", *words[3:]]
        text = said(*place)
        assert DISKS[options] in text, text
        assert names(disk) == []
        subprocess.run(["mount", "-o", "remount,size=64m,nr_inodes=0", str(disk)], check=True)
        done = CliRunner().invoke(main, list(map(str, place)))
        assert done.exit_code == 0, done.output
        assert verify(disk / "out").ok


@pytest.mark.parametrize(
    "options", ["size=4k", pytest.param("size=64m,nr_inodes=1", marks=pytest.mark.proof)]
)
def test_answers_that_do_not_fit_are_said(options, project, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "hen " * 20}) + "\n" for _ in range(60)))
    with small_disk(options) as disk:
        words = ["predict", project.run, "--prompts", prompts, "--output", disk / "out.jsonl"]
        assert "the disk " in said(*words, "generate.max_new_tokens=2")


@pytest.mark.parametrize(
    "options", [FULL, pytest.param(CROWDED, marks=pytest.mark.proof)], ids=["no space", "no inodes"]
)
def test_a_run_on_a_full_disk_says_so_and_goes_on_when_there_is_room(options, project):
    with small_disk(options) as disk:
        words = ["train", str(project.recipe), f"train.output_dir={disk / 'run'}"]
        words.append(f"data.cache_dir={project.folder / 'cache'}")
        text = said(*words)
        assert DISKS[options] in text or "one checkpoint takes" in text, text
        assert not [path for path in checkpoints(disk / "run") if not verify(path).ok]
        subprocess.run(["mount", "-o", "remount,size=64m,nr_inodes=0", str(disk)], check=True)
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        assert_same(final_weights(disk / "run"), final_weights(project.run))
        shutil.rmtree(disk / "run")


@pytest.mark.proof
def test_however_many_inodes_are_left_a_run_ends_well_or_says_why(project):
    """From a disk on which not even the folder can be made to one on which all fits."""
    ended = []
    for inodes in range(2, 60, 3):
        with small_disk(f"size=64m,nr_inodes={inodes}") as disk:
            words = ["train", str(project.recipe), f"train.output_dir={disk / 'run'}"]
            words.append(f"data.cache_dir={project.folder / 'cache'}")
            done = CliRunner().invoke(main, words)
            assert done.exit_code in (0, 2), (inodes, done.output, done.exception)
            assert "Traceback" not in done.output, inodes
            ended.append(done.exit_code)
            assert not [path for path in checkpoints(disk / "run") if not verify(path).ok]
            subprocess.run(["mount", "-o", "remount,nr_inodes=0", str(disk)], check=True)
            assert CliRunner().invoke(main, words).exit_code == 0
            assert_same(final_weights(disk / "run"), final_weights(project.run))
    assert set(ended) == {0, 2}
