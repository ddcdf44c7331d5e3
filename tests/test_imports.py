"""What is loaded before it is needed: counted in modules, as seconds depend on the machine."""

import subprocess
import sys


def loaded_after(code):
    """Names of the modules that a fresh interpreter holds after ``code``."""
    program = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_recipe_is_read_without_the_modelling_code_of_transformers():
    # It is half of all imports: 1.5 s that somebody with a typo in a recipe would wait for.
    loaded = loaded_after("import surefoot.recipe.recipe")
    heavy = {"transformers.modeling_utils", "peft", "datasets", "matplotlib", "rich.progress"}
    assert not loaded & heavy


def test_a_wrong_recipe_is_refused_before_what_trains_is_loaded(tmp_path):
    (tmp_path / "recipe.yaml").write_text("train: {output_dirr: runs}\n")
    refused = f"""
from surefoot.cli.main import main
try:
    main(["train", {str(tmp_path / "recipe.yaml")!r}])
except SystemExit as error:
    assert error.code == 2, error.code"""
    assert not loaded_after(refused) & {"surefoot.run", "transformers.modeling_utils"}
