"""The state of the loop: what is saved of it."""

import pytest

from surefoot.training.callback import Kernels, TrainerState

STEPS = (1, None, 5)  # log_steps, eval_steps, save_steps


def test_a_state_is_read_back_as_it_was_but_for_the_length_of_the_run():
    state = TrainerState(global_step=3, max_steps=9, skipped_windows=[(0, 2)])
    state.kernels = Kernels("varlen", False)
    found = TrainerState(max_steps=12)
    found.load_state_dict(state.state_dict())
    state.max_steps = 12
    assert found == state


@pytest.mark.parametrize(
    ("saved", "kernels"),
    [
        ({"kernels": {"packed_attention": "flex"}}, Kernels("flex")),
        ({}, Kernels()),
    ],
)
def test_the_kernels_of_older_checkpoints_are_kept(saved, kernels):
    state = TrainerState(kernels=Kernels("sdpa", False))
    state.load_state_dict({"global_step": 1, **saved})
    assert state.kernels == kernels


def test_trainer_state_json_has_the_fields_of_the_hugging_face_trainer_alone():
    state = TrainerState(kernels=Kernels("sdpa", True), train_runtime=2.0)
    written = state.for_people(STEPS, None)
    assert "kernels" not in written
    assert not {"train_runtime", "pending", "skipped_windows", "interval_loss"} & written.keys()
    assert written["save_steps"] == 5


def test_a_resumed_rank_is_the_one_it_is_not_the_one_that_saved():
    saved = TrainerState(global_step=3).state_dict()
    state = TrainerState(is_local_process_zero=False, is_world_process_zero=False)
    state.load_state_dict(saved)
    assert (state.global_step, state.is_local_process_zero, state.is_world_process_zero) == (
        3,
        False,
        False,
    )
