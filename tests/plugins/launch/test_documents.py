"""What SLURM, Kubernetes and SkyPilot get: stored texts, and what is refused before.

``python tests/plugins/launch/test_documents.py`` writes ``documents/`` and ``examples/cluster/``.
"""

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from surefoot.errors import RunError
from surefoot.plugins.launch.request import LaunchRequest, job_name, read_settings

STORED = Path(__file__).parent / "documents"
CLUSTER = Path(__file__).parents[3] / "examples" / "cluster"
SHOWN = {"slurm-two": "slurm", "kubernetes-two": "kubernetes", "skypilot-one": "skypilot"}
SUFFIX = {"slurm": "sbatch", "kubernetes": "yaml", "skypilot": "yaml"}
IMAGE = {"image": "registry.example.com/surefoot:0.1.0", "claim": "surefoot"}
ODD = {"setup": "module load cuda\nsource 'my env/bin/activate'", "comment": "it's mine"}
CASES = {
    "slurm-one": {},
    "slurm-two": {"nodes": 2, "gpus": 8, "ranks_per_node": 8, "settings": {"cpus-per-task": "8"}},
    "slurm-odd": {
        "recipe": Path("my recipes/first $run.yaml"),
        "overrides": ("data.datasets=[a, b]", "train.run_name='x y'"),
        "name": job_name("My Run (2)"),
        "gpus": 4,
        "ranks_per_node": 4,
        "settings": {**ODD, "gres": "gpu:a100:4", "exclusive": "", "signal": "TERM@600"},
    },
    "kubernetes-one": {"settings": IMAGE},
    "kubernetes-two": {
        "nodes": 2,
        "gpus": 8,
        "ranks_per_node": 8,
        "settings": IMAGE,
    },
    "kubernetes-odd": {
        "recipe": Path("odd.json"),
        "overrides": ('train.run_name=yes: "no" # é',),
        "name": job_name("2024/Über Run"),
        "settings": {**IMAGE, "image": "on", "grace_seconds": "600", "folder": "/my runs"}
        | {"namespace": "team", "memory": "200Gi"},
    },
    "skypilot-one": {
        "overrides": ("train.output_dir=s3://bucket/first",),
        "output_dir": "s3://bucket/first",
        "gpus": 8,
        "ranks_per_node": 8,
        "settings": {"accelerators": "H100", "setup": "pip install -e .[s3]"},
    },
    "skypilot-two": {
        "output_dir": "/mnt/runs/first",
        "nodes": 2,
        "gpus": 8,
        "ranks_per_node": 8,
        "settings": {"accelerators": "H100:8", "volume": "runs", "use_spot": "false"}
        | {"infra": "aws", "setup": "pip install -e ."},
    },
    "skypilot-odd": {
        "recipe": Path("my recipe.yaml"),
        "overrides": ("train.run_name='x y'",),
        "output_dir": "gs://bucket/my run",
        "name": job_name("my run"),
        "settings": {"setup": "pip install -e .[gs]\necho 'ready: yes'", "cpus": "8+"},
    },
}
RECIPES = {
    "recipe.yaml": """\
model: {path: Qwen/Qwen3-0.6B}
data: {dataset_dir: data, datasets: [orders]}
method: {lora: {rank: 16}}
stage: sft
train: {output_dir: runs/first}
""",
    "my recipe.yaml": "model: {path: Qwen/Qwen3-0.6B}\n",
    "odd.json": '  {"model": {"path": "é\\ta"},\n "data": "---"}\n\n',
}


def of(engine):
    return [name for name in CASES if name.startswith(engine)]


def document(name):
    """Of a case, in a folder with ``RECIPES``."""
    engine = import_module(f"surefoot.plugins.launch.{name.partition('-')[0]}")
    usual = {"recipe": Path("recipe.yaml"), "name": "first", "output_dir": "runs/first"}
    request = LaunchRequest(**usual | CASES[name])
    read_settings([f"{k}={v}" for k, v in request.settings.items()], engine.SETTINGS)
    return engine.document(request)


