"""Completions that begin with their prompts, beside one pass of transformers."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from folders import save_adapter, save_model
from serve.running import running
from surefoot.serve.answers import echo

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("echo")
    save_model(made / "base")
    save_adapter(made / "base", made / "one")
    return made


@pytest.fixture(scope="module")
def client(folder):
    with running(folder / "base", adapters=(("one", str(folder / "one")),)) as client:
        yield client


@pytest.mark.parametrize("name", ["base", "one"])
def test_the_prompts_log_probabilities_are_those_of_one_pass(name, folder, client):
    body = {"model": name, "prompt": "A bridge", "max_tokens": 3, "temperature": 0, "logprobs": 2}
    found = client.ok(TEXT, **body, echo=True, return_token_ids=True)
    (choice,) = found["choices"]
    (plain,) = client.ok(TEXT, **body)["choices"]
    report, prompt = choice["logprobs"], choice["prompt_token_ids"]
    network = AutoModelForCausalLM.from_pretrained(folder / "base")
    if name == "one":
        network = PeftModel.from_pretrained(network, folder / "one")
    with torch.no_grad():
        logits = network(torch.tensor([prompt])).logits[0].double()
    assert choice["text"] == "A bridge" + plain["text"]
    assert report["tokens"][: len(prompt)] == list("A bridge")
    assert report["token_logprobs"][0] is None
    assert report["top_logprobs"][0] is None
    for place, token in enumerate(prompt[1:]):
        weights = [float(value.exp()) for value in logits[place]]
        total = sum(weights)
        expected = torch.tensor(weights[token] / total).log()
        assert report["token_logprobs"][place + 1] == pytest.approx(float(expected), abs=1e-5)
        best = torch.tensor(max(weights) / total).log()
        assert max(report["top_logprobs"][place + 1].values()) == pytest.approx(
            float(best), abs=1e-5
        )
        assert len(report["top_logprobs"][place + 1]) in (2, 3)
    assert report["token_logprobs"][len(prompt) :] == plain["logprobs"]["token_logprobs"]
    assert report["text_offset"][: len(prompt) + 1] == list(range(len(prompt) + 1))
    assert found["usage"] == {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}


def test_a_prompt_alone_is_said_with_no_tokens_to_follow(client):
    body = {"prompt": ["ab", "xyz"], "max_tokens": 0, "echo": True, "logprobs": 0, "n": 2}
    found = client.ok(TEXT, **body)
    assert [choice["text"] for choice in found["choices"]] == ["ab", "ab", "xyz", "xyz"]
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}
    assert [len(choice["logprobs"]["tokens"]) for choice in found["choices"]] == [2, 2, 3, 3]
    assert found["usage"]["completion_tokens"] == 0
    chunks = client.chunks(TEXT, **body, stream_options={"include_usage": True})
    assert [chunk["choices"][0] for chunk in chunks[:-1]] == found["choices"]
    assert chunks[-1]["usage"] == found["usage"]
    ids = client.ok(TEXT, prompt=[70, 71, 72], max_tokens=0, echo=True)["choices"]
    assert [(choice["text"], choice["logprobs"]) for choice in ids] == [("ghi", None)]


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 1}, {"return_tokens_as_token_ids": True, "logprobs": 0}]
)
def test_a_stream_begins_with_the_prompt(more, client):
    body = {"prompt": ["ab", "xyz"], "max_tokens": 6, "echo": True, "temperature": 1, "seed": 3}
    whole = client.ok(TEXT, **body, **more)["choices"]
    chunks = client.chunks(TEXT, **body, **more)
    for choice in whole:
        pieces = [one for c in chunks for one in c["choices"] if one["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert pieces[0]["text"].startswith(["ab", "xyz"][choice["index"]])
        if more:
            for name in ("tokens", "text_offset"):
                said = [value for piece in pieces for value in piece["logprobs"][name]]
                assert said == choice["logprobs"][name]


def test_a_prompt_whose_logits_fill_the_memory_is_refused(client, monkeypatch):
    monkeypatch.setattr(echo, "_MOST", 4 * 259 * 10)
    asked = {"max_tokens": 0, "echo": True}
    assert client.ok(TEXT, prompt="x" * 11, **asked)
    status, found = client.post(TEXT, prompt="x" * 11, **asked, logprobs=0)
    assert (status, found["error"]["param"]) == (400, "echo")
