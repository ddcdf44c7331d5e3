"""One question and one answer a row."""

import pytest

from surefoot.data.example import Message
from surefoot.data.rows.formats.alpaca import Alpaca
from surefoot.errors import DataError

ROW = {"instruction": "Add the numbers.", "input": "2 3", "output": "5"}


def test_instruction_and_input_are_the_question_on_two_lines():
    example = Alpaca().read(ROW)
    assert example.messages == (Message("user", "Add the numbers.\n2 3"), Message("assistant", "5"))
    assert example.text is None


@pytest.mark.parametrize("nothing", ["", None])
def test_an_empty_input_leaves_no_line_break(nothing):
    assert Alpaca().read({**ROW, "input": nothing}).messages[0].content == "Add the numbers."


def test_an_empty_instruction_leaves_no_line_break():
    assert Alpaca().read({**ROW, "instruction": ""}).messages[0].content == "2 3"


def test_system_and_history_come_first():
    row = {**ROW, "system": "Be brief.", "history": [["Hi", "Hello"], ["1+1?", "2"]]}
    messages = Alpaca().read(row).messages
    assert [m.role for m in messages] == ["system", *["user", "assistant"] * 3]
    assert [m.content for m in messages[:5]] == ["Be brief.", "Hi", "Hello", "1+1?", "2"]


def test_an_empty_system_message_is_none():
    assert Alpaca().read({**ROW, "system": ""}).messages[0].role == "user"


def test_a_column_can_be_switched_off():
    row = {**ROW, "system": "metadata, not a message"}
    assert Alpaca(system=None).read(row).messages[0].role == "user"


def test_a_row_of_only_a_prompt_is_a_text():
    example = Alpaca(prompt="text").read({"text": "Once upon a time", "url": "http://a"})
    assert example.text == "Once upon a time"
    assert example.messages == (Message("user", "Once upon a time"),)


def test_an_empty_answer_is_still_an_answer():
    assert Alpaca().read({**ROW, "output": ""}).messages[-1] == Message("assistant", "")


def test_ranking_rows_have_two_answers_after_the_question():
    row = {"instruction": "Say hi", "chosen": "Hi!", "rejected": "No."}
    example = Alpaca(ranking=True).read(row)
    assert example.messages == (Message("user", "Say hi"),)
    assert (example.chosen, example.rejected) == (
        Message("assistant", "Hi!"),
        Message("assistant", "No."),
    )


@pytest.mark.parametrize(
    ("value", "label"), [(True, True), (False, False), ("true", True), ("False", False), (1, True)]
)
def test_a_kto_tag_says_whether_the_answer_is_desirable(value, label):
    assert Alpaca(kto_tag="good").read({**ROW, "good": value}).label is label


def test_tools_may_be_a_list_or_its_json():
    schema = {"name": "f", "parameters": {}}
    for tools in ([schema], '[{"name": "f", "parameters": {}}]'):
        assert Alpaca().read({**ROW, "tools": tools}).tools == (schema,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"output": 5}, "column 'output': expected text, got int 5"),
        ({"instruction": ["a"]}, "column 'instruction': expected text, got list"),
        ({"output": "\ud83d"}, "column 'output': half of a surrogate pair at character 0"),
        ({"history": "hello"}, "column 'history': not valid JSON"),
        ({"history": {"q": "a"}}, r"column 'history': expected a list of \[question, answer\]"),
        ({"history": [["q"]]}, r"column 'history': expected \[question, answer\], got list"),
        ({"history": [["q", 1]]}, "column 'history': expected text, got int 1"),
        ({"tools": "{"}, "column 'tools': not valid JSON"),
        ({"tools": {"name": "f"}}, "column 'tools': expected a list of function schemas"),
        ({"tools": [{"nme": "f"}]}, "column 'tools': expected a function schema with a name"),
    ],
)
def test_a_bad_row_says_which_column_and_why(change, reason):
    with pytest.raises(DataError, match=reason):
        Alpaca().read({**ROW, **change})


def test_a_row_without_a_question_names_the_columns_it_has():
    with pytest.raises(DataError, match=r"no column 'instruction' \(columns found: instructon, o"):
        Alpaca().read({"instructon": "a", "output": "b"})


def test_an_empty_text_is_a_bad_row():
    with pytest.raises(DataError, match="column 'text': the text is empty"):
        Alpaca(prompt="text").read({"text": ""})


@pytest.mark.parametrize("row", [{"instruction": "a"}, {"instruction": "a", "chosen": "b"}])
def test_a_ranking_row_needs_both_answers(row):
    with pytest.raises(DataError, match=r"no column '(chosen|rejected)'"):
        Alpaca(ranking=True).read(row)


@pytest.mark.parametrize("value", ["maybe", 2, 0.5, [True]])
def test_a_kto_tag_must_be_true_or_false(value):
    with pytest.raises(DataError, match="column 'good': expected true or false"):
        Alpaca(kto_tag="good").read({**ROW, "good": value})


def test_a_thought_has_a_column_of_its_own():
    row = {"instruction": "a", "output": "b", "reasoning_content": "Hm."}
    assert Alpaca().read(row).messages[1] == Message("assistant", "b", reasoning="Hm.")
    assert Alpaca(reasoning=None).read(row).messages[1] == Message("assistant", "b")
    assert Alpaca(reasoning="why").read({**row, "why": "So."}).messages[1].reasoning == "So."
