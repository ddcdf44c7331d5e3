"""The predict command: a file in, a file out, on one process and on two."""

import errno
import json
import string

import pytest
from click.testing import CliRunner

from folders import save_adapter, save_model, save_recipe
from surefoot.cli.main import main
from surefoot.data.section import DataSection
from surefoot.generate.section import GenerateSection
from surefoot.schema.locations import DatasetReference
from surefoot.storage import files
from surefoot.use import Conversation, open_model
from surefoot.use.prediction import read_responses

LIVELY = {"initializer_range": 0.3}  # prompts matter to what is said
LAST = {"eval_steps": None}
SHORT = "generate.max_new_tokens=6"
TEXTS = ["Hi", "What is 1 plus 1?", "A long story"]
_append = files.append_line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    save_model(folder / "base", **LIVELY)
    save_adapter(folder / "base", folder / "adapter")
    (folder / "q.txt").write_text("\n".join(TEXTS) + "\n")
    return folder


@pytest.fixture
def run(folder, tmp_path):
    def run_it(*args, prompts=folder / "q.txt", output=tmp_path / "a.jsonl"):
        told = ["predict", *args, "--prompts", prompts, "--output", output]
        return CliRunner().invoke(main, [*map(str, told)])

    return run_it


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def expected(path, count=6, **options):
    opened = open_model(path)
    section = GenerateSection(max_new_tokens=count)
    answers = [Conversation(opened, section, **options).ask(text) for text in TEXTS]
    return [
        {"prompt": text, "answer": a.text, "finish_reason": a.finish_reason}
        for text, a in zip(TEXTS, answers, strict=True)
    ]


def test_every_prompt_has_a_line_with_its_answer(folder, run, tmp_path):
    done = run(folder / "base", SHORT)
    assert done.exit_code == 0, done.output
    assert lines(tmp_path / "a.jsonl") == expected(folder / "base")
    counted = "3 answers (3 truncated at generate.max_new_tokens)"
    assert done.stdout == f"{tmp_path / 'a.jsonl'}: {counted}\n"


def test_what_a_row_holds_beside_its_prompt_comes_along(folder, run, tmp_path):
    rows = [{"id": i, "prompt": text, "tags": ["ä"]} for i, text in enumerate(TEXTS)]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert (
        run(folder / "base", SHORT, prompts=path, output=tmp_path / "new" / "a.jsonl").exit_code
        == 0
    )
    answers = expected(folder / "base")
    found = lines(tmp_path / "new" / "a.jsonl")
    assert found == [{**row, **answer} for row, answer in zip(rows, answers, strict=True)]
    assert "ä" in (tmp_path / "new" / "a.jsonl").read_text()


def test_an_adapter_and_a_system_message(folder, run, tmp_path):
    assert run(folder / "adapter", SHORT, "--system", "Be brief.").exit_code == 0
    assert lines(tmp_path / "a.jsonl") == expected(folder / "adapter", system="Be brief.")


def test_a_run_answers_as_its_recipe_says_and_overrides_win(run, tmp_path):
    import surefoot

    recipe = save_recipe(tmp_path, method={"lora": {"rank": 2}}, generate={"max_new_tokens": 3})
    surefoot.train(recipe)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    for args, count in (([recipe], 3), ([tmp_path / "run", SHORT, "--force"], 6)):
        assert run(*args).exit_code == 0
        assert lines(tmp_path / "a.jsonl") == expected(checkpoint, count)


def test_a_run_reads_prompts_by_the_columns_of_its_dataset(run, tmp_path):
    import surefoot

    recipe = save_recipe(tmp_path, method={"lora": {"rank": 2}}, data={"val_size": 0}, train=LAST)
    rows = [{"frage": text, "antwort": "ja", "prompt": "no"} for text in [*TEXTS, *TEXTS]]
    (tmp_path / "data" / "mine.json").write_text(json.dumps(rows))
    entry = {"file_name": "mine.json", "columns": {"prompt": "frage", "response": "antwort"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"sums": entry}))
    surefoot.train(recipe)
    path = tmp_path / "q.json"
    path.write_text(json.dumps(rows[: len(TEXTS)]))
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoint-4", recipe):
        done = run(place, SHORT, "--force", prompts=path)
        assert done.exit_code == 0, done.stderr
        answers = expected(tmp_path / "run" / "checkpoint-4")
        assert [line["answer"] for line in lines(tmp_path / "a.jsonl")] == [
            each["answer"] for each in answers
        ]


