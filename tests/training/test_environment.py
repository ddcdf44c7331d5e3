"""Conversations with an environment: their ids are those of the template, and never change."""

from dataclasses import dataclass, field

import pytest

from stage_data import REWARD
from surefoot.data.example import Message
from surefoot.data.section import DataSection
from surefoot.data.text.codec import Codec
from surefoot.data.text.templates import bundled, load_template
from surefoot.errors import RunError, TemplateError
from surefoot.generate.generation import Sample
from surefoot.generate.section import GenerateSection
from surefoot.schema.locations import FunctionPath
from surefoot.training.conversations import UserEnvironment, converse
from surefoot.training.rewards import FunctionReward, RewardProcess, Texts, stepped
from surefoot.training.rollout import DatasetRow
from tiny_tokenizers import tokenizer

ASKED = Message("user", "Count to 3.")


@pytest.fixture(scope="module")
def process():
    made = RewardProcess()
    yield made
    made.close()


def codec(name="chatml"):
    made = tokenizer()
    return Codec(made, load_template(name, made), DataSection(datasets=("any",), cutoff_len=512))


@dataclass
class Scripted:
    """A policy that says what is written."""

    codec: Codec
    process: RewardProcess
    script: list
    reasons: dict = field(default_factory=dict)  # by the turn; otherwise stop
    seen: list = field(default_factory=list)

    def generate(self, prompts, settings, *, turn=0):
        self.seen.append((turn, [list(ids) for ids in prompts], settings.max_new_tokens))
        end = self.codec.stop_token_ids[:1]
        reason = self.reasons.get(turn, "stop")
        found = []
        for _ in prompts:
            ids = self.codec.tokenizer(self.script[turn], add_special_tokens=False)["input_ids"]
            ids = (*ids, *(end if reason == "stop" else ()))
            found.append(Sample(ids, (-0.5,) * len(ids), reason))
        return found

    def environment(self, path, events, seconds):
        return stepped(self.process, path, events, seconds)


def conversations(context, name, *, most=200, turns=8, rows=({"goal": 3},)):
    start = context.codec.encode_prompt([ASKED])
    prompts = [(start, DatasetRow(row, f"sums:{i}"), i) for i, row in enumerate(rows)]
    settings = GenerateSection(max_new_tokens=most, do_sample=True)
    environment = UserEnvironment(FunctionPath(f"{REWARD}:{name}"), 20.0)
    return converse(context, prompts, settings, environment, turns)


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma", "vicuna"])
def test_a_conversation_has_the_ids_that_the_template_gives_all_of_it(template, process):
    try:
        made = codec(template)
    except TemplateError as error:
        pytest.skip(str(error))
    words = ["one", "two", "three"]
    space = " " if template == "vicuna" else ""  # which the template writes
    context = Scripted(made, process, [space + word for word in words])
    (found,) = conversations(context, "Counter")
    said = [ASKED]
    for n, word in enumerate(words):
        said += [Message("assistant", word), Message("user", f"{n + 1} of 3")]
    text_ids = made.encode_prompt(said[:-1])
    whole = list(found.ids)
    assert whole == text_ids[: len(whole)]
    assert found.stop_reason == "stop"
    decode = made.tokenizer.decode
    own = [token for token, is_own in zip(found.ids, found.is_sampled, strict=True) if is_own]
    end = decode(made.stop_token_ids[:1])
    assert decode(own) == end.join([*context.script, ""])
    assert found.sampled_logps == [-0.5] * len(own)
    for (_, before, _), (_, after, _) in zip(context.seen, context.seen[1:], strict=False):
        assert after[0][: len(before[0])] == before[0]  # nothing is tokenized again
    assert [turn for turn, _, _ in context.seen] == [0, 1, 2]


def test_each_conversation_has_its_own_object_and_ends_alone(process):
    context = Scripted(codec(), process, ["a", "b", "c"])
    short, long = conversations(context, "Counter", rows=({"goal": 1}, {"goal": 3}))
    assert len(short.ids) < len(long.ids)
    assert [len(prompts) for _, prompts, _ in context.seen] == [2, 1, 1]


def test_tokens_and_turns_are_limited(process):
    context = Scripted(codec(), process, ["a", "b", "c"])
    (found,) = conversations(context, "Counter", turns=2)
    assert [turn for turn, _, _ in context.seen] == [0, 1]
    context = Scripted(codec(), process, ["one two three four"])
    (found,) = conversations(context, "Counter", most=4)
    assert found.num_sampled == len(found.completion) == 4
    assert found.stop_reason == "length"
    context = Scripted(codec(), process, ["a", "b", "c"])
    (found,) = conversations(context, "Counter", most=len("a") + 3)  # no room for what is said
    assert found.stop_reason == "length"
    assert all(found.is_sampled[found.num_prompt :])


def test_a_response_that_is_cut_ends_its_conversation(process):
    context = Scripted(codec(), process, ["a", "b"], reasons={0: "length"})
    (found,) = conversations(context, "Counter")
    assert len(context.seen) == 1
    assert found.stop_reason == "length"


def test_each_conversation_has_an_object_also_if_its_first_response_is_cut(process):
    context = Scripted(codec(), process, ["a", "b"], reasons={0: "length"})
    conversations(context, "Solver", rows=({"goal": 1}, {"goal": 2}))
    task = FunctionReward(path=FunctionPath(f"{REWARD}:goals")).task
    texts = Texts(["p"] * 2, ["a"] * 2, [1, 1], {})
    assert process.compute(task, texts, 20.0).rewards == [1.0, 2.0]


def test_an_environment_that_fails_names_the_row(process):
    with pytest.raises(RunError, match=r"Broken: sums:0 \(response 'a'\): KeyError"):
        conversations(Scripted(codec(), process, ["a"]), "Broken")
    with pytest.raises(RunError, match=r"expected text, .* got 3"):
        conversations(Scripted(codec(), process, ["a"]), "Wrong")


def test_what_the_environment_s_message_says_beside_its_content_reaches_the_template(process):
    made = tokenizer()
    source = bundled()["chatml"].source
    made.chat_template = source.replace("' + message.role", "' + (message.name or message.role)")
    named = Codec(made, load_template("auto", made), DataSection(datasets=("any",)))
    (found,) = conversations(Scripted(named, process, ["a", "b"]), "Named", most=2000, turns=2)
    assert "<|im_start|>counter\n" in made.decode(found.ids)


def test_one_turn_is_what_was_sampled(process):
    context = Scripted(codec(), process, ["one"])
    start = context.codec.encode_prompt([ASKED])
    settings = GenerateSection(max_new_tokens=9, do_sample=True, temperature=0.7)
    (found,) = converse(context, [(start, DatasetRow({}), 0)], settings)
    assert list(found.prompt) == start
    assert found.temperature == 0.7
    assert all(found.is_sampled[len(start) :])
    features = found.features(0.5)
    assert features["labels"] == [-100] * len(start) + list(found.completion)
    assert features["advantages"] == [0.5] * len(found.completion)


def test_a_template_that_rewrites_a_response_is_refused():
    made = tokenizer()
    shown = "{{ m.content if loop.last else 'Gone' }}"
    made.chat_template = (
        "{% for m in messages %}<|im_start|>" + shown + "<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    broken = Codec(made, load_template("auto", made), DataSection(datasets=("any",)))
    with pytest.raises(TemplateError, match="changes a response when another turn follows"):
        broken.encode_turn(ASKED)
