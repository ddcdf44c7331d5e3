"""What is loaded before it is needed: counted in modules, as seconds depend on the machine."""

import subprocess
import sys

import pytest

from project import Project


def loaded_after(code):
    """Names of the modules that a fresh interpreter holds after ``code``."""
    program = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


# Seconds on a quiet machine: torch 1.2, transformers 2.2 with what it takes along.
HEAVY = {"torch", "transformers", "numpy", "pyarrow", "peft", "datasets", "matplotlib"}


def test_help_needs_neither_recipes_nor_what_trains():
    asked = """
from surefoot.cli.main import main
try:
    main(["--help"])
except SystemExit as error:
    assert error.code == 0, error.code"""
    assert not loaded_after(asked) & (HEAVY | {"pydantic", "ruamel.yaml", "rich"})


def test_a_recipe_is_read_without_torch():
    # Its sections hold torch's types in their methods; whoever has a typo in one need not wait.
    assert not loaded_after("import surefoot.recipe.recipe") & (HEAVY | {"rich"})


def test_a_wrong_recipe_is_refused_before_what_trains_is_loaded(tmp_path):
    (tmp_path / "recipe.yaml").write_text("train: {output_dirr: runs}\n")
    refused = f"""
from surefoot.cli.main import main
try:
    main(["train", {str(tmp_path / "recipe.yaml")!r}])
except SystemExit as error:
    assert error.code == 2, error.code"""
    assert not loaded_after(refused) & (HEAVY | {"surefoot.run.training_run", "rich"})


def test_a_run_of_one_process_loads_no_way_that_it_may_not_go():
    # transformers itself takes torch.distributed.tensor and torch._dynamo with it.
    unused = {"pyarrow", "pandas", "peft", "datasets", "matplotlib", "tensorboard", "modelscope"}
    unused |= {"torch.distributed.pipelining", "torch.utils.tensorboard"}
    unused |= {"surefoot.interchange.from_trainer", "surefoot.interchange.pickles"}
    assert not loaded_after("import surefoot.run.training_run") & unused


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


@pytest.mark.parametrize("method", ["full", "lora"])
def test_nothing_else_is_loaded_up_to_the_first_step(tmp_path, method):
    project = Project(tmp_path, method="full" if method == "full" else {"lora": {}})
    needed = loaded_after(NEEDED if method == "full" else f"{NEEDED}\nimport peft")
    loaded = loaded_after(FIRST_STEP.format(recipe=str(project.recipe)))
    tops = {name.partition(".")[0] for name in loaded - needed} - sys.stdlib_module_names
    assert tops - {name.partition(".")[0] for name in needed} <= OWN
    deep = {name for name in loaded - needed if name.startswith(("torch.", "transformers."))}
    assert len(deep) < 20, sorted(deep)  # a counter of operations, an attention for packed rows
    assert not loaded & {
        "surefoot.inference",
        "surefoot.interchange.pickles",
        "surefoot.forecast.bench",
    }
    assert not loaded & (HEAVY - {"torch", "transformers", "numpy", "peft"})
