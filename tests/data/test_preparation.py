"""From a data section to encoded datasets, with every row accounted for."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from surefoot.data.example import BrokenRow, Dropped, Truncated
from surefoot.data.section import DataSection
from surefoot.data.training_data import Encoding, find, prepare
from surefoot.errors import DataError

ROWS = [{"instruction": f"q{n}", "output": f"answer {n}"} for n in range(20)]
WORDS = {}


class Encoder:
    """Every word becomes a token; the answer's are learnt. Counts what it is asked."""

    def __init__(self):
        self.seen = Counter()

    def __call__(self, examples):
        self.seen.update(example.origin for example in examples)
        return [self.one(example) for example in examples]

    def one(self, example):
        answer = example.messages[-1].content
        if answer == "drop":
            return Dropped("not wanted")
        prompt = [WORDS.setdefault(m.content, len(WORDS)) for m in example.messages[:-1]]
        learnt = [WORDS.setdefault(word, len(WORDS)) for word in answer.split()]
        item = {"input_ids": prompt + learnt, "labels": [-100] * len(prompt) + learnt}
        if answer.startswith("twice"):
            return [item, item]
        return Truncated([item]) if answer.startswith("cut") else [item]


@pytest.fixture
def section(tmp_path):
    """Two datasets of twenty rows."""
    write(tmp_path, one=ROWS, two=[{**row, "output": "two " + row["output"]} for row in ROWS])
    return DataSection(datasets=("one",), dataset_dir=tmp_path, cache_dir=tmp_path / "cache")


def write(folder, **datasets):
    for name, rows in datasets.items():
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    info = {path.stem: {"file_name": path.name} for path in folder.glob("*.jsonl")}
    (folder / "dataset_info.json").write_text(json.dumps(info))


def run(section, encode=None, *, seed=1, fingerprint=None):
    return prepare(Encoding(section, encode or Encoder(), fingerprint or {}, seed))


def texts(dataset):
    words = {number: word for word, number in WORDS.items()}
    return [
        " ".join(words[t] for t in dataset[i]["input_ids"].tolist()) for i in range(len(dataset))
    ]


def test_datasets_are_joined_in_the_order_of_the_recipe(section):
    prepared = run(replace(section, datasets=("two", "one")))
    expected = [f"q{n} two answer {n}" for n in range(20)] + [f"q{n} answer {n}" for n in range(20)]
    assert texts(prepared.train) == expected
    assert prepared.evals == {}


def test_every_row_is_in_the_report(section, tmp_path, caplog):
    answers = ["drop", "cut a b", "twice", "drop", "plain"]
    rows = [{"instruction": "q", "output": answer} for answer in answers]
    write(tmp_path, one=[*rows, "{", {"output": "x"}])
    report = run(section).report.datasets[0]
    assert (report.name, report.rows, report.items, report.cut) == ("one", 7, 4, 1)
    assert report.dropped == {"not wanted": 2}
    assert [row.index for row in report.broken] == [5, 6]
    assert isinstance(report.broken[0], BrokenRow)
    assert (report.tokens, report.trained_tokens) == (4 + 2 + 2 + 2, 3 + 1 + 1 + 1)


def test_the_report_in_words(section, tmp_path):
    rows = [{"instruction": "q", "output": answer} for answer in ("drop", "cut a b", "plain")]
    write(tmp_path, one=[*rows, "{"])
    lines = list(run(replace(section, val_size=1)).report.lines())
    assert lines[0] == "one: 4 rows, 2 examples, 6 tokens, 4 trained"
    assert lines[1] == "one: broken rows: 1"
    assert lines[2].startswith("  row 3: one.jsonl: line 4 is not valid JSON")
    assert lines[3:] == [
        "one: examples dropped: 1 (not wanted)",
        "one: examples truncated to data.cutoff_len: 1",
        "examples held out for evaluation: 1",
    ]


def test_the_report_names_keys_that_nothing_reads_also_from_the_cache(section, tmp_path):
    rows = [*ROWS, {**ROWS[0], "score": 3}, {**ROWS[1], "reward": 5}, {**ROWS[1], "score": 5}]
    write(tmp_path, one=rows)
    keys = f"score (2 rows, the first {len(ROWS)}), reward (1 row, the first {len(ROWS) + 1})"
    line = f"one: keys that nothing reads: {keys}"
    assert [*run(section).report.lines()][-1] == [*run(section).report.lines()][-1] == line


