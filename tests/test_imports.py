"""What is loaded before it is needed: counted in modules, as seconds depend on the machine."""

import ast
import functools
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from project import Project
from source_trees import SRC, TREES

MARK = "loaded: "
DOTTED = r"surefoot(\.\w+)+(:\w+)?"
NO_MODULES = {"surefoot.json", "surefoot.id"}  # a file beside an upload, a tag of MLflow


def loaded_after(*parts):
    """Names of the modules that one fresh interpreter holds after each part of a program."""
    program = "\n".join(
        ["import sys", *(f"{part}\nprint('{MARK}', *sys.modules)" for part in parts)]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert len(found) == len(parts)
    return found


# Seconds on a quiet machine: torch 1.2, transformers 2.2 with what it takes along.
HEAVY = {"torch", "transformers", "numpy", "pyarrow", "peft", "datasets", "matplotlib"}


def test_help_needs_neither_recipes_nor_what_trains():
    asked = """
from surefoot.cli.main import main
try:
    main(["--help"])
except SystemExit as error:
    assert error.code == 0, error.code"""
    (loaded,) = loaded_after(asked)
    assert not loaded & (HEAVY | {"pydantic", "ruamel.yaml", "rich"})


@pytest.mark.parametrize(
    "module",
    [
        "surefoot.recipe.recipe",  # whoever has a typo in a recipe need not wait
        "surefoot.checkpoint.saving._writer",  # a second process on every machine that trains
        "surefoot.cli.ckpt.contents",
        "surefoot.plugins.board.command",
        "surefoot.plugins.board.app",
        "surefoot.plugins.cloud.mirror",
        "surefoot.training.callbacks._tracker_process",
    ],
)
def test_this_process_needs_no_torch(module):
    (loaded,) = loaded_after(f"import {module}")
    assert not loaded & {"torch", "transformers", "peft", "datasets", "matplotlib", "numpy"}


def test_every_name_of_ours_in_a_string_is_there():
    """What mypy and the imports do not see: ``"-m", "surefoot.x"`` and lazy exports."""
    names = {
        node.value
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(DOTTED, str(node.value))
    }
    assert "surefoot.checkpoint.saving._writer" in names
    for name in names - NO_MODULES:
        module, _, member = name.partition(":")
        assert find_spec(module), name
        assert not member or hasattr(import_module(module), member), name
    for file in TREES:
        if "lazy_getattr(" in (text := file.read_text()) and file.name == "__init__.py":
            package = import_module(".".join(("surefoot", *file.parent.relative_to(SRC).parts)))
            for name in package.__all__:
                assert getattr(package, name) is not None, (text[:80], name)


def test_a_wrong_recipe_is_refused_before_what_trains_is_loaded(tmp_path):
    (tmp_path / "recipe.yaml").write_text("train: {output_dirr: runs}\n")
    refused = f"""
from surefoot.cli.main import main
try:
    main(["train", {str(tmp_path / "recipe.yaml")!r}])
except SystemExit as error:
    assert error.code == 2, error.code"""
    (loaded,) = loaded_after(refused)
    assert not loaded & (HEAVY | {"surefoot.run.training_run", "rich"})


def test_what_starts_ranks_loads_nothing_that_trains(tmp_path):
    """It counts GPUs, for which it takes torch, only where nobody says how many ranks there are."""
    recipe = Project(tmp_path).recipe
    started = f"""
from surefoot.parallel import launcher
launcher.launch = lambda *_, **__: 0
from surefoot.cli.main import main
try:
    main(["train", {str(recipe)!r}, "parallel.num_processes=2"])
except SystemExit as error:
    assert error.code == 0, error.code"""
    (loaded,) = loaded_after(started)
    assert "surefoot.parallel.launcher" in loaded
    assert not loaded & HEAVY


IMPORT = "import surefoot.run.training_run"
ADAPTER = ["import peft"]
FIRST_STEP = """
from pathlib import Path
from surefoot.recipe.recipe import load
from surefoot.run.training_run import run
from surefoot.training.callback import TrainerCallback
class Stop(Exception):
    pass
class Stopping(TrainerCallback):
    def on_step_end(self, *_):
        raise Stop
try:
    run(load(Path({recipe!r})), callbacks=[Stopping()])
except Stop:
    pass"""
# What any training of a Llama takes; and beside it, what ours does.
NEEDED = """
import torch._dynamo, transformers.models.llama.modeling_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast"""
OWN = {"surefoot", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "ruamel"}
OWN |= {"click", "rich", "markdown_it", "pygments", "xxhash"}

# Of ours: other commands, the library's other uses, and processes that run beside.
LATER = tuple(
    f"surefoot.{name}"
    for name in (
        "use",
        "cli.",
        "storage.web",
        "run.goodput",
        "checkpoint.converting",
        "checkpoint.looking.diff",
        "checkpoint.looking.summary",
        "generate.live",
        "generate.likelihood",
        "training._reward_worker",
        "run._encoding_share",
    )
)


@pytest.fixture(scope="module")
def loaded_by(tmp_path_factory):
    """What is loaded by what any training takes, then by the import of ours; by what an adapter
    takes, if the method has one; and by the first step of a run."""

    @functools.cache
    def found(method):
        folder = tmp_path_factory.mktemp("project") / method
        project = Project(folder, method="full" if method == "full" else {"lora": {}})
        step = FIRST_STEP.format(recipe=str(project.recipe))
        return loaded_after(NEEDED, IMPORT, *(ADAPTER if method == "lora" else []), step)

    return found


def test_a_run_of_one_process_loads_no_way_that_it_may_not_go():
    # transformers itself takes torch.distributed.tensor and torch._dynamo with it.
    unused = {"pyarrow", "pandas", "peft", "datasets", "matplotlib", "tensorboard"}
    unused |= {"torch.distributed.pipelining", "torch.utils.tensorboard"}
    unused |= {"surefoot.plugins.trainers.from_trainer", "surefoot.plugins.trainers.pickles"}
    (loaded,) = loaded_after(IMPORT)
    assert not loaded & unused  # whatever its method


@pytest.mark.proof
@pytest.mark.parametrize("method", ["lora", "full"])
def test_nothing_else_is_loaded_up_to_the_first_step(loaded_by, method):
    needed, imported, *adapted, loaded = loaded_by(method)
    before = adapted[0] if adapted else imported
    more = (imported - needed) | (loaded - before)
    tops = {name.partition(".")[0] for name in more} - sys.stdlib_module_names
    assert tops - {name.partition(".")[0] for name in needed | (before - imported)} <= OWN
    deep = {name for name in more if name.startswith(("torch.", "transformers."))}
    assert len(deep) < 20, sorted(deep)  # a counter of operations, an attention for packed rows
    assert not {name for name in loaded if name.startswith(LATER)}
    plugins = {name for name in loaded if name.startswith("surefoot.plugins.")}
    # The options of MindSpore's folders, and what train.callbacks can be.
    named = {"plugin", "reading", "ranks", "tensor_layout", "saving"}
    assert {name.rpartition(".")[2] for name in plugins if name.count(".") > 2} == {
        "plugin"
    } | named
    assert not loaded & (HEAVY - {"torch", "transformers", "numpy", "peft"})


def waiting_policy(**environment):
    """What torch's OpenMP says of itself after ``import surefoot``, as one that is loaded then."""
    program = """
import ctypes, importlib.util, pathlib, surefoot
home = pathlib.Path(importlib.util.find_spec("torch").origin).parent
ctypes.CDLL(str(next((home / "lib").glob("libgomp*"))))"""
    unset = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    env = {**kept, "OMP_DISPLAY_ENV": "verbose", **environment}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return dict(re.findall(r"(OMP_WAIT_POLICY|GOMP_SPINCOUNT) = '(\w+)'", done.stderr))


@pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp on Linux")
def test_threads_soon_sleep_at_barriers_unless_the_environment_says_otherwise():
    assert waiting_policy()["GOMP_SPINCOUNT"] == "20000"
    assert waiting_policy(GOMP_SPINCOUNT="7")["GOMP_SPINCOUNT"] == "7"
    assert waiting_policy(OMP_WAIT_POLICY="PASSIVE")["GOMP_SPINCOUNT"] == "0"
