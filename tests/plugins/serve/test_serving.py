"""Answers of the server, beside those of transformers, and beside each other."""

import json
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import tiny_tokenizers
from folders import edit_json, save_adapter, save_model
from surefoot.data.text.templates import bundled
from surefoot.errors import ModelError
from surefoot.generate.section import GenerateSection
from surefoot.plugins.serve.app import create_app
from surefoot.plugins.serve.models import ServeSettings
from surefoot.use import Conversation, open_model

from .running import alike, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WIDE = {"intermediate_size": 64}  # elementwise operations take 32 numbers at a time
ASKED = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("serve")
    save_model(made / "base", template=bundled()["chatml"].source, **WIDE)
    save_adapter(made / "base", made / "one")
    save_adapter(made / "base", made / "two", seed=3, target_modules=["q_proj", "down_proj"])
    return made


@pytest.fixture(scope="module")
def client(folder):
    with running(folder / "base", adapters=(("one", str(folder / "one")),)) as client:
        yield client


def theirs(folder, messages, count, adapter=None):
    """The greedy response of transformers: its ids, and its text without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, folder / adapter)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    stops = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    config = GenerationConfig(max_new_tokens=count, eos_token_id=stops, pad_token_id=0)
    asked = torch.tensor([ids])
    found = model.generate(
        input_ids=asked, attention_mask=torch.ones_like(asked), generation_config=config
    )
    new = found[0, len(ids) :].tolist()
    return ids, new, tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.parametrize("adapter", [None, "one"])
def test_a_greedy_answer_is_that_of_transformers(adapter, folder, client):
    messages = [{"role": "system", "content": "Be."}, *ASKED]
    ids, new, text = theirs(folder, messages, 12, adapter)
    found = client.chat(
        messages, model=adapter or "base", max_tokens=12, temperature=0, return_token_ids=True
    )
    (choice,) = found["choices"]
    assert found["prompt_token_ids"] == ids
    assert choice["token_ids"] == new
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == ("length" if len(new) == 12 else "stop")
    counts = {"prompt_tokens": len(ids), "completion_tokens": len(new)}
    total = {**counts, "total_tokens": len(ids) + len(new)}
    assert found["usage"] == total
    assert found["model"] == (adapter or "base")


SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.8, "seed": 5, "n": 3},
    {"temperature": 1.5, "seed": 6, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 1, "seed": 7, "top_k": 9, "presence_penalty": 1, "frequency_penalty": 0.5},
    {"temperature": 1, "seed": 7, "logit_bias": {"70": 3.5}, "min_p": 0.3},
    {"temperature": 1, "seed": 8, "model": "one"},
]


def test_an_answer_is_the_same_whatever_else_is_answered(client):
    asked = [
        {"prompt": [*range(60, 61 + 7 * number)], "max_tokens": 9 + number, **settings}
        for number, settings in enumerate(SETTINGS)
    ]

    def answer(body):
        found = client.ok(TEXT, **body, logprobs=2, return_token_ids=True)
        return [{**choice, "index": 0} for choice in found["choices"]]

    alone = [answer(body) for body in asked]
    with ThreadPoolExecutor(14) as pool:
        together = list(pool.map(answer, [*asked, *reversed(asked)]))
    assert alike(together, [*alone, *reversed(alone)])
    assert alone[1] == alone[2][:1] or alone[1][0]["token_ids"] != alone[2][0]["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in alone[2]}) == 3


def test_log_probabilities_are_those_of_one_pass(folder, client):
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 2, "seed": 1, "top_k": 5}
    (choice,) = client.ok(TEXT, **body, logprobs=3, return_token_ids=True)["choices"]
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    prompt, new = choice["prompt_token_ids"], choice["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    found = choice["logprobs"]
    want = expected[range(len(new)), new].tolist()
    assert found["token_logprobs"] == pytest.approx(want, abs=1e-5)
    best = expected.max(-1).values.tolist()
    assert [max(top.values()) for top in found["top_logprobs"]] == pytest.approx(best, abs=1e-5)
    assert all(len(top) in (3, 4) for top in found["top_logprobs"])


@pytest.mark.parametrize("kind", sorted(tiny_tokenizers.KINDS))
def test_tokens_are_named_by_their_text_where_they_stand(kind, tmp_path):
    tokenizer = tiny_tokenizers.tokenizer(kind)
    size = len(tokenizer)
    save_model(tmp_path, vocab_size=size, eos_token_id=tokenizer.eos_token_id, **WIDE)
    tokenizer.save_pretrained(tmp_path)
    words = tokenizer.encode(" the sea and a day in 是é", add_special_tokens=False)
    bias = {str(token): 40 for token in words}  # an untrained model would say anything
    body = {"prompt": "Once", "max_tokens": 40, "temperature": 1, "logit_bias": bias, "n": 4}
    with running(tmp_path) as client:
        found = client.ok(TEXT, **body, logprobs=5, seed=1, return_token_ids=True)["choices"]
        chat = client.chat("Hi", logprobs=True, max_tokens=9, temperature=1, logit_bias=bias)
    assert len({len(set(choice["logprobs"]["tokens"])) for choice in found}) > 1
    for choice in found:
        logprobs, text = choice["logprobs"], choice["text"]
        pieces = tokenizer.convert_ids_to_tokens(choice["token_ids"])
        # a byte is a part of a character, and a letter only if no such part is beside it
        is_byte = [
            n.startswith("bytes:") or p[:3] == "<0x"
            for n, p in zip(logprobs["tokens"], pieces, strict=True)
        ]
        named = zip(logprobs["text_offset"], logprobs["tokens"], is_byte, strict=True)
        assert all(is_byte or text[at:].startswith(name) for at, name, is_byte in named)
        if not any(is_byte):
            assert "".join(logprobs["tokens"]) == text
        assert all(len(names) >= 5 for names in logprobs["top_logprobs"])
    entries = chat["choices"][0]["logprobs"]["content"]
    said = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="ignore")
    assert said == chat["choices"][0]["message"]["content"].replace("\ufffd", "")


def joined(chunks, index=0):
    """What the pieces of one choice say together."""
    found, reasons = {}, []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                for key, value in choice["delta"].items():
                    found[key] = found.get(key, "") + value
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(reasons) == 1
    return found, reasons[0]


@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_a_stream_says_what_the_answer_in_one_piece_says(extra, client):
    body = {"messages": ASKED, "max_tokens": 24, "temperature": 1, "seed": 3, "n": 2, **extra}
    whole = client.ok(CHAT, **body)
    chunks = client.chunks(CHAT, **body, stream_options={"include_usage": True})
    for choice in whole["choices"]:
        said, reason = joined(chunks, choice["index"])
        assert said == choice["message"]
        assert reason == choice["finish_reason"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    if extra:
        entries = [
            entry
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == 1 and choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert entries == whole["choices"][1]["logprobs"]["content"]
        assert len(entries) > 1


def test_a_stop_text_is_cut_within_tokens_and_characters(client):
    """Every token is a byte, so a character of several bytes comes in pieces."""
    body = {"prompt": "x", "max_tokens": 40, "temperature": 1, "seed": 2}
    whole = client.ok(TEXT, **body)["choices"][0]["text"]
    assert len(whole) > 8
    for stop in (whole[4:6], whole[5], [whole[7:9], whole[6:8]]):
        first = min(whole.index(one) for one in ([stop] if isinstance(stop, str) else stop))
        found = client.ok(TEXT, **body, stop=stop)["choices"][0]
        assert found["text"] == whole[:first]
        assert found["finish_reason"] == "stop"
        chunks = client.chunks(TEXT, **body, stop=stop)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[:first]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_settings_of_the_run_are_used_where_a_request_has_none(folder):
    """As in `surefoot chat`, by the same code for the prompt."""
    opened = open_model(folder / "one")
    section = GenerateSection(max_new_tokens=9)
    expected = Conversation(opened, section).ask("Hi").text
    with running(folder / "one") as client:
        found = client.chat("Hi", max_tokens=9, skip_special_tokens=False)
        assert found["choices"][0]["message"]["content"] == expected
        names = [card["id"] for card in client.http.get("/v1/models").json()["data"]]
        assert names == ["one", "base"]
        base = client.chat("Hi", model="base", max_tokens=9, return_token_ids=True)
    assert base["choices"][0]["token_ids"] == theirs(folder, ASKED, 9)[1]


def test_adapters_are_loaded_and_unloaded_by_name(folder, client):
    body = {"prompt": [70, 71], "max_tokens": 12, "temperature": 0, "return_token_ids": True}

    def answers(*names):
        return [client.ok(TEXT, **body, model=name)["choices"][0]["token_ids"] for name in names]

    before = answers("base", "one")
    load = {"lora_name": "v2.two", "lora_path": str(folder / "two")}
    assert client.ok("/v1/load_lora_adapter", **load).startswith("Success")
    status, error = client.post("/v1/load_lora_adapter", **load)
    assert (status, error["error"]["param"]) == (400, "lora_name")
    assert answers("v2.two")[0] not in before
    client.ok("/v1/unload_lora_adapter", lora_name="v2.two")
    client.ok("/v1/unload_lora_adapter", lora_name="one")  # the last one
    assert answers("base") == before[:1]
    client.ok("/v1/load_lora_adapter", lora_name="one", lora_path=str(folder / "one"))
    assert client.post(TEXT, **body, model="v2.two")[0] == 404
    assert client.post("/v1/unload_lora_adapter", lora_name="v2.two")[0] == 404
    assert answers("base", "one") == before


def test_a_client_that_leaves_frees_its_place(client):
    # so many tokens that they are never done before the client leaves
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "n": 128}
    before = client.figure("generated_tokens")
    with client.http.stream("POST", TEXT, json={**body, "stream": True}) as found:
        lines = found.iter_lines()  # the connection closes when nothing holds them
        next(lines)
        assert client.figure("responses_running") > 0
    client.until(lambda: client.figure("responses_running") == 0)
    assert client.figure("responses_open") == 0
    assert client.figure("generated_tokens") - before < 200 * 128
    with pytest.raises(Exception, match="timed out"):
        client.http.post(TEXT, json=body, timeout=0.15)
    client.until(lambda: client.figure("responses_open") == 0)
    client.until(lambda: client.figure("responses_running") == 0)


def test_arguments_of_the_template_change_the_prompt_and_unknown_ones_are_refused(tmp_path):
    source = "{{ persona | default('') }}" + bundled()["chatml"].source
    save_model(tmp_path / "base", template=source)
    with running(tmp_path / "base") as client:
        body = {"messages": ASKED, "max_tokens": 1, "return_token_ids": True}
        plain = client.ok(CHAT, **body)["prompt_token_ids"]
        told = client.ok(CHAT, **body, chat_template_kwargs={"persona": "abc"})["prompt_token_ids"]
        assert len(told) == len(plain) + 3 and told[-len(plain) :] == plain
        status, found = client.post(CHAT, **body, chat_template_kwargs={"persone": "abc"})
        assert (status, found["error"]["param"]) == (400, "chat_template_kwargs")


def test_what_a_message_says_is_read_or_refused(client):
    """`prefix` of DeepSeek's and Mistral's changed nothing."""

    def answered(**more):
        status, found = client.post(CHAT, messages=[{**ASKED[0], **more}], max_tokens=1)
        return status, found.get("error", {})

    assert answered()[0] == 200
    # what a client of OpenAI sends back with each message
    assert answered(name="Ann", refusal=None, annotations=[], audio=None, prefix=None)[0] == 200
    for key in ("prefix", "no_such_key", "k" * 1000):
        status, error = answered(**{key: True})
        assert (status, error["code"], error["param"]) == (400, "unknown_parameter", "messages")
        assert error["message"].startswith(f"messages: {key} of a turn: nothing reads it")
    part = {"type": "text", "text": "Hi", "detail": "high"}
    assert answered(content=[part])[0] == 200
    status, error = answered(content=[{**part, "volume": 1}])
    assert status == 400 and error["message"].startswith(
        "messages: volume of a part: nothing reads"
    )


def test_a_temperature_that_no_logit_can_be_divided_by_is_greedy(client):
    body = {"prompt": "x", "max_tokens": 9}
    expected = client.ok(TEXT, **body, temperature=0)["choices"]
    for temperature in (5e-324, 9e-6):
        assert client.ok(TEXT, **body, temperature=temperature)["choices"] == expected
    least = {"temperature": 1e-5, "repetition_penalty": 0.01, "seed": 1}
    assert client.ok(TEXT, **body, **least)["choices"]


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"best": 1}, 400, "best", "unknown_parameter"),
        ({"temperature": -1}, 400, "temperature", "invalid_value"),
        ({"min_p": 1.1}, 400, "min_p", "invalid_value"),
        ({"repetition_penalty": 5e-324}, 400, "repetition_penalty", "invalid_value"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"suffix": "end"}, 400, "suffix", "invalid_value"),
        ({"echo": True}, 400, "echo", "invalid_value"),
        ({"best_of": 3}, 400, "best_of", "invalid_value"),
        ({"stop": ""}, 400, "stop", "invalid_value"),
        ({"prompt": []}, 400, "prompt", None),
        ({"prompt": ""}, 400, "prompt", None),
        ({"prompt": [999]}, 400, "prompt", None),
        ({"prompt": [5] * 256}, 400, "prompt", "context_length_exceeded"),
        ({"stop_token_ids": [-1]}, 400, "stop_token_ids", None),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", "invalid_value"),
        ({"model": "two"}, 404, "model", "model_not_found"),
        ({"n": 300}, 400, "n", "invalid_value"),
        ({"prompt": "\ud800"}, 400, None, "invalid_value"),
        ({"prompt": ["a", 1]}, 400, "prompt", "invalid_value"),
        ({"prompt": "x" * 1_000_000}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": [[5]] * 1000, "n": 128}, 400, "n", None),
        ({"logit_bias": {"1" * 5000: 1}}, 400, "logit_bias", "invalid_value"),
        ({"stream_options": {}}, 400, "stream_options", "invalid_value"),
    ],
)
def test_what_is_not_understood_is_refused(body, status, param, code, client):
    data = json.dumps({"prompt": "x", "max_tokens": 1, **body})
    json_type = {"content-type": "application/json"}
    found = client.http.post(TEXT, content=data, headers=json_type)
    error = found.json()["error"]
    assert found.status_code == status, error
    assert (error["code"] == code) and (error["param"] == param), error
    assert error["message"]


def test_a_body_that_is_no_object_of_json_is_named_as_that(client):
    def refused(data, kind="application/json"):
        found = client.http.post(TEXT, content=data, headers={"content-type": kind})
        assert found.status_code == 400
        assert found.json()["error"]["param"] is None
        return found.json()["error"]["message"]

    place = "the body is not JSON: key must be a string at line 1 column 2"
    assert refused(b"{prompt: 1}") == place
    assert refused(b"[1]") == "the body is JSON, but no object: expected {...}"
    assert "recursion limit" in refused(b'{"prompt":' + b"[" * 50_000)
    assert "more than 100,000 lists" in refused(b'{"prompt": [' + b"[5]," * 100_001 + b"[5]]}")
    assert "out of range" in refused(b'{"seed": ' + b"1" * 5000 + b"}")
    for kind in ("text/plain", "application/jsonx", ""):
        assert "Content-Type: application/json" in refused(b'{"prompt": "x"}', kind)
    accepted = {"content-type": "application/json; charset=utf-8"}
    data = b'{"prompt": "x", "max_tokens": 1}'
    assert client.http.post(TEXT, content=data, headers=accepted).status_code == 200


LARGE = [
    (TEXT, {"prompt": [[5]] * 20_000, "n": 128}),
    (TEXT, {"prompt": "x" * 600_000}),
    (TEXT, {"prompt": [5] * 200_000}),
    (TEXT, {"prompt": [5] * 200_000, "stop": [5] * 200_000}),
    (TEXT, {"prompt": "x", "logit_bias": {str(token): 1 for token in range(50_000)}}),
    (TEXT, {"prompt": "x", **{f"name{number}": 1 for number in range(50_000)}}),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 600_000}]}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 20_000}),
    (CHAT, {"messages": ASKED, "tools": [{}] * 50_000}),
]


def test_nothing_that_grows_with_a_request_runs_on_the_event_loop(folder):
    """Calls of Python and of C are counted in the thread that all clients share, and what reads or
    writes a body in one call is looked for by its name."""
    counts, names = Counter(), set()

    def note(frame, event, called):
        if event in ("call", "c_call"):
            counts[threading.get_ident()] += 1
        if event == "c_call":
            names.add((threading.get_ident(), called.__name__))

    threading.setprofile(note)
    try:
        with running(folder / "base") as client:
            loop = next(one.ident for one in threading.enumerate() if one.name.endswith("(run)"))
            client.ok(TEXT, prompt="x", max_tokens=1)  # what is imported only once
            client.chat("Hi", max_tokens=1)
            for path, body in LARGE:
                before = counts[loop]
                assert client.post(path, **body)[0] == 400
                parts = len(json.dumps(body)) / 100  # the bytes come in as they are sent
                assert counts[loop] - before < 2000 + parts, (path, list(body))
    finally:
        threading.setprofile(None)
    called = {name for thread, name in names if thread != loop}
    assert {"from_json", "validate_python"} <= called
    assert not {"from_json", "validate_python"} & {name for thread, name in names if thread == loop}


def test_a_reward_model_is_refused(folder, tmp_path):
    shutil.copytree(folder / "base", tmp_path / "scores")
    edit_json(tmp_path / "scores/config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelError, match="score those of a file with `surefoot predict`"):
        create_app(ServeSettings(path=str(tmp_path / "scores")))


def test_a_full_queue_refuses_with_the_time_to_wait(folder):
    with running(folder / "base", max_batch=1, max_waiting=1) as client:
        body = {"prompt": "x", "max_tokens": 150, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            slow = [pool.submit(client.ok, TEXT, **body) for _ in range(2)]
            client.until(lambda: client.figure("responses_open") == 2)
            found = client.http.post(TEXT, json=body)
            assert found.status_code == 429
            assert int(found.headers["retry-after"]) >= 1
            assert found.json()["error"]["code"] == "queue_full"
            assert [one.result()["usage"]["completion_tokens"] for one in slow] == [150] * 2
        assert client.ok(TEXT, prompt="x", max_tokens=1)
        status, error = client.post(TEXT, prompt="x", n=3)  # waiting would not help
        assert (status, error["error"]["param"]) == (400, "n")
        assert client.post(CHAT, messages=ASKED, n=3)[0] == 400


def test_a_key_and_this_machines_name_are_needed(folder):
    bearer = {"Authorization": "Bearer secret"}
    with running(folder / "base", api_key="secret", headers=bearer) as client:
        assert client.ok(TEXT, prompt="x", max_tokens=1)
        found = client.http.get("/v1/models", headers={"Authorization": "Bearer other"})
        assert found.status_code == 401
        assert found.json()["error"]["code"] == "invalid_api_key"
        assert client.http.get("/health", headers={"Authorization": ""}).status_code == 200
        for path in ("/health", "/v1/models"):
            for host in ("evil.example", "127.0.0.1.evil.example", "a@127.0.0.1"):
                found = client.http.get(path, headers={"Host": host})
                assert found.status_code == 421
        found = client.http.get("/v1/models", headers={"Host": "evil.example"})
        assert "start it with --host-name evil.example" in found.json()["error"]["message"]


def test_another_sites_name_and_long_bodies_are_refused(client):
    assert client.http.get("/health", headers={"Host": "evil.example"}).status_code == 421
    assert client.http.post(TEXT, content=b"x" * (9 << 20)).status_code == 413


@pytest.mark.proof
def test_two_hundred_streams_at_a_time_say_what_each_says_alone(client):
    def streamed(number):
        body = {"prompt": [60 + number % 20, 70], "max_tokens": 4, "temperature": 1}
        chunks = client.chunks(TEXT, **body, seed=number, return_token_ids=True)
        return [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]]

    with ThreadPoolExecutor(200) as pool:
        together = list(pool.map(streamed, range(200)))
    assert together[::40] == [streamed(number) for number in range(0, 200, 40)]
    client.until(lambda: client.figure("responses_open") == 0)
