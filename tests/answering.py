"""Responses as plain lists of ids."""

from dataclasses import replace

import pytest
import torch

from surefoot.generate import generation
from surefoot.generate._proof import driver_of
from surefoot.generate._slots import masked_attention
from surefoot.generate.onednn import onednn_products
from surefoot.generate.responses import Chooser


def sample(model, prompts, section, *, stop_token_ids, decode=None, **options):
    """The responses by the index of the prompt."""
    chooser = Chooser(section, frozenset(stop_token_ids), decode)
    return generation.sample(model, prompts, chooser, **options)


def answer(model, prompts, section, **options):
    """The response to every prompt, without the stop token; empty if another replica's."""
    found = sample(model, prompts, section, **options)
    return [list(found[i].text_ids) if i in found else [] for i in range(len(prompts))]


@torch.no_grad()
def keeps_bits(model, longest):
    """Whether this processor gives a row the same bits alone, among equal rows, and beside one of
    up to ``longest`` tokens, with the products that sampling has."""
    driver = replace(driver_of(model, longest), batch_invariant=True)
    vocabulary = driver.inner.config.get_text_config().vocab_size
    short, long = ([(7 * n + 3) % vocabulary for n in range(min(m, longest))] for m in (5, 40))
    logits = []
    with masked_attention(driver.inner), onednn_products(driver.model):
        prefixes = [*driver.prefill([short]), *driver.prefill([short] * 3)]
        beside = [(long, driver.prefill([long])[0])]
        for count, others in ((4, []), (1, []), (9, beside)):
            rows = [*((short, prefixes[n % 4]) for n in range(count)), *others]
            cache = driver.slots(len(rows), len(long), len(long))
            for slot, (_, prefix) in enumerate(rows):
                cache.put(slot, prefix)
            tokens, positions = zip(*((ids[-1], len(ids) - 1) for ids, _ in rows), strict=True)
            logits += driver.decode(cache, tokens, positions)[:count]
    return all(torch.equal(row, logits[0]) for row in logits)


def near(found, expected, *, same_bits):
    """Whether responses have equal tokens, and log-probabilities with the same bits where the
    processor gives a row the same bits beside others, up to roundings where it does not."""
    if same_bits:
        return found == expected
    assert [one.ids for one in found] == [one.ids for one in expected]
    return all(
        one.logps == pytest.approx(other.logps, rel=0, abs=1e-5)
        for one, other in zip(found, expected, strict=True)
    )
