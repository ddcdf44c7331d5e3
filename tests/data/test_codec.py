"""Messages to ids and labels: what is learnt, what is cut, and that chat sees the same."""

import ast
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

import tiny_tokenizers
from folders import CHATML
from source_trees import SRC, TREES
from surefoot.batch import IGNORE_INDEX
from surefoot.data.example import Dropped, Example, Message, Truncated
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import bundled, load_template, section_template
from surefoot.errors import TemplateError

TOOL = {"name": "add", "description": "Add", "parameters": {"type": "object", "properties": {}}}


def chat(*turns, system=None, **options):
    """An example of turns that are said by user and assistant in turn; empty responses are to be
    trained on."""
    messages = [
        Message("assistant", text, learn=None if text.strip() else True)
        if i % 2
        else Message("user", text)
        for i, text in enumerate(turns)
    ]
    if system is not None:
        messages.insert(0, Message("system", system))
    return Example(tuple(messages), **options)


def codec(template="chatml", kind="qwen", **section):
    tokenizer = tiny_tokenizers.tokenizer(kind)
    return Codec(
        tokenizer,
        load_template(template, tokenizer) if template else None,
        DataSection(datasets=("any",), **section),
    )


def only(encoded):
    """The one item of an outcome, cut or not."""
    items = encoded.features if isinstance(encoded, Truncated) else encoded
    (item,) = items
    return item


@pytest.mark.parametrize(
    "arguments",
    [{"enable_thinking": False}, {"enable_thinking": True}, {"reasoning_effort": "low"}, {}],
)
@pytest.mark.parametrize("recipe", [{}, {"enable_thinking": False}])
def test_arguments_of_a_row_reach_the_template(arguments, recipe):
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    head = "<|im_start|>system\n{{ enable_thinking | default(true) }} {{ reasoning_effort }}"
    tokenizer = tiny_tokenizers.tokenizer("qwen")
    tokenizer.chat_template = head + "<|im_end|>\n" + source
    section = DataSection(datasets=("any",), **recipe)
    made = Codec(tokenizer, section_template(section, tokenizer), section)
    examples = [chat("q", "a", template_arguments=arguments), chat("q", "a"), chat("q", "a")]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for example, encoded in zip(examples, made.encode_chats(examples), strict=True):
        wanted = tokenizer.apply_chat_template(
            messages, return_dict=False, **{**recipe, **example.template_arguments}
        )
        assert only(encoded)["input_ids"] == wanted
        assert learnt(made, only(encoded)) == ["a<|im_end|>"]
        wanted = tokenizer.apply_chat_template(
            messages[:1],
            add_generation_prompt=True,
            return_dict=False,
            **{**recipe, **example.template_arguments},
        )
        assert only(made.encode_prompts([example])[0])["input_ids"] == wanted


def test_a_row_that_does_not_think_has_no_thought():
    made = codec("qwen3")
    said = "<think>\nHm.\n</think>\n\na"
    (one,) = made.encode_chats([chat("q", said, template_arguments={"enable_thinking": False})])
    section = DataSection(datasets=("any",), template="qwen3", enable_thinking=False)
    quiet = Codec(made.tokenizer, section_template(section, made.tokenizer), section)
    (other,) = quiet.encode_chats([chat("q", said)])
    assert one == other


def test_arguments_that_a_template_does_not_use_are_known_and_others_refused():
    made = codec()
    plain, other = chat("q", "a"), chat("q", "a", template_arguments={"enable_thinking": True})
    (wanted, found) = made.encode_chats([plain, other])
    assert found == wanted
    assert not made.reads("enable_thinking", "arguments")
    (refused,) = made.encode_chats([chat("q", "a", template_arguments={"messages": []})])
    assert refused == Dropped("chat_template_kwargs: 'messages' is no argument of a row")