def test_a_reward_model_reads_responses_by_the_columns_of_its_dataset(tmp_path):
    names = {"prompt": "frage", "chosen": "gut", "rejected": "schlecht"}
    entry = {"file_name": "gone.jsonl", "ranking": True, "columns": names}
    section = DataSection(datasets=(DatasetReference.of(entry),))
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"frage": "a", "gut": "b", "schlecht": "c"}))
    (found,) = read_responses(path, section)
    assert [found.chosen.content, found.rejected.content] == ["b", "c"]
    path.write_text(json.dumps({"instruction": "a", "output": "b"}))
    assert read_responses(path, section)[0].messages[-1].content == "b"


def test_what_is_there_is_not_overwritten_without_a_word(folder, run, tmp_path):
    (tmp_path / "a.jsonl").write_text("dear\n")
    done = run("/nowhere", SHORT)
    assert done.exit_code == 2
    assert "a.jsonl: it exists; choose another name, or add --force" in done.stderr
    assert (tmp_path / "a.jsonl").read_text() == "dear\n"
    done = run(folder / "base", SHORT, output=tmp_path)
    assert "is a folder; expected the name of a file" in done.stderr
    assert run(folder / "base", SHORT, "--force").exit_code == 0
    assert len(lines(tmp_path / "a.jsonl")) == 3


def test_texts_of_the_command_line_are_answered_on_standard_output_or_in_a_file(folder, tmp_path):
    def predict(*args):
        return CliRunner().invoke(main, [*map(str, ("predict", folder / "base", SHORT, *args))])

    answers = [each["answer"] for each in expected(folder / "base")]
    words = [word for text in TEXTS for word in ("--prompt", text)]
    done = predict(*words)
    assert done.stdout.split("\n")[:-1] == [answer.replace("\n", "\\n") for answer in answers]
    assert "answer 3: truncated at generate.max_new_tokens" in done.stderr
    assert predict(*words[:2]).stdout == f"{answers[0]}\n"
    assert predict(*words, "--output", tmp_path / "a.jsonl").exit_code == 0
    assert lines(tmp_path / "a.jsonl") == expected(folder / "base")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "expected one of --prompts FILE and --prompt TEXT"),
        (["--prompts", "q.txt", "--prompt", "a"], "expected one of --prompts FILE and --prompt"),
        (["--prompts", "q.txt"], "--output: expected the file of the responses to --prompts"),
        (["--prompt", "a", "--force"], "--force: has no effect without --output"),
        (["--prompt", "a", "--media-folder", "."], "--media-folder: has no effect on --prompt"),
        (["--prompt", "a", "--prompt", " "], "--prompt ' ': the prompt is empty"),
        (["--prompt", "\udcff"], "is not UTF-8 text"),
    ],
)
def test_words_that_do_not_go_together_are_refused_before_the_model_is_read(args, problem):
    done = CliRunner().invoke(main, ["predict", "/nowhere", *args])
    assert done.exit_code == 2
    assert problem in done.stderr


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["/nowhere"], "no folder /nowhere; expected a run, a checkpoint, a model or an adapter"),
        (["x", "generate.top_p=3"], "generate.top_p: must be in (0, 1], got 3"),
        (["x", "generat.top_p=1"], "generate"),
        (["x", "parallel.pp=2"], "parallel.pp: responses are generated token by token"),
    ],
)
def test_a_mistake_is_one_plain_error_and_writes_nothing(args, problem, run, tmp_path):
    done = run(*args)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert problem in done.stderr
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "prompts cannot be read: No such file or directory"),
        (b"", "contains no prompt; expected one per line"),
        (b"\x89PNG\xff", "is not UTF-8 text"),
        (b"Hi\n" + b"x" * 300, "line 2: no room for a response"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(content, problem, folder, run, tmp_path):
    path = tmp_path / "q.txt"
    if content is not None:
        path.write_bytes(content)
    done = run(folder / "base", SHORT, prompts=path)
    assert done.exit_code == 2
    assert problem in done.stderr
    assert not (tmp_path / "a.jsonl").exists()


@pytest.fixture
def full_after(monkeypatch):
    """The disk is full after so many writes of whole answers, of any kind."""

    def limit(count):
        left = [count]

        def write(path, text):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            _append(path, text)

        monkeypatch.setattr(files, "append_line", write)

    return limit


@pytest.fixture
def generated(monkeypatch):
    """How many prompts each command lets the model answer."""
    from surefoot.generate import generation

    own, found = generation._finished, []

    def counted(model, todo, *args):
        found.extend([len(todo)] if todo else [])
        return own(model, todo, *args)

    monkeypatch.setattr(generation, "_finished", counted)
    return found


STOPPING = (f"generate.stop={json.dumps(list(string.ascii_letters))}", "generate.max_new_tokens=30")


@pytest.mark.parametrize(
    "sampling",
    [(), ("generate.do_sample=true",), STOPPING],
    ids=["greedy", "sampled", "with stop texts"],
)
def test_a_full_disk_keeps_the_answers_and_the_same_command_continues(
    sampling, folder, run, tmp_path, full_after, generated, monkeypatch
):
    args = (folder / "base", SHORT, "generate.batch_size=1", *sampling)
    assert run(*args, output=tmp_path / "never.jsonl").exit_code == 0
    full_after(2)
    done = run(*args)
    assert done.exit_code == 2
    assert "the disk is full; free some space" in done.stderr
    assert "a.jsonl.part" in done.stderr
    assert "the same command continues" in done.stderr
    assert not (tmp_path / "a.jsonl").exists()
    monkeypatch.setattr(files, "append_line", _append)
    generated.clear()
    assert run(*args).exit_code == 0
    assert generated == [1]
    if sampling is STOPPING:
        assert {one["finish_reason"] for one in lines(tmp_path / "a.jsonl")} == {"stop"}
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "never.jsonl").read_text()
    assert not list(tmp_path.glob("*.part*"))


