"""Responses as plain lists of ids."""

from surefoot.generate import generation
from surefoot.generate.choosing import Chooser


def sample(model, prompts, section, *, stop_token_ids, decode=None, **options):
    """The responses by the index of the prompt."""
    chooser = Chooser(section, frozenset(stop_token_ids), decode)
    return generation.sample(model, prompts, chooser, **options)


def answer(model, prompts, section, **options):
    """The response to every prompt, without the stop token; empty if another replica's."""
    found = sample(model, prompts, section, **options)
    return [list(found[i].text_ids) if i in found else [] for i in range(len(prompts))]
