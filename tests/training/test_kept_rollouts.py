"""Rollouts that an evaluation keeps: read as they were written, and no stale ones after them."""

import pytest

from surefoot.errors import RunError
from surefoot.training.kept_rollouts import KeptRollout, KeptRollouts, KeptToken, read


def kept(folder, response="It is 2."):
    made = KeptRollouts(folder)
    token = KeptToken(1, response, -0.5, -0.5)
    rollout = KeptRollout("", "a:0", 0, "1+1?", [3], response, "stop", {}, 1.0, 0.5, [token])
    made.begin()
    made._current.append(rollout)
    made.end("a")
    return made


@pytest.mark.parametrize("text", ["\u2028", "\x85", "a\nb", "\x1c", "é"])
def test_responses_with_any_line_break_are_read_again(text, tmp_path):
    kept(tmp_path, text).write(5)
    (found,) = read(tmp_path / "rollouts-5.jsonl")
    assert (found.response, found.dataset) == (text, "a")


def test_other_rollouts_end_those_of_later_steps(tmp_path):
    """A run from scratch in the folder of another, or one that was rolled back."""
    for step in (10, 50):
        kept(tmp_path).write(step)
    kept(tmp_path).write(10)  # repeated after a resume: the same
    assert (tmp_path / "rollouts-50.jsonl").exists()
    kept(tmp_path, "another").write(40)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rollouts-10.jsonl",
        "rollouts-40.jsonl",
    ]


def test_a_file_of_something_else_is_said(tmp_path):
    (tmp_path / "rollouts-5.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match=r"rollouts-5\.jsonl: no rollouts of a run"):
        read(tmp_path / "rollouts-5.jsonl")