def test_a_stage_that_keeps_complete_rows_reads_all_of_their_columns(section, tmp_path):
    def encode(examples):
        return [[{"input_ids": [1, 2], "labels": [1, 2], "row": [3]}] for _ in examples]

    write(tmp_path, one=[{**ROWS[0], "score": 3}])
    assert run(section, encode).report.datasets[0].unread == {}


def test_the_first_label_of_an_example_counts_as_little_as_in_training(section, tmp_path):
    def encode(examples):
        return [[{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] for _ in examples]

    assert run(section, encode).report.datasets[0].trained_tokens == 20 * 2


def test_a_second_run_encodes_nothing_and_reports_the_same(section):
    encoder = Encoder()
    first, second = run(section, encoder), run(section, encoder)
    assert max(encoder.seen.values()) == 1
    assert second.report == first.report
    assert second.train.fingerprint == first.train.fingerprint
    assert texts(second.train) == texts(first.train)


def test_another_mix_split_or_order_finds_every_dataset_in_the_cache(section):
    encoder = Encoder()
    run(replace(section, datasets=("one", "two")), encoder)
    run(replace(section, datasets=("two", "one"), val_size=0.2), encoder, seed=7)
    run(replace(section, datasets=("two",), eval_datasets=("one",), packing=False), encoder)
    assert max(encoder.seen.values()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"template": "chatml"},
        {"default_system": "Be kind."},
        {"cutoff_len": 99},
        {"on_too_long": "drop"},
        {"train_on_prompt": True},
        {"mask_history": True},
        {"max_samples": 20},
    ],
)
def test_a_setting_that_matters_is_encoded_anew(section, change):
    encoder = Encoder()
    run(section, encoder)
    run(replace(section, **change), encoder)
    assert set(encoder.seen.values()) == {2}


