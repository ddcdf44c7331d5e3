"""Kubernetes: objects of Kubeflow Trainer v2 (v1alpha1), which `kubectl create` takes.

There are three, as a TrainJob alone cannot say how often it is restarted: that is the
TrainingRuntime's. The recipe is in a ConfigMap, so that the one that was checked is the one that is
trained. A pod sees a volume and nothing else of this machine.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from textwrap import indent

from ...errors import RunError
from ...recipe.files import read_text
from .request import LaunchRequest

# Not `apply`: of a name that exists it would change the recipe under a job that trains.
PROGRAM = ("kubectl", "create", "-f")
SETTINGS = (
    *("image", "claim", "folder", "namespace", "restarts", "grace_seconds"),
    *("cpu", "memory", "gpu_resource"),
)
SEES_FILES = False
_RECIPE = "/etc/surefoot"  # where the ConfigMap is mounted
_SAVE = 60  # seconds of the grace period that torchrun leaves for its own end
_TEMPLATE = """\
apiVersion: v1
kind: ConfigMap
metadata: {metadata}
immutable: true
data:
  {file}: |2
{text}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {runtime_metadata}
spec:
  mlPolicy: {{numNodes: {nodes}, torch: {{}}}}
  template:
    spec:
      failurePolicy: {{maxRestarts: {restarts}}}  # all pods together; the run resumes
      replicatedJobs:
        - name: node
          template:
            metadata: {{labels: {{trainer.kubeflow.org/trainjob-ancestor-step: trainer}}}}
            spec:
              backoffLimit: 0  # a pod that ends is not restarted alone
              template:
                spec:
                  restartPolicy: Never
                  terminationGracePeriodSeconds: {grace}
                  containers:
                    - name: node
                      image: {image}
                      workingDir: {folder}
                      volumeMounts:
                        - {{name: work, mountPath: {folder}}}
                        - {{name: recipe, mountPath: {recipe}}}
                        - {{name: shm, mountPath: /dev/shm}}
                  volumes:
                    - {{name: work, persistentVolumeClaim: {{claimName: {claim}}}}}
                    - {{name: recipe, configMap: {{name: {name}}}}}
                    - {{name: shm, emptyDir: {{medium: Memory}}}}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {metadata}
spec:
  runtimeRef: {{apiGroup: trainer.kubeflow.org, kind: TrainingRuntime, name: {name}}}
  trainer:
    image: {image}
    numNodes: {nodes}
    numProcPerNode: {ranks}
    command: [torchrun, --shutdown-timeout={shutdown}, --no-python, surefoot, train]
    args: [{words}]
{resources}"""


def document(request: LaunchRequest) -> str:
    """The objects, as YAML. Raises ``RunError`` if a setting is missing, or if the run would not be
    on the volume."""
    folder = PurePosixPath(request.setting("folder", "/work"))
    _must_be_on_the_volume(request, folder)
    file = f"recipe{request.recipe.suffix}"
    name, namespace = _quoted(request.name), request.settings.get("namespace")
    where = f", namespace: {_quoted(namespace)}" if namespace else ""
    label = "labels: {trainer.kubeflow.org/framework: torch}"
    grace = request.number("grace_seconds", 300, _SAVE + 1)
    words = [f"{_RECIPE}/{file}", *request.overrides]
    return _TEMPLATE.format(
        metadata=f"{{name: {name}{where}}}",
        runtime_metadata=f"{{name: {name}{where}, {label}}}",
        file=file,
        text=indent(read_text(request.recipe).rstrip("\n"), "    "),
        name=name,
        nodes=request.nodes,
        ranks=request.ranks_per_node,
        restarts=request.number("restarts", 20),
        grace=grace,
        shutdown=grace - _SAVE,  # torchrun kills the ranks after 30 s unless this says otherwise
        image=_quoted(request.setting("image", why="the image that contains Surefoot")),
        claim=_quoted(request.setting("claim", why="the PersistentVolumeClaim of the runs")),
        folder=_quoted(str(folder)),
        recipe=_RECIPE,
        words=", ".join(map(_quoted, words)),
        resources=_resources(request),
    )


def _resources(request: LaunchRequest) -> str:
    """GPUs, and what else of a node was requested."""
    amounts = {key: request.settings[key] for key in ("cpu", "memory") if key in request.settings}
    if request.gpus:
        amounts[request.setting("gpu_resource", "nvidia.com/gpu")] = str(request.gpus)
    if not amounts:
        return ""
    listed = ", ".join(f"{_quoted(key)}: {_quoted(value)}" for key, value in amounts.items())
    both = f"limits: {{{listed}}}, requests: {{{listed}}}"
    return f"    resourcesPerNode: {{{both}}}\n"


def _must_be_on_the_volume(request: LaunchRequest, folder: PurePosixPath) -> None:
    place = request.run_folder
    if place is None:
        return  # a run in a store, and its cache in the pods
    path = PurePosixPath(place)  # a relative one is below it
    is_there = path.is_relative_to(folder) or not path.is_absolute()
    if not is_there or ".." in path.parts:
        setting = "cache_dir" if "://" in request.output_dir else "output_dir"
        raise RunError(
            f"train.{setting}: {place}, but the pods share {folder} alone, and lose "
            f"everything else when they end; set train.{setting}={folder}/runs/{request.name}"
        )


def _quoted(text: str) -> str:
    """A YAML scalar in double quotes: no reader takes ``on`` or ``1e3`` for anything but text."""
    return json.dumps(text, ensure_ascii=False)
