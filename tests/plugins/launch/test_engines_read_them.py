"""What the engines' own libraries make of the documents.

They live in environments of their own, as SkyPilot needs another click than Surefoot:
``KUBEFLOW_PYTHON`` and ``SKYPILOT_PYTHON`` name the Python of one that has
``kubeflow_trainer_api`` and PyYAML, or ``skypilot``.
"""

import json
import os
import subprocess

import pytest

from .test_documents import document, of, recipes  # noqa: F401 - a fixture

pytestmark = pytest.mark.proof
# The models drop a key that they do not know, without an error: paths are compared.
KUBEFLOW = """
import sys, json, yaml
from kubeflow_trainer_api import models

def paths(value, path=""):
    if isinstance(value, dict):
        return {p for k, v in value.items() for p in {f"{path}.{k}", *paths(v, f"{path}.{k}")}}
    if isinstance(value, list):
        return {p for i, v in enumerate(value) for p in paths(v, f"{path}[{i}]")}
    return {f"{path}={value}"}

lost = {}
for each in yaml.safe_load_all(sys.stdin.read()):
    if each["kind"] == "ConfigMap":
        continue
    kind = getattr(models, "TrainerV1alpha1" + each["kind"])
    lost[each["kind"]] = sorted(paths(each) - paths(kind.from_dict(each).to_dict()))
print("READ", json.dumps(lost))
"""
SKYPILOT = """
import sys, json, pathlib, tempfile, sky
path = pathlib.Path(tempfile.mkdtemp()) / "task.yaml"
path.write_text(sys.stdin.read())
task = sky.Task.from_yaml(str(path))
(resources,) = task.resources
print("READ", json.dumps([task.name, task.num_nodes, resources.accelerators, resources.use_spot]))
"""


def read_by(variable, program, text):
    """What a program of an environment prints of a document."""
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} names no Python; see the head of this file")
    command = [python, "-P", "-c", program]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("READ "))
    return json.loads(line.removeprefix("READ "))


@pytest.mark.parametrize("name", of("kubernetes"))
def test_no_key_of_a_document_is_unknown_to_kubeflow(recipes, name):  # noqa: F811
    lost = read_by("KUBEFLOW_PYTHON", KUBEFLOW, document(name))
    assert lost == {"TrainingRuntime": [], "TrainJob": []}


@pytest.mark.parametrize("name", of("kubernetes")[:1])
def test_a_key_that_kubeflow_does_not_know_would_be_noticed(recipes, name):  # noqa: F811
    text = document(name).replace("numNodes", "numNode")
    lost = read_by("KUBEFLOW_PYTHON", KUBEFLOW, text)
    assert ".spec.trainer.numNode" in lost["TrainJob"]


@pytest.mark.parametrize("name", of("skypilot"))
def test_skypilot_loads_a_task(recipes, name):  # noqa: F811
    task, num_nodes, accelerators, uses_spot = read_by("SKYPILOT_PYTHON", SKYPILOT, document(name))
    expected = {
        "skypilot-one": ["first", 1, {"H100": 8}, True],
        "skypilot-two": ["first", 2, {"H100": 8}, False],
        "skypilot-odd": ["my-run", 1, None, True],
    }
    assert [task, num_nodes, accelerators, uses_spot] == expected[name]
