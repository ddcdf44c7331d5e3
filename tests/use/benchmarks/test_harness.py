"""lm-eval's tasks have the figures of its own Hugging Face backend, row by row."""

import functools
import importlib.util
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

if not all(map(importlib.util.find_spec, ("lm_eval", "accelerate"))):
    pytest.skip("the extra lm-eval is not installed", allow_module_level=True)

import warnings

from click.testing import CliRunner

import folders
from project import start
from project import surefoot as cli
from surefoot.cli.main import main
from surefoot.use import harness

TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "num_fewshot": 2,
        "fewshot_split": "test",
        "fewshot_config": {"sampler": "first_n"},
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "question",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "local_likelihood": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
        "doc_to_target": " {{choices[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "local_generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["e", "Q"], "max_gen_toks": 40, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
NAMES = ",".join(TASKS)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    found = tmp_path_factory.mktemp("harness")
    folders.save_model(found / "model", initializer_range=0.3, max_position_embeddings=300)
    rows = [
        {
            "question": f"How many are {n} and {n * n}?" + " So many hens." * (n % 4) * 8,
            "choices": [f"{n + n * n}", f"about {n}", "none", "no one"][: 2 + n % 3],
            "answer": n % 2,
        }
        for n in range(12)
    ]
    (found / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found / "tasks").mkdir()
    for name, task in TASKS.items():
        data = {"data_files": {"test": str(found / "rows.jsonl")}}
        content = {"task": name, "dataset_path": "json", "dataset_kwargs": data}
        content |= {"test_split": "test", **task}
        (found / "tasks" / f"{name}.yaml").write_text(json.dumps(content))
    return found


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Warnings of lm-eval's own code are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def theirs(place):
    """The results of their Hugging Face backend."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    return simple_evaluate(
        model="hf",
        model_args={"pretrained": str(place / "model"), "dtype": "float32", "device": "cpu"},
        tasks=list(TASKS),
        batch_size=3,
        task_manager=TaskManager(include_path=str(place / "tasks"), include_defaults=False),
    )


def words(place, output):
    named = ["--tasks", NAMES, "--include-path", place / "tasks", "--output", output]
    return ["eval", place / "model", *named, "generate.batch_size=3"]


def test_figures_and_rows_are_those_of_their_own_backend(place, theirs, tmp_path):
    out = tmp_path / "out.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = CliRunner().invoke(main, [*map(str, words(place, out)), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout[done.stdout.index("{") :])["results"]
    for task, metrics in theirs["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert found[task][name] == pytest.approx(value, rel=1e-4, nan_ok=True), (
                    task,
                    name,
                )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for task, samples in theirs["samples"].items():
        own = [row for row in rows if row["task"] == task]
        for row, sample in zip(own, sorted(samples, key=lambda s: s["doc_id"]), strict=True):
            assert_same(row["resps"], json.loads(json.dumps(sample["resps"], default=str)))


def assert_same(one, other):
    if isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-4)
    else:
        assert one == other


def test_a_task_that_does_not_exist_is_named(place, tmp_path, monkeypatch):
    few = functools.partial(harness.TaskManager, include_defaults=False)  # 8 seconds less
    monkeypatch.setattr(harness, "TaskManager", few)
    done = CliRunner().invoke(
        main, [*map(str, words(place, tmp_path / "o")), "--tasks", "local_choise"]
    )
    assert done.exit_code and "no task 'local_choise' (did you mean local_choice?)" in done.stderr


def test_the_task_of_the_page_asks_questions_of_a_file(place, tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "benchmarks.md").read_text()
    (tmp_path / "tasks").mkdir()
    task = page.partition("```yml\n")[2].partition("```")[0]
    (tmp_path / "tasks" / "my_exam.yaml").write_text(task)
    (tmp_path / "exam.jsonl").write_text((place / "rows.jsonl").read_text())
    monkeypatch.chdir(tmp_path)
    words = ["--tasks", "my_exam", "--include-path", "tasks", "--limit", "6", "--json"]
    done = CliRunner().invoke(main, ["eval", str(place / "model"), *words])
    assert done.exit_code == 0, done.output
    assert len((tmp_path / "my_exam.jsonl").read_text().splitlines()) == 6


def test_what_is_there_is_not_overwritten_and_results_of_others_are_not_mixed(place, tmp_path):
    out = tmp_path / "out.jsonl"
    one = ["--tasks", "local_likelihood", "--include-path", place / "tasks", "--output", out]

    def run(*more, model=place / "model"):
        return CliRunner().invoke(main, ["eval", *map(str, (model, *one, *more))])

    assert "--dataset: has no effect on tasks" in run("--dataset", "x").stderr
    out.write_text("mine")
    assert "it exists; choose another name, or add --force" in run().stderr
    assert out.read_text() == "mine"
    out.unlink()
    (tmp_path / "out.jsonl.part").write_text(
        '{"job": "other", "key": "0", "result": [[0, true]]}\n'
    )
    assert "contains 1 result of other questions, settings or weights" in run().stderr
    assert run("--force").exit_code == 0
    folders.save_model(tmp_path / "plain", template=None)
    said = run("--prompts", "chat", "--force", model=tmp_path / "plain").stderr
    assert "the model has no chat template" in said


@pytest.mark.proof
def test_two_replicas_divide_the_requests(place, tmp_path):
    for name, more in (("one", []), ("two", ["parallel.num_processes=2"])):
        code, _, err = cli(*words(place, tmp_path / name), *more, popen=subprocess.Popen)
        assert code == 0, err
    one, two = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("one", "two")
    )
    assert_same([row["resps"] for row in one], [row["resps"] for row in two])
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.proof
def test_a_killed_run_of_tasks_continues_to_the_same_file(place, tmp_path):
    part = tmp_path / "killed.jsonl.part"
    words_of = words(place, tmp_path / "killed.jsonl")
    process = start(*words_of, popen=subprocess.Popen)  # lm-eval's bars need a process of their own
    while process.poll() is None and not (part.exists() and part.read_text().count("\n") > 5):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert part.exists() and not (tmp_path / "killed.jsonl").exists()
    code, _, err = cli(*words_of, popen=subprocess.Popen)
    assert code == 0 and "continuing after" in err, err
    code, out, err = cli(*words(place, tmp_path / "whole.jsonl"), popen=subprocess.Popen)
    assert code == 0 and "local_choice" in out, err
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
