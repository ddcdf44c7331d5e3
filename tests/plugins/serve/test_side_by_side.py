"""Adapters of one base that are answered in one pass, and those that cannot be."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from each import some
from folders import save_adapter, save_model
from surefoot.data.text.templates import bundled
from surefoot.generate.live import SingleRows
from surefoot.plugins.serve.body import ModelGoneError
from surefoot.plugins.serve.engine import EngineThread, FailedRequest, Lane

from .running import alike, running

TEXT = "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RANKS = {"one": 1, "two": 2, "four": 4, "nine": 9}
TURNS = {"dora": {"use_dora": True}, "table": {"target_modules": ["q_proj", "embed_tokens"]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("adapters")
    wide = {"intermediate_size": 64}  # elementwise operations take 32 numbers at a time
    save_model(made / "base", template=bundled()["chatml"].source, **wide)
    for seed, (name, rank) in enumerate(RANKS.items()):
        some = {"target_modules": ["q_proj", "down_proj"]} if rank == 2 else {}
        save_adapter(made / "base", made / name, seed=seed, r=rank, **some)
    for seed, (name, settings) in enumerate(TURNS.items()):
        save_adapter(made / "base", made / name, seed=7 + seed, **settings)
    return made


@pytest.fixture(scope="module")
def client(folder):
    every = tuple((name, str(folder / name)) for name in (*RANKS, *TURNS))
    with running(folder / "base", adapters=every, batch_invariant=True) as client:
        yield client


def asked(name, number=0, **more):
    prompt = [60 + (number + place) % 40 for place in range(1 + 9 * (number % 4))]
    body = {"model": name, "prompt": prompt, "max_tokens": 14, "temperature": 1.2, "seed": number}
    return {**body, "logprobs": 3, "return_token_ids": True, "ignore_eos": True, **more}


def answer(client, body):
    return client.ok(TEXT, **body)["choices"]


def test_an_adapters_answers_are_the_same_alone_and_beside_others(client):
    names = ["base", *RANKS, *TURNS]
    bodies = [asked(name, number) for number in range(2) for name in names]
    alone = [answer(client, body) for body in bodies]
    assert len({str(choices) for choices in alone}) == len(alone)
    for count in (2, 5, len(bodies)):
        with ThreadPoolExecutor(count) as pool:
            together = list(pool.map(lambda body: answer(client, body), bodies[:count]))
        assert alike(together, alone[:count]), count


@pytest.mark.parametrize("name", some([*RANKS, *TURNS], ["one", "nine", *TURNS]))
def test_an_adapters_answer_is_that_of_peft(name, folder, client):
    body = asked(name, 2, temperature=0, max_tokens=6)
    beside = [asked(other, 3, max_tokens=40) for other in ("base", *RANKS) if other != name]
    with ThreadPoolExecutor(9) as pool:
        others = [pool.submit(answer, client, one) for one in beside]
        (choice,) = answer(client, body)
        assert all(one.result() for one in others)
    plain = AutoModelForCausalLM.from_pretrained(folder / "base")
    wrapped = PeftModel.from_pretrained(plain, folder / name)
    prompt, new = choice["prompt_token_ids"], choice["token_ids"]
    with torch.no_grad():
        logits = wrapped(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
    logps = logits.log_softmax(-1)
    assert new == logps.argmax(-1).tolist()
    found = choice["logprobs"]["token_logprobs"]
    assert found == pytest.approx(logps.max(-1).values.tolist(), abs=1e-5)


def passes(client, names):
    """Passes for as many requests at a time, of 60 tokens each."""
    before = client.figure("passes")
    with ThreadPoolExecutor(len(names)) as pool:
        bodies = [asked(name, number, max_tokens=60) for number, name in enumerate(names)]
        list(pool.map(lambda body: answer(client, body), bodies))
    return client.figure("passes") - before


def test_adapters_share_passes_unless_their_layers_forbid_it(client):
    assert passes(client, ["base", *RANKS]) < 200  # 300 tokens
    assert passes(client, ["base", *TURNS]) == 180


def test_answers_stay_the_same_while_adapters_come_and_go(folder, client):
    bodies = [asked(name, number, max_tokens=40) for number, name in enumerate(["base", *RANKS])]
    alone = [answer(client, body) for body in bodies]
    is_over = threading.Event()

    def come_and_go():
        count = 0
        while not is_over.is_set() or count < 3:
            name = ["nine", "dora", "two"][count % 3]
            client.ok(LOAD, lora_name="guest", lora_path=str(folder / name))
            found = answer(client, asked("guest", 1))
            assert alike(found, answer(client, asked(name, 1)))
            client.ok(UNLOAD, lora_name="guest")
            count += 1
        return count

    with ThreadPoolExecutor(6) as pool:
        guest = pool.submit(come_and_go)
        for _ in range(3):
            assert alike(list(pool.map(lambda body: answer(client, body), bodies)), alone)
        is_over.set()
        assert guest.result() >= 3


def test_an_adapter_with_open_requests_is_unloaded_after_them(folder, client):
    client.ok(LOAD, lora_name="guest", lora_path=str(folder / "four"))
    expected = answer(client, asked("four", 5, max_tokens=120))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(answer, client, asked("guest", 5, max_tokens=120))
        client.until(lambda: client.figure("responses_running") > 0)
        client.ok(UNLOAD, lora_name="guest")
        assert client.post(TEXT, **asked("guest"))[0] == 404
        assert alike(slow.result(), expected)


def test_an_adapter_that_is_served_first_shares_passes_with_the_base_under_it(folder, client):
    expected = answer(client, asked("four", 1))
    with running(folder / "four") as first:
        names = [card["id"] for card in first.http.get("/v1/models").json()["data"]]
        assert names == ["four", "base"]
        alone = [answer(first, asked(name, 1)) for name in names]
        assert alike(alone[0], expected)
        assert alone[0] != alone[1]
        with ThreadPoolExecutor(2) as pool:
            assert alike(list(pool.map(lambda name: answer(first, asked(name, 1)), names)), alone)
        assert passes(first, names) < 120


def test_a_request_that_comes_after_its_model_has_gone_is_refused():
    """Its prompt may have been prepared meanwhile. It would wait for ever otherwise."""

    async def late():
        engine, sink = EngineThread(), asyncio.Queue()
        engine.start(asyncio.get_running_loop())
        lane = Lane(SingleRows(torch.nn.Linear(1, 1)))
        engine.add_lane(lane)
        gone = threading.Event()
        engine.remove_lane(lane, gone.set)
        await asyncio.to_thread(gone.wait, 10)
        request = type("Request", (), {"index": 3})()
        engine.submit(lane, [(request, None)], sink)
        event = await asyncio.wait_for(sink.get(), 10)
        await asyncio.to_thread(engine.close)
        return event

    event = asyncio.run(late())
    assert isinstance(event, FailedRequest)
    assert isinstance(event.error, ModelGoneError)
    assert event.error.status == 404
