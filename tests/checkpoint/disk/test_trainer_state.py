"""The log of a run, whoever wrote it and whatever is in it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.disk.folder import TrainerStateFile, load_trainer_state
from surefoot.errors import CheckpointError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
FIELDS = ("global_step", "best_global_step", "best_model_checkpoint", "log_history", "loss")


@given(
    st.dictionaries(
        st.sampled_from(FIELDS),
        JSON | st.lists(st.fixed_dictionaries({"loss": JSON, "step": JSON})),
    )
)
def test_nothing_in_it_makes_the_reader_fall(raw):
    state = TrainerStateFile.of(raw)
    assert state.step is None or state.step >= 0
    assert isinstance(state.last("loss"), float | None)
    assert isinstance(state.at("loss", 3), float | None)


def test_the_last_loss_and_the_one_of_a_step():
    history = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2}, {"step": 2, "eval_loss": 1.0}, 7]
    state = TrainerStateFile.of({"log_history": history})
    assert (state.last("loss"), state.at("loss", 1), state.at("eval_loss", 1)) == (2.0, 3.0, None)
    assert state.at("loss", None) is None and state.last("none") is None


@pytest.mark.parametrize(
    ("raw", "step"),
    [
        ({"best_global_step": 5, "best_model_checkpoint": "x/checkpoint-6"}, 5),
        ({"best_model_checkpoint": "/gone/run/checkpoint-6"}, 6),
        ({"best_model_checkpoint": "/gone/run/model"}, None),
        ({"best_global_step": True}, None),
        ({}, None),
    ],
)
def test_the_best_step(raw, step):
    assert TrainerStateFile.of(raw).best_step == step


def test_numbers_that_json_does_not_know_are_read(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"a": NaN, "b": -Infinity}')
    found = load_trainer_state(tmp_path)
    assert json.dumps(found) == '{"a": NaN, "b": -Infinity}'
    (tmp_path / "trainer_state.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        load_trainer_state(tmp_path)