def stored(name):
    engine = name.partition("-")[0]
    folder, stem = (CLUSTER, SHOWN[name]) if name in SHOWN else (STORED, name)
    return folder / f"{stem}.{SUFFIX[engine]}"


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    for name, text in RECIPES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_a_document_is_the_stored_one(recipes, name):
    assert document(name) == stored(name).read_text()


@pytest.mark.parametrize("name", of("slurm"))
def test_bash_reads_the_script_and_its_words_are_those_of_the_user(recipes, name, tmp_path):
    script = document(name)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    srun = next(line for line in script.splitlines() if line.startswith("srun"))
    shown = srun.replace("srun --kill-on-bad-exit=1 surefoot train", r"printf '%s\n'")
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    case = CASES[name]
    words = [str(case.get("recipe", "recipe.yaml")), *case.get("overrides", ())]
    assert done.stdout.splitlines() == words


@pytest.mark.parametrize("name", of("kubernetes"))
def test_kubernetes_gets_the_recipe_and_the_words_to_the_letter(recipes, name):
    """PyYAML reads YAML 1.1, as kubectl does."""
    recipe, runtime, job = yaml.safe_load_all(document(name))
    case = CASES[name]
    path = str(case.get("recipe", "recipe.yaml"))
    (text,) = recipe["data"].values()
    assert text.rstrip("\n") == RECIPES[path].rstrip("\n")
    (file,) = recipe["data"]
    assert job["spec"]["trainer"]["args"] == [f"/etc/surefoot/{file}", *case.get("overrides", ())]
    assert job["spec"]["trainer"]["image"] == case["settings"]["image"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert f"--shutdown-timeout={grace - 60}" in job["spec"]["trainer"]["command"]


@pytest.mark.parametrize("name", of("skypilot"))
def test_a_task_of_skypilot_is_yaml_whose_commands_bash_reads(recipes, name):
    task = yaml.safe_load(document(name))
    keys = {"name", "num_nodes", "resources", "volumes", "workdir", "setup", "run"}
    assert task.keys() <= keys
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def refused(engine, **changes):
    """What is said of a request."""
    usual = {"recipe": Path("recipe.yaml"), "name": "first", "output_dir": "runs/first"}
    module = import_module(f"surefoot.plugins.launch.{engine}")
    with pytest.raises(RunError) as error:
        module.document(LaunchRequest(**usual | changes))
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "meant"), [("partitoin", "partition"), ("mem-per-cpus", "mem-per-cpu")]
)
def test_a_misspelled_option_of_sbatch_is_refused(key, meant):
    assert f"did you mean {meant}?" in refused("slurm", settings={key: "4"})


def test_an_option_that_a_site_has_added_is_passed_on(monkeypatch, recipes):
    for key in ("container-image", "container-mounts", "container-env", "x11"):  # of pyxis, others
        monkeypatch.setitem(CASES, "slurm-site", {"settings": {key: "a"}})
        assert f"#SBATCH --{key}=a\n" in document("slurm-site")


def test_slurm_refuses_counts_that_were_not_checked():
    for key in ("nodes", "ntasks", "gpus-per-node"):
        assert "use --nodes and --gpus" in refused("slurm", settings={key: "4"})
    assert "expected a whole number from 0" in refused("slurm", settings={"restarts": "-1"})


def test_kubernetes_refuses_a_run_that_its_pods_would_lose(recipes):
    assert "--set image=... is missing" in refused("kubernetes", settings={"claim": "a"})
    assert "--set claim=... is missing" in refused("kubernetes", settings={"image": "a"})
    for place in ("/home/me/run", "../run", "/work/../run"):
        said = refused("kubernetes", output_dir=place, settings=IMAGE)
        assert "set train.output_dir=/work/runs/first" in said
    cache = {"output_dir": "s3://bucket/run", "cache_dir": "/home/me"}
    said = refused("kubernetes", **cache, nodes=2, settings=IMAGE)
    assert "train.cache_dir: /home/me, but the pods" in said
    said = refused("kubernetes", settings={**IMAGE, "grace_seconds": "60"})
    assert "expected a whole number from 61, got '60'" in said


