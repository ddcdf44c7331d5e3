import json
import math

import pytest
import torch

from commands import ok
from folders import save_model
from surefoot.use import open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("requests")
    save_model(folder / "base")
    return folder / "base"


def ask(folder, *requests):
    lines = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in requests)
    shown = ok("chat", folder, "--json", stdin=f"{lines}\n")
    return [json.loads(line) for line in shown.splitlines()]


def user(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_pieces_come_first_and_then_tokens_with_the_models_own_probabilities(folder):
    ready, *events = ask(folder, {"messages": user("Hi"), "max_new_tokens": 6, "seed": 3})
    assert ready == {"event": "ready", "has_template": True}
    answer = events.pop()
    assert answer["event"] == "answer"
    assert "".join(one["text"] for one in events) == answer["text"]
    assert "".join(one["text"] for one in answer["tokens"]) == answer["text"]

    opened = open_model(folder)  # the reference: one token at a time, in float64
    model, ids = opened.model.double(), opened.prompt([message("Hi")])
    logps = []
    for _ in range(6):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        shares = logits.softmax(-1)
        token = int(shares.argmax())
        if token in opened.stop_token_ids:
            break
        logps.append(float(shares[token].log()))
        ids.append(token)
    found = math.prod(one["probability"] for one in answer["tokens"])
    assert found == pytest.approx(math.exp(sum(logps)), rel=1e-3, abs=1e-5)
    for one in answer["tokens"]:
        assert len(one["instead"]) == 5
        assert one["instead"] == sorted(one["instead"], key=lambda pair: -pair[1])


def message(text):
    from surefoot.data.example import Message

    return Message("user", text)


def test_a_request_has_its_whole_conversation_and_its_seed_repeats_it(folder):
    sampled = {"messages": user("Hi", "Ho", "He"), "temperature": 2.0, "max_new_tokens": 8}
    events = ask(folder, {**sampled, "seed": 5}, {"messages": user("Hi")}, {**sampled, "seed": 5})
    first, _, again = (one for one in events if one["event"] == "answer")
    assert first == again
    other = ask(folder, {**sampled, "seed": 6})[-1]
    assert other["text"] != first["text"]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("{half", "the request: Invalid JSON"),
        ("[]", "the request: "),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": user("a", "b")}, "not of the user"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "expected the role user or tool"),
        (
            {"messages": user("a"), "temperature": "hot"},
            "temperature: Input should be a valid number",
        ),
        ({"messages": user("a"), "max_new_tokens": 0}, "max_new_tokens"),
        ({"messages": user("a"), "seed": "x"}, "seed: Input should be a valid integer"),
        ({"messages": user("a"), "stop": "x"}, "stop: Input should be a valid"),
        ({"messages": user("a"), "stop": [""]}, "stop must not contain an empty text"),
    ],
)
def test_a_wrong_request_is_an_event_and_the_next_one_is_answered(folder, request_, said):
    _, wrong, *_, answer = ask(folder, request_, {"messages": user("Hi"), "max_new_tokens": 2})
    assert wrong["event"] == "error"
    assert said in wrong["message"]
    assert answer["event"] == "answer"


def test_no_event_shows_a_part_of_a_stop_text(folder):
    request = {"messages": user("Hi"), "max_new_tokens": 8}
    _, *_, free = ask(folder, request)
    stop = free["text"][3:5]
    _, *pieces, answer = ask(folder, {**request, "stop": [stop]})
    assert answer["text"] == free["text"].partition(stop)[0]
    assert answer["finish_reason"] == "stop"
    for shown in (pieces, answer["tokens"]):
        assert "".join(one["text"] for one in shown) == answer["text"]
