"""What a message says to do works: each mistake is made, its cure is read, done, and gets past."""

import json

import pytest

import commands
from folders import save_data, save_recipe
from surefoot.storage.remote import DOWNLOAD

QUESTION = {"instruction": "What is 1 plus 1?", "output": "It is 2."}
PAIR = {"instruction": "Which?", "chosen": "This one.", "rejected": "That one."}
TURNS = [{"role": "human", "content": "Which?"}, {"role": "gpt", "content": "This one."}]
RANKING = {"ranking": True}
MISTAKES = {
    # name: (rows, entry, overrides), what the message says, (rows, entry, overrides) of the cure
    "equal responses": (
        ([{**PAIR, "rejected": "This one."}], RANKING, ["stage=dpo"]),
        ["chosen and rejected are equal, so neither can be preferred"],
        ([PAIR], RANKING, ["stage=dpo"]),
    ),
    "responses that differ beyond the cutoff": (
        ([{**PAIR, "rejected": "This one. " * 30, "chosen": "This one. " * 30 + "!"}], RANKING,
         ["stage=dpo", "data.cutoff_len=40"]),
        ["the same within data.cutoff_len"],
        ([{**PAIR, "rejected": "This one. " * 30, "chosen": "This one. " * 30 + "!"}], RANKING,
         ["stage=dpo", "data.cutoff_len=400", "model.max_positions=512"]),
    ),
    "a missing value of pandas": (
        ([{**QUESTION, "output": float("nan")}], {}, []),
        ["no response to train on"],
        ([QUESTION, {**QUESTION, "output": float("nan")}], {}, []),
    ),
    "preference rows for sft": (
        ([PAIR], RANKING, []),
        ["which only stage: dpo and rm can train on"],
        ([PAIR], RANKING, ["stage=rm"]),
    ),
    "roles of ShareGPT": (
        ([{"messages": TURNS}], {"formatting": "openai", "columns": {"messages": "messages"}}, []),
        ["unknown role 'human'", "formatting: sharegpt", "columns: {messages: COLUMN}",
         "tags: {role_tag: role, content_tag: content}"],
        ([{"messages": TURNS}],
         {"formatting": "sharegpt", "columns": {"messages": "messages"},
          "tags": {"role_tag": "role", "content_tag": "content"}}, []),
    ),
}  # fmt: skip


@pytest.fixture
def project(tmp_path):
    return save_recipe(tmp_path)


def encode(project, case, name):
    rows, entry, overrides = case
    save_data(project.parent / "data", name, rows)
    if entry:
        path = project.parent / "data" / "dataset_info.json"
        info = json.loads(path.read_text())
        info[name] = {**entry, "file_name": f"{name}.json"}
        path.write_text(json.dumps(info))
    words = ["encode", project, f"data.datasets={name}", "data.val_size=0"]
    return commands.run(*words, "train.eval_steps=null", *overrides)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_cure_for_rows_works(project, mistake):
    case, said, cured = MISTAKES[mistake]
    done = encode(project, case, "odd")
    assert done.exit_code == 2, done.output
    for words in said:
        assert words in done.output
    assert "write it as text" not in done.output
    assert encode(project, cured, "even").exit_code == 0


def test_a_name_with_blanks_is_refused_until_it_has_none(project):
    file = project.parent / "rows.csv"
    file.write_text("prompt, response\nWhich?,This one.\n")
    words = ["encode", project, f"data.datasets={file}", "data.val_size=0", "train.eval_steps=null"]
    assert "rename it to 'response' in the first line" in commands.refused(*words)
    file.write_text("prompt,response\nWhich?,This one.\n")
    commands.ok(*words)


def test_a_metric_that_evaluations_do_not_have_is_found_before_the_first_step(project):
    words = ["train", project, "train.max_steps=4", "train.eval_steps=4", "data.val_size=4"]
    wrong = commands.refused(*words, "train.metric_for_best_model=eval_los")
    assert "no metric 'eval_los'; expected one of eval_" in wrong
    assert "step=1" not in wrong
    right = "train.metric_for_best_model=eval_token_accuracy"
    commands.ok(*words, right)


def test_what_the_data_and_the_run_cannot_use_is_said_and_can_be_mended(project):
    plain = ["data.val_size=0", "train.eval_steps=null", "train.max_steps=1"]
    batch = ["train.global_batch_size=1000", "train.micro_batch_size=1"]
    wrong = [*batch, "optim.adamw.warmup_steps=50", "optim.adamw.learning_rate=10"]
    said = [
        "train.global_batch_size: 1,000 is more than there is to train on",
        "warmup_steps 50 is more than the 1 step of the run",
        "learning_rate 10 is far above usual ones",
    ]
    planned = commands.ok("plan", project, *plain, *wrong)
    assert "each of 24 × 1 example" in planned
    for command in ("plan", "train"):
        done = " ".join(commands.run(command, project, *plain, *wrong).output.split())
        assert [words for words in said if words not in done] == [], done
    right = ["train.global_batch_size=24", "train.micro_batch_size=4"]
    done = commands.run("train", project, *plain, *right, f"train.output_dir={project.parent}/b")
    assert done.exit_code == 0
    assert not any(words in done.output for words in said)


def test_a_method_in_place_of_the_files_is_said_with_its_rate(project):
    words = ["recipe", "show", project, "method.lora.rank=4"]
    said = commands.run(*words).stderr
    assert "method: lora in place of the recipe's full and its settings; the learning rate" in said
    assert "in place of" not in commands.run(*words, "optim.adamw.learning_rate=1e-4").stderr
    said = commands.run("recipe", "show", project, "optim=lion").stderr
    assert "optim: lion in place of the recipe's adamw and its settings" in said


def test_pretraining_on_conversations_is_said(project):
    words = ["train", project, "data.val_size=0", "train.eval_steps=null", "train.max_steps=1"]
    said = commands.run(*words, "stage=pt").stderr
    assert "its rows are conversations, and this stage trains on their turns" in said
    assert "stage: sft trains on the responses" in said


def test_blocks_that_a_run_never_trains_are_said(project):
    words = ["train", project, "data.val_size=0", "train.eval_steps=null", "train.max_steps=1"]
    wrong, right = "method.badam.switch_interval=50", "method=full"
    assert "are in no block that the 1 step" in commands.run(*words, wrong).stderr
    elsewhere = f"train.output_dir={project.parent}/b"
    assert "in no block" not in commands.run(*words, right, elsewhere).stderr


def test_a_hub_that_cannot_be_reached_names_the_command_that_helps(project, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wrong = commands.refused("encode", project, "model.path=nobody/nothing")
    assert DOWNLOAD in wrong
    assert "surefoot download" in DOWNLOAD
    commands.ok("download", "--help")