def test_skypilot_refuses_a_run_that_is_lost_with_its_machine(recipes):
    assert "s3://bucket/run, or with --set volume=NAME /mnt/runs/first" in refused("skypilot")
    said = refused("skypilot", nodes=2)
    assert said.startswith("train.output_dir: runs/first is on the disk of the machine")
    assert "a URL such as s3://bucket/run, or with --set volume=NAME /mnt/runs/first" in said
    said = refused("skypilot", output_dir="runs/first", settings={"volume": "runs"})
    assert "set it to /mnt/runs/first" in said
    said = refused("skypilot", output_dir="s3://bucket/run", gpus=8)
    assert "--set accelerators=... is missing" in said


@pytest.mark.parametrize("engine", ["skypilot", "kubernetes", "slurm"])
def test_several_machines_need_no_common_disk_for_a_run_in_a_store(recipes, engine):
    settings = {"skypilot": {"setup": "true"}, "kubernetes": IMAGE, "slurm": {}}[engine]
    usual = {"recipe": Path("recipe.yaml"), "name": "first", "output_dir": "s3://bucket/run"}
    module = import_module(f"surefoot.plugins.launch.{engine}")
    assert "2" in module.document(LaunchRequest(**usual, nodes=2, settings=settings))


@pytest.mark.parametrize("name", CASES)
def test_a_new_machine_gets_nothing_from_an_index_under_our_name(recipes, name):
    """The name is not ours there."""
    assert not re.search(r"install[^\n]*\bsurefoot\b", document(name))


def test_skypilot_asks_how_surefoot_is_installed(recipes):
    said = refused("skypilot", output_dir="s3://bucket/run")
    assert said.startswith("--set setup=... is missing")
    assert "'pip install -e .[s3]'" in said


def test_skypilot_refuses_paths_that_only_this_machine_has(recipes, tmp_path):
    said = refused("skypilot", output_dir="s3://bucket/run", recipe=tmp_path / "recipe.yaml")
    assert "name the recipe relative to it" in said
    words = (f"model.path={tmp_path}",)
    said = refused("skypilot", output_dir="s3://bucket/run", overrides=words)
    assert f"{tmp_path} is not copied to the machine" in said
    Path("recipe.yaml").write_text(f"data: {{datasets: [{tmp_path}]}}")
    assert "is not copied" in refused("skypilot", output_dir="s3://bucket/run")


def test_settings_are_pairs_that_the_engine_has():
    def said(*words, allowed=("image", "claim")):
        with pytest.raises(RunError) as error:
            read_settings(words, allowed)
        return str(error.value)

    pairs = {"image": "a=b", "claim": ""}
    assert read_settings(["image=a=b", "claim="], ("image", "claim")) == pairs
    assert "did you mean image?" in said("imagee=a")
    assert "expected one of image, claim" in said("zzzz=a")
    assert "occurs twice" in said("image=a", "image=b")
    assert "expected KEY=VALUE" in said("p=gpu", allowed=None)
    assert "control character" in said("account=a\n#SBATCH --nodes=9", allowed=None)
    assert read_settings(["setup=a\nb"], None) == {"setup": "a\nb"}


def test_a_name_is_one_that_kubernetes_accepts():
    assert job_name("First_Run.v2") == "first-run-v2"
    assert job_name("世界") == "run"
    assert job_name("2024") == "run-2024"
    assert job_name("a" * 39 + "-b") == "a" * 39


if __name__ == "__main__":
    import os
    import tempfile

    STORED.mkdir(exist_ok=True)
    os.chdir(tempfile.mkdtemp())
    for file_name, content in RECIPES.items():
        Path(file_name).write_text(content)
    for case in CASES:
        stored(case).write_text(document(case))