def test_a_disk_that_is_full_at_the_end_loses_no_answer(
    folder, run, tmp_path, generated, monkeypatch
):
    from surefoot.data.text import prompts as answers

    def full(path, _):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as disk:
        disk.setattr(answers, "write_aside", full)
        done = run(folder / "base", SHORT)
    assert done.exit_code == 2
    assert "the disk is full; free some space" in done.stderr
    assert "the same command continues" in done.stderr
    kept = [json.loads(x) for x in (tmp_path / "a.jsonl.part").read_text().splitlines() if x]
    answered = {int(each["key"]): each["result"]["answer"] for each in kept}
    assert [answered[i] for i in range(3)] == [each["answer"] for each in expected(folder / "base")]
    generated.clear()
    assert run(folder / "base", SHORT).exit_code == 0
    assert generated == []
    assert lines(tmp_path / "a.jsonl") == expected(folder / "base")


def test_answers_of_another_command_are_not_taken_nor_lost(folder, run, tmp_path, full_after):
    full_after(1)
    assert run(folder / "base", SHORT, "generate.batch_size=1").exit_code == 2
    kept = (tmp_path / "a.jsonl.part").read_text()
    for args in ((folder / "adapter", SHORT), (folder / "base", "generate.max_new_tokens=5")):
        done = run(*args, "generate.batch_size=1")
        assert done.exit_code == 2
        assert "other prompts, settings or weights" in done.stderr
        assert "--force" in done.stderr
        assert (tmp_path / "a.jsonl.part").read_text() == kept


def test_a_torn_line_is_answered_again(folder, run, tmp_path, full_after, monkeypatch):
    args = (folder / "base", SHORT, "generate.batch_size=1")
    full_after(2)
    assert run(*args).exit_code == 2
    part = tmp_path / "a.jsonl.part"
    part.write_bytes(part.read_bytes()[:-9])
    monkeypatch.setattr(files, "append_line", _append)
    assert run(*args).exit_code == 0
    assert lines(tmp_path / "a.jsonl") == expected(folder / "base")
