"""How large the house may be: code by room, and the modules that a run enters."""

import subprocess
import sys
import threading
import tomllib

import pytest

import budget
import slow
from project import Project
from surefoot.recipe import recipe as recipes
from surefoot.run.training_run import run
from surefoot.training.callback import TrainerCallback

SINCE = "62f92f87"  # the commit with which it begins
RAISED = "63f7af35"  # one before it that raised ceilings beside other changes


def test_no_room_has_more_code_than_its_ceiling():
    found = budget.counted()
    over = {name for name, room in budget.rooms().items() if found[name] > room["ceiling"]}
    assert not over, f"\n{budget.table()}\nover its ceiling: {sorted(over)}"


def ceilings(commit):
    """The numbers of the budget at a commit, by their place."""
    text = git("show", f"{commit}:tests/budget.toml")
    tables = tomllib.loads(text)
    found = {name: room["ceiling"] for name, room in tables["rooms"].items()}
    return found | {f"entered {key}": count for key, count in tables["entered"].items()}


def git(*arguments):
    command = ["git", "-C", str(budget.PROJECT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def raised_beside(commits):
    """Those of ``commits`` (A..B) that raise a number of the budget and change something else."""
    found = []
    for commit in git("rev-list", "--no-merges", commits, "--", "tests/budget.toml").split():
        before, after = ceilings(f"{commit}^"), ceilings(commit)
        changed = git("show", "--name-only", "--format=", commit).split()
        is_raised = any(count > before.get(name, count) for name, count in after.items())
        if is_raised and changed != ["tests/budget.toml"]:
            found.append(git("log", "-1", "--format=%h %s", commit).strip())
    return found


def test_a_ceiling_is_raised_by_a_commit_of_its_own():
    """Of the 190 commits that had touched the budget before, 101 raised a number, 6 of them
    alone."""
    try:
        git("cat-file", "-e", f"{SINCE}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a copy without the history")
    assert raised_beside(f"{SINCE}..HEAD") == []
    assert len(raised_beside(f"{RAISED}^..{RAISED}")) == 1


def test_what_the_fast_lane_leaves_out_is_there():
    names = slow.LIST.read_text().split()
    assert [name for name in names if not (slow.TESTS / name).exists()] == []


class Trace(TrainerCallback):
    """The modules of ours whose functions are called: in the whole run, a step, a save."""

    def __init__(self):
        self.whole, self.step, self.save = set(), set(), set()
        self.parts = [self.whole]

    def called(self, frame, event, argument):
        if event == "call":
            name = frame.f_code.co_filename
            for part in self.parts:
                part.add(name)

    def on_step_begin(self, args, state, control):
        self.parts = [self.whole, self.step]

    def on_step_end(self, args, state, control):
        self.parts = [self.whole, self.save] if state.global_step == 2 else [self.whole]

    def on_save(self, args, state, control):
        self.parts = [self.whole]

    def counts(self):
        own = str(budget.SOURCE)
        parts = {"run": self.whole, "step": self.step, "save": self.save}
        return {k: len({n for n in found if n.startswith(own)}) for k, found in parts.items()}


def test_a_run_a_step_and_a_save_enter_no_more_modules_than_before(tmp_path):
    trace = Trace()
    first, project = (
        Project(tmp_path / name, train={"max_steps": 2}, checkpoint={"save_steps": 2},
                data={"cache_dir": str(tmp_path / name / "cache")})
        for name in ("first", "traced")
    )  # fmt: skip
    run(recipes.load(first.recipe))  # what is imported or computed once a process, is by now
    threading.setprofile(trace.called)
    sys.setprofile(trace.called)
    try:
        run(recipes.load(project.recipe), callbacks=[trace])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    found, ceilings = trace.counts(), budget.entered()
    assert {key: count for key, count in found.items() if count > ceilings[key]} == {}, found


def test_reading_a_recipe_opens_the_recipe(tmp_path):
    project = Project(tmp_path)
    recipes.load(project.recipe)  # what Python itself opens, it opens once
    opened = Opened()
    sys.addaudithook(opened.note)
    recipes.load(project.recipe)
    opened.is_noting = False  # a hook stays to the end of the process
    assert opened.names == [str(project.recipe)]


class Opened:
    """The files that this process opens."""

    def __init__(self):
        self.is_noting, self.names = True, []

    def note(self, event, arguments):
        if self.is_noting and event == "open":
            self.names.append(str(arguments[0]))
