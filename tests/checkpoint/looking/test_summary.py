"""What checkpoints say of themselves, damaged ones included."""

import pytest
import torch
from safetensors.torch import save_file

from surefoot.checkpoint.looking.listing import list_run
from surefoot.checkpoint.looking.summary import summarise
from surefoot.checkpoint.saving.preparation import save
from surefoot.errors import CheckpointError

from ..sample import Holder, sample_states


def test_a_checkpoint_in_words(tmp_path):
    states = {
        **sample_states(),
        "many": Holder({f"k{i}": i for i in range(9)}),
        "list": Holder([1, 2]),
        "empty": Holder({}),
        "wide": Holder({"x" * 99: 1}),
        "long": Holder(dict.fromkeys(range(90), "x")),
    }
    summary = summarise(save(tmp_path, 7, states, parent="checkpoint-3"))
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
    assert summary.pickles == []
    assert summary.states["empty"] == "{}" and summary.states["wide"] == "1 entry"


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


def test_a_damaged_log_says_nothing_against_the_weights(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 7}')
    assert summarise(tmp_path).facts == {"step": "7"}
    (tmp_path / "trainer_state.json").write_text('{"global_step": 7')
    summary = summarise(tmp_path)
    assert "not valid JSON" in summary.facts["log"] and summary.states == {}
    assert len(summary.groups[0].tensors) == 1


def test_what_is_no_folder_of_weights_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="contains no weights"):
        summarise(tmp_path)
    assert list_run(tmp_path) == []
