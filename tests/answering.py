"""Responses as plain lists of ids."""

from surefoot.generate.generation import sample


def answer(model, prompts, section, **options):
    """The response to every prompt, without the stop token; empty if another replica's."""
    found = sample(model, prompts, section, **options)
    return [list(found[i].text_ids) if i in found else [] for i in range(len(prompts))]
