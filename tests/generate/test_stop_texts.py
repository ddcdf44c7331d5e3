"""A stop text ends a response at whatever token boundary, and is never shown."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from answering import keeps_bits, near, sample
from each import some
from surefoot.generate import generation
from surefoot.generate.responses import TextUntil, decoder
from surefoot.generate.section import GenerateSection, with_options
from tiny import model
from zoo import architectures

PARTS = [b"a", b"b", b"c", b"ab", b"bca", b"\n", b"\n\n", "é".encode(), "ab—".encode()]
PARTS += [b"c\xe2", b"\x80\x94", b"\xe2\x80", b"\n\xc3", b"\xa9a", b"\xff"]  # parts of characters
NAMES = ["<unk>", "▁a", "▁b", "c", "▁", "ab", "▁ca", *(f"<0x{n:02X}>" for n in range(256))]
CHUNKS = [[n] for n in range(1, 7)] + [[7 + n for n in text.encode()] for text in "aé—\n"]
STOPS = st.lists(st.text("abc\né— ", min_size=1, max_size=4), min_size=1, max_size=3)


def byte_level():
    """Tokens of several bytes, some of which end or begin within a character."""
    letters = bytes_to_unicode()
    vocabulary = {"".join(letters[byte] for byte in part): i for i, part in enumerate(PARTS)}
    rust = Tokenizer(models.BPE(vocabulary, []))
    rust.decoder = decoders.ByteLevel()
    return decoder(PreTrainedTokenizerFast(tokenizer_object=rust))


def sentencepiece():
    """Words that carry the space before them, the first of which is stripped; else bytes."""
    vocabulary = {name: i for i, name in enumerate(NAMES)}
    rust = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return decoder(PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>"))


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def by_definition(decode, ids, stop):
    """How many ids there are when their text first contains a stop text, and the text before."""
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        if found := [text.index(one) for one in stop if one in text]:
            return count, text[: min(found)]
    return None


def streamed(decode, ids, stop):
    """The same, and what was shown after each id."""
    until, shown = TextUntil(decode, stop), [""]
    for count, token in enumerate(ids, 1):
        has_ended = until.push(token)
        shown.append(shown[-1] + until.pop())
        if has_ended:
            return (count, until.text), [*shown, shown[-1] + until.end()]
    return None, [*shown, shown[-1] + until.end()]


def assert_as_defined(decode, ids, stop):
    expected = by_definition(decode, ids, stop)
    found, shown = streamed(decode, ids, stop)
    assert found == expected
    whole = decode(ids) if expected is None else expected[1]
    assert shown[-1] == whole
    assert all(whole.startswith(text) for text in shown)


@given(st.lists(st.integers(0, len(PARTS) - 1), max_size=12), STOPS)
def test_byte_level_tokens_end_where_the_text_first_contains_a_stop_text(ids, stop):
    assert_as_defined(BYTE_LEVEL, ids, stop)


@given(st.lists(st.sampled_from(CHUNKS), max_size=8), STOPS)
def test_words_and_bytes_end_where_the_text_first_contains_a_stop_text(chunks, stop):
    assert_as_defined(SENTENCEPIECE, [i for chunk in chunks for i in chunk], stop)


def test_a_stop_text_is_found_before_the_next_character_is_whole():
    until = TextUntil(BYTE_LEVEL, ["\n"])
    assert not until.push(0)
    assert until.push(PARTS.index(b"\n\xc3"))
    assert until.text == "a"


def test_what_may_be_its_beginning_is_shown_once_it_is_not():
    until = TextUntil(BYTE_LEVEL, ["abb", "bcc"])
    pieces = []
    for part in (b"a", b"b", b"c", b"c"):
        until.push(PARTS.index(part))
        pieces.append(until.pop())
    assert pieces == ["", "", "a", ""]
    assert (until.text, until.has_ended) == ("a", True)


PROMPTS = [[5, 9, 11], [7], [20, 21, 22, 23, 24, 25, 26, 3, 17, 4, 40, 41], [3, 4], [5, 9, 11]]
SYLLABLES = ["ba", "na", "n", "ana", "b", "an"]


def spell(ids):
    return "".join(SYLLABLES[i % len(SYLLABLES)] for i in ids)


def section(**settings):
    return GenerateSection(**{"max_new_tokens": 14, "batch_size": 3, **settings})


def cut(free, stop):
    """What a response without stop texts becomes with them."""
    found = by_definition(spell, free.text_ids, stop)
    if found is None:
        return free
    count, text = found
    return dataclasses.replace(
        free,
        ids=free.ids[:count],
        logps=free.logps[:count],
        log_masses=free.log_masses[:count],
        finish_reason="stop",
        text_before_stop=text,
    )


KINDS = {
    "slots": lambda: model("qwen3", intermediate_size=64),
    "batches": lambda: architectures.build("mamba").eval(),
    "alone": lambda: architectures.build("rwkv").eval(),
}
SETTINGS = [{}, {"do_sample": True, "temperature": 0.9, "top_k": 20}]


@pytest.fixture(scope="module", params=KINDS)
def network(request):
    return KINDS[request.param]()


@pytest.mark.parametrize("settings", some(SETTINGS, SETTINGS[1:]), ids=["greedy", "sampled"])
def test_a_response_is_that_without_stop_texts_cut_before_the_first_of_them(network, settings):
    asked = {"stop_token_ids": [2], "seed": 3}
    free = sample(network, PROMPTS, section(**settings), **asked)
    *_, short, long = sorted((spell(one.text_ids) for one in free.values()), key=len)
    stop = (short[7:11], long[9:13], "never")
    expected = {index: cut(one, stop) for index, one in free.items()}
    found = sample(network, PROMPTS, section(stop=stop, **settings), decode=spell, **asked)
    assert {i: one.ids for i, one in found.items()} == {i: x.ids for i, x in expected.items()}
    for index, one in found.items():
        assert one.finish_reason == expected[index].finish_reason
        assert one.text_before_stop == expected[index].text_before_stop
        assert one.logps == pytest.approx(expected[index].logps, abs=1e-5)
        assert not any(text in one.text(spell) for text in stop)
    assert sum(one.finish_reason == "stop" for one in found.values()) >= 2


def test_a_response_with_stop_texts_is_the_same_whatever_is_beside_it():
    network = KINDS["slots"]()
    prompts = [[n, n * n % 64, 7][: 1 + n % 3] for n in range(9)]
    asked = {"stop_token_ids": [2], "decode": spell, "seed": 5}

    def sampled(prompts, size):
        settings = section(
            do_sample=True, stop=("nab", "ananb"), batch_size=size, batch_invariant=True
        )
        return sample(network, prompts, settings, **asked)

    whole = sampled(prompts, 9)
    assert {one.text_before_stop is None for one in whole.values()} == {True, False}
    expected, same_bits = [whole[i] for i in range(9)], keeps_bits(network, 40)
    for size in (1, 2):
        found = sampled(prompts, size)
        assert near([found[i] for i in range(9)], expected, same_bits=same_bits)
    alone = [sampled([prompt], 1)[0] for prompt in prompts]
    assert near(alone, expected, same_bits=same_bits)


def test_rows_that_have_ended_are_not_computed(network):
    free = sample(network, PROMPTS, section(), stop_token_ids=[])
    stop = tuple(spell(one.ids[:2]) for one in free.values())
    calls = []
    handle = network.register_forward_pre_hook(lambda *_: calls.append(1))
    found = sample(network, PROMPTS, section(stop=stop), stop_token_ids=[], decode=spell)
    handle.remove()
    assert all(len(one.ids) <= 2 for one in found.values())
    assert len(calls) <= 3 * len(PROMPTS)


def test_a_stop_text_at_the_last_token_is_why_it_ended(network):
    free = sample(network, [[5, 9]], section(max_new_tokens=30), stop_token_ids=[])[0]
    stop, count = (spell(free.ids)[-6:],), by_definition(spell, free.ids, [spell(free.ids)[-6:]])[0]
    found = sample(
        network,
        [[5, 9]],
        section(max_new_tokens=count, stop=stop),
        stop_token_ids=[],
        decode=spell,
    )[0]
    assert (found.finish_reason, len(found.ids)) == ("stop", count)


def test_a_stop_token_that_is_spelled_like_a_stop_text_is_a_stop_token():
    network = KINDS["slots"]()
    free = sample(network, [[5, 9]], section(), stop_token_ids=[])[0]
    end = free.ids[4]
    told = {"stop_token_ids": [end], "decode": lambda ids: "".join(f"<{i}>" for i in ids)}
    found = sample(network, [[5, 9]], section(stop=(f"{end}>",)), **told)[0]
    assert (found.finish_reason, found.text_before_stop) == ("stop", None)
    assert found.text_ids == free.ids[: free.ids.index(end)]


def test_a_stream_shows_no_part_of_a_stop_text(network):
    told = {"stop_token_ids": [], "decode": spell}
    free = spell(sample(network, [[5, 9]], section(), stop_token_ids=[])[0].ids)
    stop = (free[7:12], free[3:6] + "x")
    pieces = []
    found = generation.stream(network, [5, 9], section(stop=stop), on_text=pieces.append, **told)
    assert found.finish_reason == "stop"
    assert "".join(pieces) == found.text_before_stop == free[: free.index(stop[0])]
    assert found == sample(network, [[5, 9]], section(stop=stop), **told)[0]
    pieces.clear()
    generation.stream(network, [5, 9], section(stop=("x",)), on_text=pieces.append, **told)
    assert "".join(pieces) == free


def test_an_empty_text_is_refused_and_so_are_texts_where_only_tokens_end_a_response():
    with pytest.raises(ValueError, match="stop must not contain an empty text"):
        GenerateSection(stop=("a", ""))
    with pytest.raises(ValueError, match=r"generate\.stop has no effect here"):
        sample(KINDS["slots"](), [[5]], section(stop=("a",)), stop_token_ids=[])


def test_options_replace_the_stop_texts_of_a_recipe():
    before = GenerateSection(stop=("a",))
    assert with_options(before, {"stop": None}) == before
    assert with_options(before, {"stop": ("b", "c")}).stop == ("b", "c")
    assert with_options(before, {"stop": (), "greedy": True}).stop == ()
