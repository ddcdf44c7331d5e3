"""Responses as plain lists of ids."""

import pytest

from surefoot.generate import generation
from surefoot.generate.responses import Chooser


def sample(model, prompts, section, *, stop_token_ids, decode=None, **options):
    """The responses by the index of the prompt."""
    chooser = Chooser(section, frozenset(stop_token_ids), decode)
    return generation.sample(model, prompts, chooser, **options)


def answer(model, prompts, section, **options):
    """The response to every prompt, without the stop token; empty if another replica's."""
    found = sample(model, prompts, section, **options)
    return [list(found[i].text_ids) if i in found else [] for i in range(len(prompts))]


def near(found, expected):
    """Whether responses have equal tokens, and log-probabilities that are equal up to roundings:
    on some processors, a row has other bits beside other rows."""
    assert [one.ids for one in found] == [one.ids for one in expected]
    return all(
        one.logps == pytest.approx(other.logps, rel=0, abs=1e-5)
        for one, other in zip(found, expected, strict=True)
    )