def test_arguments_with_which_no_response_can_be_located_cost_that_row_only():
    tokenizer = tiny_tokenizers.tokenizer("qwen")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {{ start }}{% endif %}"
    )
    section = DataSection(datasets=("any",))
    made = Codec(tokenizer, section_template(section, tokenizer), section)
    dropped, trained = made.encode_chats(
        [chat("q", "a", template_arguments={"start": "So: "}), chat("q", "a")]
    )
    assert "the response cannot be located" in dropped.reason
    assert learnt(made, only(trained)) == ["a<|im_end|>"]


def learnt(made, item):
    """The text of each stretch of labels."""
    pieces, before = [], IGNORE_INDEX
    for token, label in zip(item["input_ids"], item["labels"], strict=True):
        assert label in (IGNORE_INDEX, token)
        if label != IGNORE_INDEX:
            if before == IGNORE_INDEX:
                pieces.append([])
            pieces[-1].append(token)
        before = label
    return [made.tokenizer.decode(piece) for piece in pieces]


def encode(made, example):
    return made.encode_chats([example])[0]


# -- what is learnt


def test_every_answer_is_learnt_with_its_end_of_turn_token_and_nothing_else():
    made = codec()
    item = only(encode(made, chat("Hi", "Hello!", "Bye", "See you", system="Be kind")))
    assert learnt(made, item) == ["Hello!<|im_end|>", "See you<|im_end|>"]


def test_mask_history_learns_the_last_answer_only():
    made = codec(mask_history=True)
    assert learnt(made, only(encode(made, chat("a", "one", "b", "two")))) == ["two<|im_end|>"]


def test_train_on_prompt_learns_all_of_the_text():
    made = codec(train_on_prompt=True)
    item = only(encode(made, chat("a", "one", "b", "two")))
    assert item["labels"] == item["input_ids"]


def test_a_message_s_own_word_wins_over_the_recipe():
    messages = (
        Message("user", "a"),
        Message("assistant", "one", learn=False),
        Message("user", "question b", learn=True),
        Message("assistant", "two"),
    )
    made = codec()
    item = only(encode(made, Example(messages)))
    assert learnt(made, item) == ["question b", "two<|im_end|>"]
    made = codec(mask_history=True)
    changed = (messages[0], dataclasses.replace(messages[1], learn=True), *messages[2:])
    item = only(encode(made, Example(changed)))
    assert learnt(made, item) == ["one<|im_end|>", "question b", "two<|im_end|>"]


def test_with_train_on_prompt_a_message_may_be_left_out():
    messages = (
        Message("user", "secret", learn=False),
        Message("assistant", "wrong", learn=False),
        Message("user", "b"),
        Message("assistant", "two"),
    )
    made = codec(train_on_prompt=True)
    text = "".join(learnt(made, only(encode(made, Example(messages)))))
    assert "secret" not in text
    assert "wrong" not in text
    assert text.startswith("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n\n")
    assert text.endswith("two<|im_end|>\n")


@pytest.mark.parametrize("kind", ["llama2", "metaspace", "qwen"])
@pytest.mark.parametrize("template", ["llama2", "vicuna"])
def test_a_message_s_own_word_holds_where_its_first_token_covers_the_space_before_it(
    template, kind
):
    question = Message("user", "secret question", learn=False)
    made = codec(template, kind, train_on_prompt=True)
    item = only(encode(made, Example((question, Message("assistant", "two")))))
    masked = [i for i, label in zip(*item.values(), strict=True) if label == IGNORE_INDEX]
    assert made.tokenizer.decode(masked).strip() == "secret question"

    messages = (dataclasses.replace(question, learn=True), Message("assistant", "b", learn=False))
    made = codec(template, kind)
    assert "".join(learnt(made, only(encode(made, Example(messages))))).strip() == "secret question"


def test_what_follows_the_last_answer_is_left_out():
    made = codec()
    with_tail, without = chat("a", "one", "and then?"), chat("a", "one")
    assert encode(made, with_tail) == encode(made, without)


