"""The choice that a model finds most probable, from the command line; killed and resumed."""

import json
import signal
import time

import pytest
import torch
from click.testing import CliRunner

import folders
from project import start
from project import surefoot as cli
from surefoot.cli.main import main
from surefoot.inference import open_model
from surefoot.inference.benchmarks.choice_prompts import PromptSettings, ask
from surefoot.inference.benchmarks.questions import read_benchmark

from .test_questions import benchmark

QUESTIONS = [
    {
        "question": f"What is {n} + {n % 3}?",
        "choices": [str(n + d) for d in range(2 + n % 3)],
        "answer": n % 2,
        "subject": ("sums", "more")[n % 2],
    }
    for n in range(9)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a file of questions, and one of examples."""
    found = tmp_path_factory.mktemp("exam")
    folders.save_model(found / "model", initializer_range=0.3, max_position_embeddings=600)
    write(found / "exam.jsonl", QUESTIONS)
    write(found / "shots.jsonl", [{**QUESTIONS[0], "subject": s} for s in ("sums", "more")] * 2)
    return found


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*words):
    return CliRunner().invoke(main, ["eval", *map(str, words)])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("score", ["letter", "text"])
def test_results_are_those_of_each_choice_alone(place, tmp_path, kind, score):
    """Each choice by a forward pass of its own, in float64."""
    out = tmp_path / "out.jsonl"
    words = [place / "model", "--questions", place / "exam.jsonl", "--output", out, "--json"]
    words += ["--examples", place / "shots.jsonl", "--prompts", kind, "--score", score]
    done = run(*words, "--shots", 2, "generate.batch_size=3")
    assert done.exit_code == 0, done.output
    found, rows, opened = json.loads(done.stdout), lines(out), open_model(place / "model")
    exam = read_benchmark(place / "exam.jsonl", examples=place / "shots.jsonl")
    settings = PromptSettings(2, "en", kind == "chat", score == "text")
    for row, one in zip(rows, ask(opened, exam, settings), strict=True):
        logps = [alone(opened.inner, one.question.prompt, c) for c in one.question.continuations]
        assert row["logps"] == pytest.approx(logps, abs=1e-4)
        assert row["predicted"] == "ABCD"[logps.index(max(logps))]
        assert row["match"] == (row["predicted"] == row["answer"])
        assert row["num_shots"] == 2
    assert found["accuracy"] == sum(row["match"] for row in rows) / 9
    assert {name: one["questions"] for name, one in found["subjects"].items()} == {
        "sums": 5,
        "more": 4,
    }
    assert ("accuracy_by_byte" in found) == (score == "text")


def alone(model, prompt, continuation):
    with torch.no_grad():
        logps = model(torch.tensor([[*prompt, *continuation]])).logits[0].double().log_softmax(-1)
    return sum(float(logps[len(prompt) - 1 + i, t]) for i, t in enumerate(continuation))


def test_prompts_have_the_words_of_llamafactory(place, tmp_path):
    """As its ``EvalTemplate.format_example`` writes them."""
    opened, exam = (
        open_model(place / "model"),
        read_benchmark(benchmark(tmp_path, "mmlu", zipped=True)),
    )
    (one,) = ask(opened, exam, PromptSettings(5))
    text = opened.tokenizer.decode(one.question.prompt)
    assert text == (
        "<|im_start|>user\nThe following are multiple choice questions (with answers) about formal "
        "logic.\n\n1, 1?\nA. one\nB. two\nC. three\nD. four\nAnswer:<|im_end|>\n"
        "<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\n2?\nA. one\nB. two\nC. None\nD. four\nAnswer:<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert opened.tokenizer.decode([c[0] for c in one.question.continuations]) == "ABCD"
    (plain,) = ask(opened, exam, PromptSettings(5, "zh", is_chat=False))
    assert opened.tokenizer.decode(plain.question.prompt) == (
        "以下是中国关于formal logic考试的单项选择题，请选出其中的正确答案。\n\n"
        "1, 1?\nA. one\nB. two\nC. three\nD. four\n答案：A\n\n"
        "2?\nA. one\nB. two\nC. None\nD. four\n答案："
    )


def test_a_benchmark_is_shown_by_category(place, tmp_path):
    path = benchmark(tmp_path, "mmlu", zipped=True)
    done = run(place / "model", "--questions", path, "--output", tmp_path / "o.jsonl", "--json")
    found = json.loads(done.stdout)
    assert found["categories"].keys() == {"Humanities"}
    ceval = benchmark(tmp_path, "ceval", zipped=True)
    done = run(place / "model", "--questions", ceval, "--output", tmp_path / "c.jsonl")
    assert "without a known answer: 1 question" in done.stdout
    assert "accuracy" not in done.stdout  # of nothing
    assert lines(tmp_path / "c.jsonl")[0]["match"] is None


def test_what_does_not_fit_is_counted(place, tmp_path):
    path = tmp_path / "long.jsonl"
    write(path, [QUESTIONS[0], {**QUESTIONS[1], "question": "long " * 200}])
    shots = tmp_path / "shots.jsonl"
    rows = [{**QUESTIONS[0], "question": "word " * 60, "subject": s} for s in ("sums", "more")]
    write(shots, rows * 2)
    words = ["--questions", path, "--examples", shots, "--output", tmp_path / "out.jsonl"]
    done = run(place / "model", *words)
    assert "fewer examples before 2 questions" in done.stdout
    assert "too long for the model, so wrong: 1 question" in done.stdout
    assert [row["predicted"] is None for row in lines(tmp_path / "out.jsonl")] == [False, True]


def test_choices_that_nothing_tells_apart_are_refused(place, tmp_path):
    path = tmp_path / "same.jsonl"
    write(path, [{**QUESTIONS[0], "choices": ["x", "x"], "answer": 0}])
    out = tmp_path / "out.jsonl"
    done = run(place / "model", "--questions", path, "--score", "text", "--output", out)
    assert done.exit_code and "row 0: two choices have the same tokens" in done.stderr
    assert not out.exists()


def test_wrong_options_are_refused(place, tmp_path):
    exam = place / "exam.jsonl"
    out = tmp_path / "out.jsonl"
    done = run(place / "model", "--questions", exam, "--dataset", "x", "--output", out)
    assert "--dataset: has no effect on questions" in done.stderr
    out.write_text("mine")
    done = run(place / "model", "--questions", exam, "--output", out)
    assert "it exists; choose another name, or add --force" in done.stderr
    assert out.read_text() == "mine"
    folders.save_model(tmp_path / "plain", template=None)
    done = run(
        tmp_path / "plain", "--questions", exam, "--prompts", "chat", "--output", out, "--force"
    )
    assert "the model has no chat template" in done.stderr


def test_a_killed_evaluation_continues_to_the_same_file(place, tmp_path):
    exam = tmp_path / "exam.jsonl"
    write(
        exam,
        [{**one, "question": f"{n}: {one['question']}"} for n in range(14) for one in QUESTIONS],
    )
    words = ["eval", place / "model", "--questions", exam, "generate.batch_size=1", "--output"]
    part = tmp_path / "killed.jsonl.part"
    process = start(*words, tmp_path / "killed.jsonl")
    while process.poll() is None and not (part.exists() and part.read_text().count("\n") > 5):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = part.read_text().count("\n")
    assert 5 < done < 126 and not (tmp_path / "killed.jsonl").exists()
    with part.open("a") as file:
        file.write('\n{"job": "cut sho')  # a crash in a write
    code, _, err = cli(*words, tmp_path / "killed.jsonl")
    assert code == 0 and "continuing after" in err
    code, _, err = cli(*words, tmp_path / "whole.jsonl")
    assert code == 0 and "continuing" not in err
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not part.exists()


@pytest.mark.proof
def test_two_replicas_divide_the_questions(place, tmp_path):
    words = ["eval", place / "model", "--questions", place / "exam.jsonl", "--output"]
    for name, more in (("one", []), ("two", ["parallel.num_processes=2"])):
        code, _, err = cli(*words, tmp_path / f"{name}.jsonl", *more)
        assert code == 0, err
    for one, two in zip(lines(tmp_path / "one.jsonl"), lines(tmp_path / "two.jsonl"), strict=True):
        assert two.pop("logps") == pytest.approx(one.pop("logps"), abs=1e-4)
        assert one == two
    assert not list(tmp_path.glob("*.part*"))


def test_results_of_other_questions_are_not_mixed(place, tmp_path):
    out = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.part").write_text(
        '{"job": "other", "key": "0", "result": [[0, true]]}\n'
    )
    words = [place / "model", "--questions", place / "exam.jsonl", "--output", out]
    done = run(*words)
    assert "contains 1 result of other questions, settings or weights" in done.stderr
    assert run(*words, "--force").exit_code == 0
