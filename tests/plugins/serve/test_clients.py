"""OpenAI's own client, and requests that a fuzzer makes from the server's schema."""

import pytest

from folders import save_adapter, save_model
from surefoot.data.text.templates import bundled

from .running import running

ASKED = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
TOOL = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    long = {"max_position_embeddings": 1024}
    save_model(folder / "base", template=bundled()["chatml"].source, **long)
    save_adapter(folder / "base", folder / "one")
    with running(folder / "base", adapters=(("one", str(folder / "one")),)) as client:
        yield client


@pytest.fixture(scope="module")
def openai_client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client_chats(openai_client):
    client = openai_client
    assert [model.id for model in client.models.list()] == ["base", "one"]
    assert client.models.retrieve("one").parent == "base"
    body = {"model": "one", "messages": ASKED, "max_completion_tokens": 6, "seed": 1}
    whole = client.chat.completions.create(
        **body, temperature=1, logprobs=True, top_logprobs=2, n=2, user="me"
    )
    assert len(whole.choices) == 2
    entries = whole.choices[0].logprobs.content
    assert 0 < len(entries) <= 6
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    stream = client.chat.completions.create(
        **body, temperature=1, n=2, stream=True, stream_options={"include_usage": True}
    )
    said, usage = ["", ""], None
    for chunk in stream:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert said == [choice.message.content for choice in whole.choices]
    assert usage == whole.usage
    done = client.completions.create(model="base", prompt=["a", "b"], logprobs=1, max_tokens=3)
    assert [choice.index for choice in done.choices] == [0, 1]
    assert len(done.choices[1].logprobs.tokens) <= 3


def test_openais_client_reads_errors(openai_client):
    openai = pytest.importorskip("openai")
    client = openai_client
    body = {"model": "base", "messages": ASKED, "tools": [TOOL]}
    for wrong, kind in (
        ({"model": "no"}, openai.NotFoundError),
        ({"temperature": -2}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, openai.BadRequestError),
    ):
        with pytest.raises(kind) as error:
            client.chat.completions.create(**{**body, **wrong})
        assert error.value.body["message"]


@pytest.mark.proof
def test_no_request_that_the_schema_allows_fails(server):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    names = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/unload_lora_adapter"]
    asked = [one for one in operations if one.path in names]
    assert len(asked) >= 3

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of([one.as_strategy() for one in asked]))
    def check(case):
        if isinstance(case.body, dict):
            case.body["max_tokens"] = 2
            case.body.pop("max_completion_tokens", None)
        found = case.call(timeout=60)
        assert found.status_code < 500, found.text

    check()
    assert server.figure("responses_open") == 0