def test_content_entry_and_tokenizer_matter_too(section, tmp_path):
    encoder = Encoder()
    run(section, encoder)
    run(section, encoder, fingerprint={"tokenizer": "another"})
    info = {"one": {"file_name": "one.jsonl", "columns": {"query": "else"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(DataError, match="no row has the column 'else'"):
        run(section, encoder)
    write(tmp_path, one=[*ROWS[:-1], {"instruction": "q19", "output": "changed"}])
    assert texts(run(section, encoder).train)[-1] == "q19 changed"
    assert encoder.seen["one:0"] == 3


def test_val_size_holds_out_rows_that_are_never_trained(section):
    section = replace(section, datasets=("one", "two"), val_size=0.25)
    prepared = run(section)
    train, held = texts(prepared.train), texts(prepared.evals[""])
    assert len(held) == 10
    assert not set(train) & set(held)
    assert set(train) | set(held) == set(texts(run(replace(section, val_size=0)).train))
    assert texts(run(section).evals[""]) == held
    assert texts(run(section, seed=2).evals[""]) != held


def test_the_pieces_of_a_long_row_are_held_out_together(section, tmp_path):
    write(tmp_path, one=[{"instruction": f"q{n}", "output": f"twice {n}"} for n in range(6)])
    prepared = run(replace(section, val_size=3))
    train, held = texts(prepared.train), texts(prepared.evals[""])
    assert len(train) == len(held) == 6
    assert set(Counter(train + held).values()) == {2}
    assert not set(train) & set(held)


def test_eval_datasets_are_evaluated_each_by_itself(section):
    prepared = run(replace(section, eval_datasets=("two",)))
    assert list(prepared.evals) == ["two"]
    assert texts(prepared.evals["two"])[0] == "q0 two answer 0"
    assert len(prepared.train) == 20


def test_a_dataset_both_learnt_and_evaluated_on_is_warned_of(section, caplog):
    run(replace(section, eval_datasets=("one",)))
    assert "dataset 'one' is used for training and for evaluation" in caplog.text


def test_max_samples_takes_the_first_rows_of_each_dataset(section):
    prepared = run(replace(section, datasets=("one", "two"), max_samples=2))
    assert texts(prepared.train) == [f"q{n} {w}answer {n}" for w in ("", "two ") for n in range(2)]


def test_too_many_broken_rows_stop_the_run_and_leave_no_cache(section, tmp_path):
    write(tmp_path, one=["{"] * 3 + ROWS)
    with pytest.raises(DataError, match=r"more than data.max_broken_rows = 2 rows.*\n  row 0: "):
        run(replace(section, max_broken_rows=2))
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


def test_broken_rows_stop_the_run_even_if_they_are_in_the_cache(section, tmp_path):
    write(tmp_path, one=["{"] * 3 + ROWS)
    assert len(run(section).report.datasets[0].broken) == 3
    with pytest.raises(DataError, match=r"more than data.max_broken_rows = 2 rows.*\n  row 0: "):
        run(replace(section, max_broken_rows=2))


def test_nothing_to_learn_says_why(section, tmp_path):
    write(tmp_path, one=[{"instruction": "q", "output": "drop"}] * 3)
    with pytest.raises(DataError, match=r"'one': none of its 3 rows has .*: not wanted \(3 rows\)"):
        run(section)
    write(tmp_path, one=["{"] * 3)
    with pytest.raises(DataError, match=r"'one': none of its 3 rows has .*: all are broken"):
        run(section)


def test_all_names_are_checked_before_anything_is_encoded(section):
    encoder = Encoder()
    with pytest.raises(DataError, match=r"'tow' is not in .* \(did you mean two\?\)"):
        run(replace(section, datasets=("one", "tow")), encoder)
    assert not encoder.seen


def test_a_file_that_changes_while_it_is_read_is_noticed(section, tmp_path):
    def encode(examples):
        write(tmp_path, one=[*ROWS, ROWS[0]])
        return Encoder()(examples)

    with pytest.raises(DataError, match=r"dataset 'one': .*one.jsonl changed while it was read"):
        run(section, encode)


def test_the_cache_is_in_the_users_cache_folder_by_default(section, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    run(replace(section, cache_dir=None))
    assert len(list((tmp_path / "home" / "surefoot" / "data").iterdir())) == 1


def test_a_long_job_tells_how_far_it_is(section, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("surefoot.data.store._shards.REPORT_SECONDS", -1.0)
    monkeypatch.setattr("surefoot.data.store._shards.BATCH", 8)
    run(section)
    assert [m.split(" tok")[0].rsplit(" ", 1)[0] for m in caplog.messages[:3]] == [
        f"encoding one: {rows} rows," for rows in (8, 16, 20)
    ]
    assert caplog.messages[3].startswith("one: encoded in ")
    run(section)
    assert caplog.messages[-1] == "one: loaded from the cache"


def test_what_is_in_the_cache_is_found_and_nothing_is_encoded_for_it(section):
    both = replace(section, datasets=("one", "two"), val_size=4)
    assert find(Encoding(both, None, {}, 1)) is None
    run(section)
    assert find(Encoding(both, None, {}, 1)) is None, "only one of two is there"
    made = run(both)
    found = find(Encoding(both, None, {}, 1))
    assert found.train.fingerprint == made.train.fingerprint
    assert found.evals[""].fingerprint == made.evals[""].fingerprint
    assert found.report == made.report
    assert find(Encoding(both, None, {"tokenizer": "another"}, 1)) is None


def test_a_damaged_folder_of_the_cache_is_not_found(section):
    run(section)
    next(section.cache_dir.glob("*/header.json")).write_text("{}")
    assert find(Encoding(section, None, {}, 1)) is None


def test_rows_that_are_trained_and_evaluated_under_two_names_are_said(section, tmp_path, caplog):
    """Whatever their order, and also if they are only some of the rows."""
    more = [{"instruction": "q99", "output": "answer 99"}]
    alike = [{**row, "output": f"answer {n + 50}"} for n, row in enumerate(ROWS)]
    write(tmp_path, one=ROWS, again=[*reversed(ROWS[3:9]), *more], other=alike)
    run(replace(section, eval_datasets=("again", "other")))
    assert "evaluation dataset 'again': 6 of its 7 examples are trained on, too" in caplog.text
    assert "'other'" not in caplog.text


def test_a_val_size_of_1_is_one_row_and_said(section, caplog):
    assert len(run(replace(section, val_size=1.0)).evals[""]) == 1
    assert "val_size: 1 holds out one row" in caplog.text