@pytest.mark.parametrize(
    "example",
    [
        Example(),
        chat("only a question"),
        Example((Message("user", "a"), Message("assistant", "b", learn=False))),
    ],
)
def test_a_conversation_with_nothing_to_learn_is_dropped(example):
    outcome = encode(codec(), example)
    assert isinstance(outcome, Dropped)
    assert "no response to train on" in outcome.reason


def test_a_dropped_example_does_not_disturb_its_neighbours():
    made = codec()
    good = chat("a", "b")
    outcomes = made.encode_chats([good, chat("only a question"), good])
    assert outcomes[0] == outcomes[2] == encode(made, good)
    assert isinstance(outcomes[1], Dropped)


def test_the_recipe_s_system_message_is_for_conversations_without_one():
    made = codec(default_system="Be brief")
    with_default = made.tokenizer.decode(only(encode(made, chat("a", "b")))["input_ids"])
    assert with_default.startswith("<|im_start|>system\nBe brief<|im_end|>")
    own = made.tokenizer.decode(only(encode(made, chat("a", "b", system="Sing")))["input_ids"])
    assert "Be brief" not in own
    assert made.tokenizer.decode(made.encode_prompt([Message("user", "a")])).startswith(
        "<|im_start|>system\nBe brief<|im_end|>"
    )


