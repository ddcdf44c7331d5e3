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
