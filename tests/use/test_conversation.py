"""Turns follow each other as the template says, nothing is dropped, and full windows are said."""

import dataclasses

import pytest
import torch

from answering import answer
from folders import save_model
from surefoot.data.example import Message
from surefoot.errors import RunError, TemplateError
from surefoot.generate.section import GenerateSection
from surefoot.use import Conversation, open_model

SHORT = GenerateSection(max_new_tokens=6)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_model(save_model(tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return open_model(save_model(tmp_path_factory.mktemp("plain") / "model", template=None))


def expected(opened, messages, count):
    """What transformers itself answers."""
    chat = [{"role": m.role, "content": m.content} for m in messages]
    ids = opened.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    found = opened.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    return opened.tokenizer.decode(found[0, ids.shape[1] :])


def test_every_turn_sees_all_turns_before_it(opened):
    conversation = Conversation(opened, SHORT, system="Be kind.")
    said = [Message("system", "Be kind.")]
    for text in ("Hé?", "And now?"):
        said.append(Message("user", text))
        pieces = []
        answer = conversation.ask(text, pieces.append)
        assert answer.text == expected(opened, said, 6)
        assert "".join(pieces) == answer.text
        said.append(Message("assistant", answer.text))
    assert conversation.messages == said[1:]


def test_a_cleared_conversation_starts_anew_with_its_system_message(opened):
    conversation = Conversation(opened, SHORT, system="Be kind.")
    first = conversation.ask("Hello")
    assert conversation.ask("Hello") != first
    conversation.clear()
    assert conversation.ask("Hello") == first


def test_a_system_message_can_be_changed_and_taken_away(opened):
    conversation = Conversation(opened, SHORT)
    first = conversation.ask("Hello").text
    conversation.clear()
    conversation.set_system("Shout.")
    assert conversation.ask("Hello").text != first
    conversation.clear()
    conversation.set_system("")
    assert conversation.ask("Hello").text == first


def test_an_answer_says_why_it_ended(opened, tmp_path):
    assert Conversation(opened, SHORT).ask("Hi").finish_reason == "length"
    small = open_model(save_model(tmp_path / "small", max_position_embeddings=48))
    answer = Conversation(small, GenerateSection(max_new_tokens=100)).ask("Hi")
    assert answer.finish_reason == "context"


def test_an_answer_that_stops_by_itself_says_so(opened):
    prompt = opened.prompt([Message("user", "Hi")])
    ids = answer(opened.model, [prompt], SHORT, stop_token_ids=[])[0]
    token = opened.tokenizer.convert_ids_to_tokens(ids[3])
    template = dataclasses.replace(opened.template, stop=(token,))
    found = Conversation(dataclasses.replace(opened, template=template), SHORT).ask("Hi")
    assert found.finish_reason == "stop"
    assert found.text == opened.tokenizer.decode(ids[: ids.index(ids[3])])


def test_an_interrupted_answer_keeps_what_was_shown(opened):
    whole = Conversation(opened, SHORT).ask("Hi").text
    shown = []

    def interrupt(piece):
        shown.append(piece)
        if len(shown) == 2:
            raise KeyboardInterrupt

    conversation = Conversation(opened, SHORT)
    answer = conversation.ask("Hi", interrupt)
    assert answer.finish_reason == "interrupted"
    assert answer.text == "".join(shown)
    assert whole.startswith(answer.text)
    assert conversation.messages[-1] == Message("assistant", answer.text)


def test_a_seed_makes_a_sampled_conversation_repeatable(opened):
    section = GenerateSection(max_new_tokens=12, do_sample=True)

    def talk(seed):
        conversation = Conversation(opened, section, seed=seed)
        return [conversation.ask(text).text for text in ("Hi", "Hi")]

    assert talk(3) == talk(3) != talk(4)


def test_without_a_template_text_is_continued_by_itself(plain):
    conversation = Conversation(plain, SHORT)
    ids = torch.tensor([plain.tokenizer("Once")["input_ids"]])
    found = plain.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
    )
    for _ in range(2):
        assert conversation.ask("Once").text == plain.tokenizer.decode(found[0, ids.shape[1] :])


def test_without_a_template_there_is_no_system_message(plain):
    with pytest.raises(TemplateError, match="no chat template"):
        Conversation(plain, SHORT, system="Be kind.")
    with pytest.raises(RunError, match="no text"):
        Conversation(plain, SHORT).ask("")