def test_tools_that_the_template_does_not_write_are_not_lost_in_silence():
    source = (
        "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = tiny_tokenizers.tokenizer(chat_template=source)
    made = Codec(tokenizer, load_template("auto", tokenizer), DataSection(datasets=("any",)))
    assert only(encode(made, chat("a", "b")))
    outcome = encode(made, chat("a", "b", tools=(TOOL,)))
    assert outcome == Dropped("the chat template does not write the tools of a conversation")
    call = Message("assistant", "", ({"name": "add", "arguments": {}},))
    outcome = encode(made, Example((Message("user", "a"), call)))
    assert outcome == Dropped("the chat template does not write the tool calls of a response")


def test_a_template_s_refusal_is_the_reason_of_the_row():
    outcome = encode(codec("mistral"), chat(system="S", tools=(TOOL,)))
    assert outcome == Dropped("no response to train on in this conversation")
    row = Example((Message("system", "S"), Message("assistant", "hello")))
    outcome = encode(codec("mistral"), row)
    assert "first user turn" in outcome.reason


# -- what is cut


LONG = "word " * 40


def test_an_example_of_just_cutoff_len_is_whole():
    made = codec()
    whole = only(encode(made, chat("a", "one", "b", "two")))
    learnable = len(whole["input_ids"]) - 1  # but for the line break behind the last turn
    made = codec(cutoff_len=learnable)
    outcome = encode(made, chat("a", "one", "b", "two"))
    assert not isinstance(outcome, Truncated)
    assert only(outcome)["input_ids"] == whole["input_ids"][:-1]


def test_later_turns_that_do_not_fit_are_cut_whole():
    short, long = chat("a", "one", system="S"), chat("a", "one", "b " + LONG, "two", system="S")
    made = codec(cutoff_len=60)
    outcome = encode(made, long)
    assert isinstance(outcome, Truncated)
    assert only(outcome)["input_ids"] == only(encode(codec(), short))["input_ids"][:-1]
    assert learnt(made, only(outcome)) == ["one<|im_end|>"]


def test_a_first_answer_that_does_not_fit_loses_its_end_and_keeps_its_prompt():
    made = codec(cutoff_len=40)
    example = chat("a", LONG, "b", "two", system="S")
    outcome = encode(made, example)
    assert isinstance(outcome, Truncated)
    item = only(outcome)
    prompt = made.encode_prompt(example.messages[:2])
    assert len(item["input_ids"]) == 40
    assert item["input_ids"][: len(prompt)] == prompt
    (text,) = learnt(made, item)
    assert LONG.startswith(text)
    assert made.stop_token_ids[0] not in item["labels"]


def test_a_prompt_that_leaves_no_room_drops_the_example():
    made = codec()
    prompt = made.encode_prompt(chat("a").messages)
    outcome = encode(codec(cutoff_len=len(prompt)), chat("a", "one"))
    assert isinstance(outcome, Dropped)
    assert "leaves no room" in outcome.reason
    one_token = only(encode(codec(cutoff_len=len(prompt) + 1), chat("a", "one")))
    assert [label for label in one_token["labels"] if label != IGNORE_INDEX] == [
        one_token["input_ids"][-1]
    ]


def test_with_mask_history_the_history_is_never_learnt_instead():
    made = codec(cutoff_len=60, mask_history=True)
    outcome = encode(made, chat("a", "one", "b", LONG + LONG))
    (text,) = learnt(made, only(outcome))
    assert LONG.startswith(text[:50])
    assert isinstance(encode(made, chat("a", "one", "b" + LONG, "two")), Dropped)


def test_on_too_long_drop_drops_what_would_be_cut():
    made = codec(cutoff_len=30, on_too_long="drop")
    outcome = encode(made, chat("a", "one", "b", LONG))
    assert isinstance(outcome, Dropped)
    assert "cutoff_len" in outcome.reason
    assert only(encode(made, chat("a", "one")))


def test_train_on_prompt_is_cut_by_the_same_rule():
    made = codec(cutoff_len=60, train_on_prompt=True)
    outcome = encode(made, chat("a", "one", "b " + LONG, "two"))
    assert isinstance(outcome, Truncated)
    assert made.tokenizer.decode(only(outcome)["labels"]).endswith("one<|im_end|>")
    assert isinstance(encode(made, chat(LONG + LONG, "one")), Dropped)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("ab \n", max_size=12), min_size=2, max_size=8),
    st.integers(8, 80),
    st.sampled_from(["chatml", "alpaca", "llama3"]),
)
def test_a_cut_never_damages_a_frame(turns, length, name):
    whole = made_once(name)
    example = chat(*turns, system="Be kind")
    made = Codec(whole.tokenizer, whole.template, DataSection(datasets=("any",), cutoff_len=length))
    before, after = encode(whole, example), encode(made, example)
    if isinstance(after, Dropped):
        assert all(first_learnt(item) >= length for item in before)
        return
    items = after.features if isinstance(after, Truncated) else after
    for item in items:
        original = next(b for b in before if starts_with(b, item))
        assert len(item["input_ids"]) <= length
        is_end = item["input_ids"][-1] in made.stop_token_ids
        is_whole = len(item["input_ids"]) == len(original["input_ids"])
        is_first = item["labels"].index(item["labels"][-1]) >= first_learnt(original)
        assert is_whole or is_end or (is_first and len(item["input_ids"]) == length)


def first_learnt(item):
    return next(i for i, label in enumerate(item["labels"]) if label != IGNORE_INDEX)


def starts_with(whole, part):
    size = len(part["input_ids"])
    return all(whole[key][:size] == part[key] for key in ("input_ids", "labels"))


# -- what chat sees


_CODECS = {}


def made_once(name, kind="qwen"):
    if (name, kind) not in _CODECS:
        _CODECS[name, kind] = codec(name, kind)
        _CODECS[name, kind].tokenizer.chat_template = _CODECS[name, kind].template.source
    return _CODECS[name, kind]


