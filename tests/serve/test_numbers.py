"""Rewards and embeddings of the server."""

import base64
import struct

import pytest
import torch
from transformers import AutoModelForCausalLM

import surefoot
from folders import save_model
from project import Project
from serve.running import running
from surefoot.data.example import Example, Message
from surefoot.inference import open_model
from surefoot.inference.scoring import score


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = Project(
        tmp_path_factory.mktemp("rm"),
        stage="rm",
        data={"datasets": ["pairs"], "val_size": 0.25},
        train={"max_steps": 2},
        optim={"adamw": {"learning_rate": 0.02}},
    )
    surefoot.train(made.recipe)
    return made.run


def test_responses_are_scored_and_put_in_order(run):
    opened = open_model(run)
    said = ["3", "45", "no"]
    examples = [Example((Message("user", "1+2?"), Message("assistant", one))) for one in said]
    expected = [one["reward"] for one in score(opened, examples, batch_size=8)]
    with running(run) as client:
        found = client.ok("/score", text_1="1+2?", text_2=said)
        assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-5)
        order = sorted(range(3), key=lambda index: -expected[index])
        ranked = client.ok("/v1/rerank", query="1+2?", documents=said, top_n=2)["results"]
        assert [one["index"] for one in ranked] == order[:2]
        assert ranked[0]["document"] == {"text": said[order[0]]}
        turns = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]
        alone = client.ok("/score", messages=turns)["data"]
        assert [one["score"] for one in alone] == pytest.approx(expected[:1], abs=1e-5)
        assert client.post("/score", text_1=["a", "b"], text_2=said)[0] == 400
        status, error = client.post("/v1/completions", prompt="x")
        assert status == 400
        assert "a reward model scores responses" in error["error"]["message"]


def test_embeddings_are_the_last_state(tmp_path):
    folder = save_model(tmp_path / "base")
    with running(folder) as client:
        found = client.ok("/v1/embeddings", input=["ab", "c"])
        packed = client.ok("/v1/embeddings", input=[[65, 66]], encoding_format="base64")
        assert client.post("/v1/embeddings", input="ab", dimensions=3)[0] == 400
        assert client.post("/score", text_1="a", text_2="b")[0] == 400
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        states = model(torch.tensor([[64, 65]]), output_hidden_states=True).hidden_states[-1]
    expected = torch.nn.functional.normalize(states[0, -1], dim=0).tolist()
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert found["data"][0]["embedding"] == pytest.approx(expected, abs=1e-5)
    data = base64.b64decode(packed["data"][0]["embedding"])
    assert len(struct.unpack("<32f", data)) == 32
