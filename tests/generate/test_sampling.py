"""The generate section in transformers' words."""

import pytest

from surefoot.generate.generation import generation_config, padding
from surefoot.generate.section import GenerateSection


def test_greedy_says_nothing_about_temperature():
    config = generation_config(GenerateSection(), max_new_tokens=7, stop_token_ids=[2])
    assert (config.do_sample, config.max_new_tokens, config.eos_token_id) == (False, 7, [2])
    assert config.temperature is config.top_p is config.top_k is None


def test_sampling_says_all_of_it():
    section = GenerateSection(do_sample=True, temperature=0.7, top_p=0.9, top_k=5)
    config = generation_config(section, max_new_tokens=7, stop_token_ids=[2, 3])
    assert (config.temperature, config.top_p, config.top_k) == (0.7, 0.9, 5)
    assert config.eos_token_id == [2, 3]


@pytest.mark.parametrize(("stops", "expected"), [([], 0), ([5, 6], 5)])
def test_any_known_id_will_do_as_padding(stops, expected):
    assert padding(stops) == expected