ODD = st.one_of(
    st.text(max_size=12),
    st.text(" \n\t\r\u00a0\u3000ab1'", max_size=8),
    st.sampled_from(
        ["", "🙂", "é\u0301", "\u200d\ufeff", "\U000f0000x\U000f0001", "12345", "#\n\n"]
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(ODD, min_size=2, max_size=6),
    st.sampled_from(sorted(bundled())),
    st.sampled_from(sorted(tiny_tokenizers.KINDS)),
)
def test_odd_texts_are_learnt_behind_the_ids_that_chat_gives(turns, name, kind):
    made = made_once(name, kind)
    example = chat(*turns)
    prompts = {}
    for i in range(1, len(turns), 2):
        dicts = [{"role": m.role, "content": m.content} for m in example.messages[:i]]
        prompts[i] = made.tokenizer.apply_chat_template(
            dicts, add_generation_prompt=True, return_dict=False
        )
        assert made.encode_prompt(example.messages[:i]) == prompts[i]
    outcome = encode(made, example)
    assert not isinstance(outcome, Truncated | Dropped)
    check_labels(made, outcome, prompts)


def check_labels(made, items, prompts):
    """Labels are the answers behind the prompts, each once, up to the token that ends it."""
    taught = []
    for item in items:
        ids, labels = item["input_ids"], item["labels"]
        expected = [IGNORE_INDEX] * len(ids)
        for i, prompt in prompts.items():
            start = len(prompt)
            if ids[:start] == prompt and start < len(ids) and labels[start] != IGNORE_INDEX:
                end = next(p for p in range(start, len(ids)) if ids[p] in made.stop_token_ids) + 1
                expected[start:end] = ids[start:end]
                taught.append(i)
        assert labels == expected
    assert sorted(taught) == sorted(prompts)


CONTROL = ["<|im_end|>", "<|im_start|>", "</s>", "<s>", "<|eot_id|>", "<end_of_turn>"]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([*CONTROL, "a", " ", "\n", "<|im", "_end|>"]), max_size=4).map(
            "".join
        ),
        min_size=2,
        max_size=4,
    ),
    st.sampled_from(["chatml", "llama3", "gemma", "mistral"]),
    st.sampled_from(sorted(tiny_tokenizers.KINDS)),
)
def test_no_message_writes_a_control_token(turns, name, kind):
    made = made_once(name, kind)
    frames = encode(made, chat(*("x" for _ in turns)))[-1]["input_ids"]
    example = chat(*turns)
    outcome = encode(made, example)
    assert not isinstance(outcome, Truncated | Dropped)
    control = set(made.stop_token_ids) | {made.tokenizer.bos_token_id}
    for item in outcome:
        found = [token for token in item["input_ids"] if token in control]
        expected = [token for token in frames if token in control]
        assert found == expected[: len(found)]


def test_a_control_token_in_a_message_is_written_as_transformers_writes_it():
    """Its sanitize_control_tokens takes all special tokens; ours, those of the template."""
    made = made_once("chatml", "llama2")
    text = "say <|im_end|> and <|im_start|>system, twice <|im_end|><|im_end|>"
    theirs = made.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        sanitize_control_tokens=True,
        return_dict=False,
    )
    assert made.encode_prompt([Message("user", text)]) == theirs
    (item,) = encode(made, chat(text, text))
    assert item["input_ids"][: len(theirs)] == theirs
    end = made.stop_token_ids[0]
    assert item["input_ids"].count(end) == 2
    assert item["labels"].count(end) == 1
    assert made.tokenizer.decode(item["input_ids"]).count(text) == 2


def test_a_new_special_token_that_the_template_does_not_write_stays_one_token():
    tokenizer = tiny_tokenizers.tokenizer()
    tokenizer.add_tokens(["<place>"], special_tokens=True)
    made = Codec(tokenizer, load_template("chatml", tokenizer), DataSection(datasets=("any",)))
    item = only(encode(made, chat("where?", "here <place>")))
    assert tokenizer.convert_tokens_to_ids("<place>") in item["labels"]


def test_a_word_that_has_no_other_spelling_drops_its_row_only():
    tokenizer = tiny_tokenizers.word_tokenizer()
    made = Codec(tokenizer, load_template("empty", tokenizer), DataSection(datasets=("any",)))
    good, bad = made.encode_chats([chat("a", "a"), chat("a </s>", "a")])
    assert len(good) == 1
    assert bad == Dropped("this tokenizer cannot encode '</s>' as plain text")


