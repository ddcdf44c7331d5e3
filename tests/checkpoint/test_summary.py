"""What checkpoints say of themselves, damaged ones included."""

import json

import pytest
import torch
from safetensors.torch import save_file

from surefoot.checkpoint.commit import aside
from surefoot.checkpoint.save import save
from surefoot.checkpoint.listing import list_run
from surefoot.checkpoint.summary import summarise
from surefoot.errors import CheckpointError

from .sample import Holder, sample_states


def trainer_state(loss, best=None):
    state = {
        "log_history": [{"loss": 9.0}, {"loss": loss}, {"eval_loss": 1.0}],
        "best_global_step": best,
    }
    return {"trainer_state.json": json.dumps(state).encode()}


def test_a_run_is_listed_oldest_first_with_what_is_wrong_last(tmp_path):
    for step, loss in ((5, 2.0), (10, 1.5), (100, 1.25)):
        save(tmp_path, step, sample_states(), kind="full", companions=trainer_state(loss, best=10))
    (tmp_path / "checkpoint-200").mkdir()
    (tmp_path / ".checkpoint-300.0a.part").mkdir()
    (tmp_path / "checkpoint-100" / "state.json").write_text("{}")
    lines = list_run(tmp_path)
    assert [line.path.name for line in lines] == [
        "checkpoint-5", "checkpoint-10", "checkpoint-100", "checkpoint-200",
        ".checkpoint-300.0a.part",
    ]  # fmt: skip
    assert [line.step for line in lines] == [5, 10, 100, 200, None]
    assert [line.loss for line in lines] == [2.0, 1.5, 1.25, None, None]
    assert [line.is_best for line in lines] == [False, True, False, False, False]
    assert [line.problem is None for line in lines] == [True, True, False, False, False]
    assert lines[2].problem.startswith("state.json: 2 of ")
    assert lines[3].problem == "this checkpoint was never committed: it has no manifest.json"
    files = (tmp_path / "checkpoint-5").iterdir()
    assert lines[0].num_bytes == sum(p.stat().st_size for p in files if p.name != "manifest.json")
    assert lines[0].kind == "full" and lines[0].created.endswith("Z")


def test_a_save_in_progress_is_no_leftover(tmp_path):
    with aside(tmp_path / "checkpoint-5") as part:
        (line,) = list_run(tmp_path)
        assert line.path == part.folder and line.is_being_written and line.problem is None
        part.commit(tmp_path / "checkpoint-5", b"{}")  # looking on has not disturbed it
    (line,) = list_run(tmp_path)
    assert not line.is_being_written


def test_a_missing_file_and_a_damaged_manifest_are_told(tmp_path):
    one, two = (save(tmp_path, step, sample_states(), kind="full") for step in (1, 2))
    (one / "model.safetensors").unlink()
    (two / "manifest.json").write_bytes((two / "manifest.json").read_bytes()[:-9])
    problems = [line.problem for line in list_run(tmp_path)]
    assert problems[0] == "model.safetensors: missing"
    assert "not valid JSON" in problems[1]


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b'{"log_history": 1}', b'{"log_history": [{"loss": "x"}, 3]}', b"{}"]
)
def test_a_strange_trainer_state_is_no_problem(tmp_path, text):
    save(tmp_path, 1, sample_states(), kind="full", companions={"trainer_state.json": text})
    (line,) = list_run(tmp_path)
    assert (line.loss, line.is_best, line.problem) == (None, False, None)


def test_a_checkpoint_is_a_list_of_itself(tmp_path):
    folder = save(tmp_path, 1, sample_states(), kind="adapter")
    (line,) = list_run(folder)
    assert line.path == folder and line.kind == "adapter"
    assert list_run(tmp_path / "checkpoint-1" / "..") != []


def test_a_checkpoint_in_words(tmp_path):
    states = {
        **sample_states(),
        "many": Holder({f"k{i}": i for i in range(9)}),
        "list": Holder([1, 2]),
        "empty": Holder({}),
        "wide": Holder({"x" * 99: 1}),
        "long": Holder(dict.fromkeys(range(90), "x")),
    }
    summary = summarise(save(tmp_path, 7, states, kind="full", parent="checkpoint-3"))
    assert summary.layout == "native"
    assert summary.facts["step"] == "7" and summary.facts["parent"] == "checkpoint-3"
    assert [group.role for group in summary.groups] == ["model", "optimizer", "state"]
    model = summary.groups[0]
    assert model.num_elements == sum(t.numel() for t in states["model"].state.values())
    assert model.num_bytes == sum(t.nbytes for t in states["model"].state.values())
    assert model.dtypes == {"F32": 2, "BF16": 1, "BOOL": 1}
    assert summary.states["loader"] == "epoch, index, seed"
    assert summary.states["list"] == "[1, 2]" and len(summary.states["long"]) == 60
    assert summary.states["many"] == "k0, k1, k2, k3, k4, k5, k6, k7, k8"
    assert summary.states["optimizer"].endswith("… (4 entries)")
    assert summary.states["empty"] == "{}" and summary.states["wide"] == "1 entries"


def test_a_model_of_others_in_words(shared):
    summary = summarise(shared / "models" / "stories260k")
    assert summary.layout == "huggingface"
    assert summary.facts["architectures"] == "LlamaForCausalLM"
    (model,) = summary.groups
    assert model.num_elements == 260_032
    assert "tokenizer.json" in summary.files


def test_an_adapter_in_words(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 8, "target_modules": ["q", "v"]}'
    )
    summary = summarise(tmp_path)
    assert summary.layout == "peft"
    assert summary.facts == {"peft_type": "LORA", "r": "8", "target_modules": "q, v"}


def test_what_is_no_folder_of_weights_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights"):
        summarise(tmp_path)
    assert list_run(tmp_path) == []
