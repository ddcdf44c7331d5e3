"""Questions with choices: from any file, and from the folders of MMLU, C-Eval and CMMLU."""

import json
import zipfile

import pytest

from surefoot.errors import DataError
from surefoot.inference.benchmarks.questions import read_benchmark

ROW = {"question": "2 + 2?", "choices": ["3", "4", "B"], "answer": 1, "subject": "sums"}


def rows(folder, *found, name="exam.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


@pytest.mark.parametrize(
    ("answer", "number"),
    [(1, 1), ("A", 0), ("c", 2), ("4", 1), (" 3 ", 0), (None, None), ("", None)],
)
def test_an_answer_is_a_letter_a_text_or_a_number(tmp_path, answer, number):
    (found,) = read_benchmark(rows(tmp_path, {**ROW, "answer": answer})).questions
    assert (found.answer, found.choices, found.subject) == (number, ("3", "4", "B"), "sums")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"answer": "B"}, "the answer 'B' names several choices"),
        ({"answer": "D"}, "the answer 'D' names no choice; write a letter of A, B, C"),
        ({"answer": 3}, "the answer 3 names no choice"),
        ({"answer": "0"}, "the answer '0' names no choice"),
        ({"choices": ["3"]}, "expected 'choices', a list of 2 to 26"),
        ({"choices": "3, 4"}, "'choices' is not a list in JSON"),
        ({"question": " "}, "expected the text of a question (keys found: question, choices,"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, changes, says):
    path = rows(tmp_path, {**ROW, "answer": 0}, {**ROW, **changes})
    with pytest.raises(DataError) as error:
        read_benchmark(path)
    assert f"{path}: row 1" in str(error.value) and says in str(error.value)


def test_a_csv_file_has_columns_of_letters_or_a_list(tmp_path):
    path = tmp_path / "exam.csv"
    path.write_text('question,A,B,C,answer\n"1, 2?",x,y,z,C\n')
    (found,) = read_benchmark(path).questions
    assert (found.question, found.choices, found.answer) == ("1, 2?", ("x", "y", "z"), 2)
    path.write_text('question,choices,answer\nq,"[""x"", ""y""]",A\n')
    (found,) = read_benchmark(path).questions
    assert (found.choices, found.answer) == (("x", "y"), 0)


def test_examples_come_from_a_file_of_their_own(tmp_path):
    path, shots = rows(tmp_path, ROW), rows(tmp_path, {**ROW, "question": "1 + 2?"}, name="s.jsonl")
    assert read_benchmark(path, examples=shots).examples["sums"][0].question == "1 + 2?"
    with pytest.raises(DataError, match="an example needs its answer"):
        read_benchmark(path, examples=rows(tmp_path, {**ROW, "answer": None}, name="s.jsonl"))
    with pytest.raises(DataError, match="has none for the subject 'sums'"):
        read_benchmark(path, examples=rows(tmp_path, {**ROW, "subject": "x"}, name="s.jsonl"))


FORMS = {  # the files of one subject, as each benchmark has them
    "mmlu": {
        "data/dev/logic_dev.csv": '"1, 1?",one,two,three,four,A\n',
        "data/test/logic_test.csv": "2?,one,two,None,four,B\n",
        "data/val/logic_val.csv": "3?,one,two,three,four,C\n",
    },
    "ceval": {
        "dev/logic_dev.csv": "id,question,A,B,C,D,answer,explanation\n"
        '0,"1, 1?",one,two,three,four,A,so\n',
        "test/logic_test.csv": "id,question,A,B,C,D\n0,2?,one,two,None,four\n",
        "val/logic_val.csv": "id,question,A,B,C,D,answer\n0,3?,one,two,three,four,C\n",
    },
    "cmmlu": {
        "dev/logic.csv": ',Question,A,B,C,D,Answer\n0,"1, 1?",one,two,three,four,A\n',
        "test/logic.csv": ",Question,A,B,C,D,Answer\n0,2?,one,two,None,four,B\n",
    },
}


def benchmark(folder, kind, *, zipped):
    path = folder / kind
    path.mkdir()
    mapping = {"logic": {"name": "formal logic", "category": "Humanities"}}
    (path / "mapping.json").write_text(json.dumps(mapping))
    for name, content in FORMS[kind].items():
        if zipped:
            with zipfile.ZipFile(path / f"{kind}.zip", "a") as archive:
                archive.writestr(name, content)
        else:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(content)
    return path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", FORMS)
def test_their_folders_are_read(tmp_path, kind, zipped):
    path = benchmark(tmp_path, kind, zipped=zipped)
    found = read_benchmark(path)
    assert (found.name, found.title("logic")) == (kind, "formal logic")
    assert found.categories == {"logic": "Humanities"}
    (question,) = found.questions
    assert question.choices == ("one", "two", "None", "four")  # not a missing value
    assert question.answer == (None if kind == "ceval" else 1)
    assert found.examples["logic"][0].question == "1, 1?"
    if kind != "cmmlu":
        assert read_benchmark(path, split="validation").questions[0].answer == 2
    else:
        with pytest.raises(DataError, match="the splits are test, train"):
            read_benchmark(path, split="validation")


def test_what_is_no_benchmark_is_said(tmp_path):
    with pytest.raises(DataError, match=r"contains no mapping\.json"):
        read_benchmark(tmp_path)
    with pytest.raises(DataError, match="there is no such file or folder"):
        read_benchmark(tmp_path / "none")
    path = benchmark(tmp_path, "mmlu", zipped=False)
    (path / "data/test/logic_test.csv").write_text("2?,one,two,three,four,E\n")
    with pytest.raises(DataError, match="row 1: the answer 'E' is no letter of a choice"):
        read_benchmark(path)
    (path / "data/test/logic_test.csv").write_text("2?,one,two,three,four,B\n3?,one,B\n")
    with pytest.raises(DataError, match="row 2: has 3 columns, the first one 6"):
        read_benchmark(path)
