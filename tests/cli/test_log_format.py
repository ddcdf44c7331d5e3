"""``--log-format json``: all that a command writes for people is JSON lines, whoever writes it."""

import json
import os
import signal
import subprocess
import sys

import pytest

import commands
from project import Project, metrics, surefoot
from surefoot.cli.main import listed

JSON = ("--log-format", "json")
RECIPE = "model: {path: m}\ndata: {datasets: [d]}\ntrain: {output_dir: o, max_steps: 1}\n"


def messages(text):
    """The objects of all lines, each of which has what a collector needs."""
    found = [json.loads(line) for line in text.split("\n") if line]
    assert all({"time", "level", "message"} <= message.keys() for message in found)
    assert all(message["time"].endswith("Z") for message in found)
    return found


def events(found, event):
    return [message for message in found if message.get("event") == event]


def test_every_line_of_a_run_on_two_ranks_is_json(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich would draw a bar into a pipe
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    project = Project(tmp_path, parallel={"num_processes": 2}, train={"max_steps": 2})
    code, out, err = surefoot("train", project.recipe, *JSON)
    assert (code, out) == (0, "")
    found = messages(err)
    logged = [(m["step"], m["loss"]) for m in events(found, "log")]
    assert logged == [(row["step"], row["loss"]) for row in metrics(project.run)]
    assert [m["checkpoint"] for m in events(found, "save")] == [str(project.run / "checkpoint-2")]
    assert any(m["message"].startswith("trained: 2 steps") for m in found)
    assert not any("\x1b" in m["message"] for m in found)


WRONG = [
    ("train", "missing.yaml"),
    ("train", "wrong.yaml"),
    ("train", "right.yaml", "train.max_stps=1"),
    ("train",),
    ("recipe", "show", "wrong.yaml"),
    ("plan", "right.yaml", "--num-processes", "none"),
    ("trian", "right.yaml"),
    ("--nope", "train"),
]


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_users_mistake_is_one_line_of_level_error(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "right.yaml").write_text(RECIPE)
    (tmp_path / "wrong.yaml").write_text(RECIPE.replace("max_steps", "max_stps"))
    as_text = commands.run(*words)
    monkeypatch.setenv("SUREFOOT_LOG_FORMAT", "json")
    code, out, err = surefoot(*words)
    (message,) = messages(err)
    assert (code, out) == (as_text.exit_code, "")
    assert (message["level"], message["exit_code"]) == ("error", code)
    for line in message["message"].splitlines():
        assert line in as_text.stderr


@pytest.mark.parametrize("name", sorted({"train", "predict", "serve", "launch", "ckpt", "recipe"}))
def test_help_is_untouched(name):
    assert name in listed()
    assert commands.ok(name, "--help", *JSON) == commands.ok(name, "--help")


def test_the_result_of_a_command_stays_as_it_is(tmp_path):
    (tmp_path / "right.yaml").write_text(RECIPE)
    words = "recipe", "show", tmp_path / "right.yaml", "stage=sft"
    assert surefoot(*words, *JSON) == (0, commands.ok(*words), "")


def test_the_option_has_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("SUREFOOT_LOG_FORMAT", "json")
    code, _, err = surefoot("train", "missing.yaml", "--log-format", "text")
    assert (code, err[:7]) == (2, "error: ")


def test_a_format_that_is_not_there_is_refused():
    assert "'text', 'json'" in commands.refused("train", "x.yaml", "--log-format", "xml")


def written(code):
    """The messages of a program that writes JSON lines, and how it ended."""
    begin = "import os, subprocess, sys\nfrom surefoot import json_lines\n"
    begin += "json_lines.start((1, 2))\n"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    return done.returncode, messages(done.stdout), messages(done.stderr)


def test_a_line_is_json_whoever_has_written_it():
    code, out, err = written(
        "print('a reward')\n"
        'print(\'{"time": 1, "level": 1, "message": NaN}\')\n'
        "os.write(2, b'native \\xff\\n')\n"
        "subprocess.run(['sh', '-c', 'echo a child; echo >&2; echo error: its fault >&2'])\n"
        "print('10 %\\r20 %\\r100 %', file=sys.stderr)\n"
        "print('without an end', end='')\n"
    )
    shown = [(m["message"], m["level"], m["stream"]) for m in out]
    assert code == 0
    assert shown == [
        ("a reward", "info", "stdout"),
        ('{"time": 1, "level": 1, "message": NaN}', "info", "stdout"),
        ("a child", "info", "stdout"),
        ("without an end", "info", "stdout"),
    ]
    assert [m["message"] for m in err] == ["native \ufffd", "error: its fault", "100 %"]
    assert err[1]["level"] == "error"


def test_a_process_that_is_killed_leaves_whole_lines():
    code, out, _ = written("os.write(1, b'half a li')\nos.kill(os.getpid(), 9)\n")
    assert (code, [m["message"] for m in out]) == (-signal.SIGKILL, ["half a li"])


def test_a_crash_in_native_code_is_json():
    code, _, err = written("import faulthandler\nfaulthandler.enable()\nos.abort()\n")
    assert code == -signal.SIGABRT
    assert err[0]["message"] == "Fatal Python error: Aborted"


def test_a_fault_of_ours_is_one_line_with_its_traceback(tmp_path):
    code, _, err = written(
        "from surefoot.cli import main, recipe\n"
        "def broken(*words, **options): raise ZeroDivisionError('a bug')\n"
        "recipe.show.callback = broken\n"
        "main.main(['recipe', 'show', 'x.yaml', '--log-format', 'json'])\n"
    )
    (message,) = err
    assert (code, message["level"], message["message"]) == (1, "critical", "a bug")
    assert message["exception"].startswith("Traceback (most recent call last)")


def test_a_warning_of_another_package_has_its_level():
    code, _, err = written(
        "import logging, warnings\n"
        "from surefoot.log import configure\n"
        "configure(formatter=json_lines.Formatter())\n"
        "logging.getLogger('urllib3').warning('retrying %s', 'x')\n"
        "logging.getLogger('surefoot.x').info('y', extra={'fields': {'loss': float('nan')}})\n"
    )
    assert code == 0
    assert [(m["level"], m["logger"], m["message"]) for m in err] == [
        ("warning", "urllib3", "retrying x"),
        ("info", "surefoot.x", "y"),
    ]
    assert err[1]["loss"] == "nan"