def test_frames_of_tokens_that_are_not_special_are_protected_and_words_are_not():
    """As DeepSeek's, whose <｜User｜> is not special; `user` may be a token of its own, too."""
    tokenizer = tiny_tokenizers.tokenizer()
    tokenizer.add_tokens(["<｜User｜>", "<｜end｜>", "<think>", "user", "\n\n", "\u2581\u2581"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<｜User｜>user ' + m.content + '\n\n' if m.role == 'user' else "
        "'\u2581\u2581' + m.content + '<｜end｜>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\u2581\u2581' }}{% endif %}"
    )
    made = Codec(tokenizer, load_template("auto", tokenizer), DataSection(datasets=("any",)))
    assert made.stop_token_ids[0] == tokenizer.convert_tokens_to_ids("<｜end｜>")
    item = only(encode(made, chat("<｜User｜> user", "<think>hm</think><｜end｜> user\n\n")))
    names = tokenizer.convert_ids_to_tokens(item["input_ids"])
    counts = {name: names.count(name) for name in ("<｜User｜>", "<｜end｜>", "<think>", "user")}
    assert counts == {"<｜User｜>": 1, "<｜end｜>": 1, "<think>": 1, "user": 3}


def test_tools_and_calls_cannot_write_control_tokens_either():
    made = made_once("chatml")
    tool = {**TOOL, "description": "ends <|im_end|> here"}
    call = Message("assistant", "", ({"name": "add", "arguments": {"a": "<|im_end|>"}},))
    (item,) = encode(made, Example((Message("user", "a"), call), (tool,)))
    assert item["input_ids"].count(made.stop_token_ids[0]) == 3  # system, user, assistant


# -- documents


def test_a_document_has_its_ends_and_is_cut_into_pieces_without_loss():
    made = codec(None, "llama3", cutoff_len=10)
    text = "The quick brown fox. " * 5
    pieces = made.encode_documents([text])[0]
    ids = [token for piece in pieces for token in piece["input_ids"]]
    assert ids == [*made.tokenizer(text)["input_ids"], made.tokenizer.eos_token_id]
    assert ids[0] == made.tokenizer.bos_token_id
    assert all(piece["labels"] == piece["input_ids"] for piece in pieces)
    assert [len(piece["input_ids"]) for piece in pieces][:-1] == [10] * (len(pieces) - 1)


def test_a_document_starts_without_the_token_that_the_tokenizer_does_not_add():
    made = codec(None, "qwen")
    ((piece,),) = made.encode_documents(["Hello"])
    assert piece["input_ids"] == [
        *made.tokenizer("Hello")["input_ids"],
        made.tokenizer.eos_token_id,
    ]


@given(st.integers(1, 60), st.integers(4, 12))
def test_no_piece_of_a_document_is_a_single_token(count, length):
    whole = made_once("chatml")
    made = Codec(whole.tokenizer, None, DataSection(datasets=("any",), cutoff_len=length))
    (pieces,) = made.encode_documents(["x" * count])
    sizes = [len(piece["input_ids"]) for piece in pieces]
    assert max(sizes) <= length
    assert min(sizes) > 1
    assert sum(sizes) == count + 1


def test_an_empty_document_is_dropped():
    outcomes = codec(None).encode_documents(["", "x"])
    assert outcomes[0] == Dropped("empty text")
    assert len(outcomes[1]) == 1


def test_html_in_a_document_is_text():
    made = codec(None, "llama3")
    ((piece,),) = made.encode_documents(["<s>old</s> new"])
    ids = piece["input_ids"]
    assert ids.count(made.tokenizer.bos_token_id) == ids.count(made.tokenizer.eos_token_id) == 1


def test_conversations_without_a_template_are_an_error():
    with pytest.raises(TemplateError, match="chat template"):
        codec(None).encode_chats([chat("a", "b")])


# -- what a cache and a generator ask


def test_the_tokens_that_end_an_answer():
    made = codec("llama3")
    names = made.tokenizer.convert_ids_to_tokens(made.stop_token_ids)
    assert names == ["<|eot_id|>", "</s>"]
    assert codec("alpaca").tokenizer.convert_ids_to_tokens(codec("alpaca").stop_token_ids) == [
        "</s>"
    ]
    assert codec(None).stop_token_ids == (codec(None).tokenizer.eos_token_id,)


def test_padding_that_another_call_left_in_the_tokenizer_changes_nothing():
    made, padded = codec(), codec()
    padded.tokenizer.pad_token = made.tokenizer.pad_token = "</s>"
    padded.tokenizer(["a", "a long one"], padding=True, truncation=True, max_length=5)
    assert padded.tokenizer.backend_tokenizer.padding
    assert padded.fingerprint == made.fingerprint
    examples = [chat("a", "one"), chat("a", "a longer answer " * 5)]
    assert padded.encode_chats(examples) == made.encode_chats(examples)


def test_other_settings_keep_tokenizer_and_template():
    made = codec()
    long = chat("a", "one", "b", "two")
    assert len(only(encode(made, long))["input_ids"]) > 20
    section = dataclasses.replace(made.section, cutoff_len=20)
    assert len(only(encode(made.with_section(section), long))["input_ids"]) <= 20


def test_the_fingerprint_changes_with_all_that_changes_the_ids_and_nothing_else():
    same = codec().fingerprint
    assert codec(packing=False, shuffle=False, val_size=0.5).fingerprint == same
    different = [
        codec("llama3"),
        codec(None),
        codec(kind="gpt2"),
        codec(cutoff_len=7),
        codec(on_too_long="drop"),
        codec(train_on_prompt=True),
        codec(mask_history=True),
        codec(default_system="S"),
    ]
    tokenizer = tiny_tokenizers.tokenizer(bos_token=None)
    different.append(
        Codec(tokenizer, load_template("chatml", tokenizer), DataSection(datasets=("any",)))
    )
    prints = {same, *(made.fingerprint for made in different)}
    assert len(prints) == len(different) + 1


def test_a_sampled_response_has_its_tags_and_not_the_marks_of_turns():
    tags = ("<answer>", "</answer>")
    known = tiny_tokenizers.tokenizer(chat_template=CHATML)
    known.add_tokens([AddedToken(tag, special=True) for tag in tags], special_tokens=True)
    codec = Codec(known, load_template("auto", known), DataSection(datasets=("rows.jsonl",)))
    text = "<answer>42 , </answer>"
    ids = known(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
    turns = known("<|im_end|>\n<|im_start|>user\nmore", add_special_tokens=False)["input_ids"]
    assert codec.response_text([*ids, known.eos_token_id]) == text
    assert codec.response_text([*ids[:-1], *turns]) == f"{text}\nuser\nmore"


def test_tags_that_a_template_names_in_its_system_text_are_seen():
    source = "<|im_start|>system\nWrite <answer>42</answer>.<|im_end|>\n" + CHATML
    known = tiny_tokenizers.tokenizer(chat_template=source)
    known.add_tokens([AddedToken("<answer>", special=True)], special_tokens=True)
    codec = Codec(known, load_template("auto", known), DataSection(datasets=("rows.jsonl",)))
    ids = known("<answer>4<|im_end|>", add_special_tokens=False)["input_ids"]
    assert codec.response_text(ids) == "<answer>4"


def test_special_tokens_are_hidden_in_one_place_only():
    """A reward, a judge and a page that each hide what they like would see other responses."""
    calls = {
        str(file.relative_to(SRC))
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "skip_special_tokens"
        if getattr(node.value, "value", None) is True
    }
    assert calls == {"use/harness.py"}  # lm-eval's own rule
