"""A policy that a server samples: given its weights, checked, journaled, resumed."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import surefoot
import tiny
from hooks import listening
from project import Project, assert_same, checkpoints, final_weights, in_child, losses, metrics
from serving import serving
from stage_data import REWARD, written
from surefoot.errors import RecipeError, RunError
from surefoot.generate.section import sampling
from surefoot.generate.servers import (
    Expected,
    SamplingRequest,
    ServedWeights,
    ServerResponse,
    exchange,
)
from surefoot.parallel.world import ALONE
from surefoot.schema import read
from surefoot.stages import GRPO, Distill
from surefoot.training import TrainerCallback
from surefoot.training.served_policy import ServedPolicy, WindowRequest

LORA = {"lora": {"rank": 2}}
FORMS = {
    "vllm": (
        ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"],
        ["/collective_rpc", "/reset_prefix_cache"],
    ),
    "sglang": (
        ["/load_lora_adapter", "/unload_lora_adapter"],
        ["/update_weights_from_disk"],
    ),
    "openai": (["/update"], ["/update"]),
}


def project(folder, stage="grpo", *, form="vllm", method="full", steps=2, save=1, **settings):
    """A run of ``steps`` windows; its server is named later."""
    usual = written(stage)[stage]
    if stage != "distill":
        usual |= {"passes": 1, "mini_batches": 1}
    made = Project(
        folder,
        stage={stage: {**usual, "sampler": {form: {"url": "http://unset"}}, **settings}},
        method=method,
        train={"max_steps": steps, "global_batch_size": 4},
        checkpoint={"save_steps": save, "async_save": False},
        optim={"adamw": {"learning_rate": 0.05}},
    )
    made.stage = stage
    return made


def at(made, server):
    """The overrides that name the server."""
    form = next(iter(made.sections["stage"][made.stage]["sampler"]))
    address = {"url": server.url, "timeout": 30, "concurrency": 4}
    if form == "openai":
        address["update_url"] = f"{server.url}/update"
    return {f"stage.{made.stage}.sampler": {form: address}}


def run(made, server, **options):
    surefoot.train(made.recipe, **at(made, server), **options)


def gaps(folder):
    return [row["sampling_gap_max"] for row in metrics(folder) if "sampling_gap_max" in row]


@pytest.mark.parametrize(
    ("form", "method"),
    [
        ("vllm", "lora"),
        pytest.param("vllm", "full", marks=pytest.mark.proof),
        pytest.param("sglang", "lora", marks=pytest.mark.proof),
        pytest.param("sglang", "full", marks=pytest.mark.proof),
        pytest.param("openai", "lora", marks=pytest.mark.proof),
    ],
)
def test_a_server_samples_with_the_weights_of_now(form, method, tmp_path):
    """Were they others, their log-probabilities would not be those of training."""
    made = project(tmp_path, form=form, method=LORA if method == "lora" else "full")
    with serving(made.folder / "model") as server:
        run(made, server)
    adapter, full = FORMS[form]
    once = adapter if method == "lora" else full
    assert server.asked == [*once[:1], *once] if method == "lora" else [*once, *once]
    found = gaps(made.run)
    assert len(found) == 2
    assert 0 < max(found) < 1e-4
    weights = [row["sampling_weight"] for row in metrics(made.run) if "sampling_weight" in row]
    assert weights == pytest.approx([1.0] * 2, abs=1e-4)
    sampled = [body for path, body in server.seen if path in ("/v1/completions", "/generate")]
    assert len(sampled) == 2 * 4  # a request for each prompt
    if form == "sglang":
        assert all(len(body["input_ids"]) == 3 and body["return_logprob"] for body in sampled)
        assert all(("lora_path" in body) == (method == "lora") for body in sampled)
    else:
        assert all(body["n"] == 3 and body["return_token_ids"] for body in sampled)
        assert all(isinstance(body["prompt"][0], int) for body in sampled)


@pytest.mark.parametrize("stage", [pytest.param("ppo", marks=pytest.mark.proof), "distill"])
def test_every_stage_that_samples_has_servers(stage, tmp_path):
    made = project(tmp_path, stage, method=LORA)
    with serving(made.folder / "model") as server:
        run(made, server)
    assert server.num_sampled
    assert len(losses(made.run)) == 2
    if stage == "ppo":
        assert max(gaps(made.run)) < 1e-4


def rows(folder):
    texts = [path.read_text() for path in sorted((folder / "sampled").iterdir())]
    return [json.loads(line) for text in texts for line in text.splitlines() if line]


def test_a_server_that_dies_inside_a_window_loses_nothing(tmp_path):
    made = project(tmp_path)
    with serving(made.folder / "model", last=6) as server, pytest.raises(RunError) as error:
        run(made, server)
    message = str(error.value)
    assert message.startswith(f"{server.url}/v1/completions: ")
    assert "the 6 responses of 12 that the window has so far are in" in message
    assert message.endswith("run the same command to resume")
    assert [path.name for path in checkpoints(made.run)] == ["checkpoint-1"]
    before = rows(made.run)
    with serving(made.folder / "model") as server:
        run(made, server)
    assert server.num_sampled == 2  # prompts whose responses had not arrived
    after = rows(made.run)
    assert after[: len(before)] == before or all(row in after for row in before[12:])
    assert len(losses(made.run)) == 2
    assert max(gaps(made.run)) < 1e-4


def test_a_killed_run_trains_on_the_very_responses_that_were_sampled(tmp_path, monkeypatch):
    """With what the journal has, an uninterrupted run needs no server, and gives the same bits."""
    made = project(tmp_path, reward=f"{REWARD}:deadly", save=2, steps=3)
    armed, other = tmp_path / "armed", tmp_path / "other"
    monkeypatch.setenv("DEADLY_REWARD", str(armed))
    armed.touch()
    with serving(made.folder / "model") as server:
        assert in_child(lambda: run(made, server))
        assert not checkpoints(made.run)  # killed in the reward of the second window
        kept = [row for row in rows(made.run) if row["version"] == 1]
        assert len(kept) == 12
        count = server.num_sampled
        shutil.copytree(made.run / "sampled", other / "sampled")
        run(made, server)
        assert server.num_sampled == count + 4  # the third window alone
        for path in (made.run / "sampled").iterdir():
            shutil.copy(path, other / "sampled")
    run(made, server, **{"train.output_dir": str(other)})  # which is closed
    assert losses(other) == losses(made.run)
    assert_same(final_weights(other), final_weights(made.run))
    assert {row["version"] for row in rows(made.run)} == {2}  # checkpoint-2 needs no others


class StopAt(TrainerCallback):
    """Ends a run, after it has copied what a server sampled."""

    def __init__(self, step, journal, copies):
        self.step, self.journal, self.copies = step, journal, copies

    def on_step_end(self, args, state, control):
        shutil.copytree(self.journal, self.copies, dirs_exist_ok=True)
        control.should_training_stop |= state.global_step == self.step


@pytest.mark.proof
@pytest.mark.parametrize("surrogate", ["clip", pytest.param("rloo", marks=pytest.mark.proof)])
def test_a_run_that_stops_between_the_passes_of_a_window_ends_with_the_same_bits(
    surrogate, tmp_path
):
    """With weights of a server's log-probabilities, and responses that are only counted."""
    settings = {"passes": 2, "mask_truncated_completions": True, "max_new_tokens": 12, "beta": 0.1}
    made = project(tmp_path, surrogate=surrogate, method=LORA, steps=4, **settings)
    other = tmp_path / "other"
    with serving(made.folder / "model") as server:
        run(made, server, callbacks=[StopAt(3, made.run / "sampled", other / "sampled")])
        assert [path.name for path in checkpoints(made.run)][-1] == "checkpoint-3"
        run(made, server)
    run(made, server, **{"train.output_dir": str(other)})  # which is closed
    assert losses(other) == losses(made.run)
    assert_same(final_weights(other), final_weights(made.run))
    clipped = [row["completions_clipped"] for row in metrics(other) if "completions_clipped" in row]
    assert all(0 < share < 1 for share in clipped)
    assert any("sampling_weight" in row for row in metrics(other))


def test_responses_of_another_recipe_are_not_taken(tmp_path):
    made = project(tmp_path, save=5, steps=2)
    with serving(made.folder / "model", last=6) as server, pytest.raises(RunError):
        run(made, server)
    with serving(made.folder / "model") as server:
        run(made, server, **{"optim.adamw.learning_rate": 0.01})
    assert server.num_sampled == 8


def test_weights_that_a_server_does_not_take_are_heard_in_the_meter(tmp_path, caplog):
    made = project(tmp_path)
    with serving(made.folder / "model") as server:
        server.is_deaf = True
        run(made, server)
    first, second = gaps(made.run)
    assert first < 1e-4
    assert second > 0.05
    assert "most tokens differ" in caplog.text


def test_probabilities_of_another_temperature_are_heard_with_the_cure(tmp_path, caplog):
    made = project(tmp_path, temperature=0.5, steps=1)
    with serving(made.folder / "model", scale=2.0) as server:
        run(made, server)
    assert "at another temperature" in caplog.text
    assert "--logprobs-mode processed_logprobs" in caplog.text


def test_a_response_that_cannot_be_trained_on_stops_the_run_with_its_reason(tmp_path):
    def older(body, found):
        return {**found, "model": "surefoot-0-older"}

    made = project(tmp_path, method=LORA)
    with serving(made.folder / "model", change=older) as server, pytest.raises(RunError) as error:
        run(made, server)
    assert "sampled with weights 'surefoot-0-older' where 'surefoot-0-" in str(error.value)
    assert not checkpoints(made.run)


class Remembering:
    """A server that gives one token, and remembers the weights that it was given."""

    url, concurrency = "http://server", 2

    def __init__(self):
        self.loaded, self.fails = [], False

    def load(self, weights, before):
        if self.fails:
            raise RunError("http://server/load: answered 404: no such endpoint")
        self.loaded.append(int(weights.name.split("-")[1]))
        return weights

    def sample(self, request, weights):
        one = ServerResponse([5], [-1.0], "length", weights.name)
        return [one] * request.count


class Unwritten(ServedPolicy):
    def _written(self, version):
        return Path("served")


def served_by(server, folder):
    inner = tiny.model()
    network = SimpleNamespace(module=inner, inner=inner, own_stops=[2])
    return Unwritten(server, network, folder, "full", {}, None, ALONE, "recipe")


def asked(version, index, prompts=((3, 4), (3, 4), (5,))):
    settings = sampling(1, 1.0, 32)
    return WindowRequest((0, index), version, prompts, settings, 0, [2])


def test_a_rollback_gives_the_server_the_weights_again(tmp_path):
    """Step 9 after a rollback has other weights than step 9 before it."""
    server = Remembering()
    policy = served_by(server, tmp_path)
    for version, index in ((8, 8), (9, 9), (8, 8), (9, 10)):  # the third is in the journal
        assert [one.version for one in policy.generate(asked(version, index))] == [version] * 3
    assert server.loaded == [8, 9, 9]


def test_a_server_that_takes_no_weights_ends_the_run_with_what_to_do(tmp_path):
    server = Remembering()
    server.fails = True
    with pytest.raises(RunError, match=r"answered 404.*generation.md.*to resume"):
        served_by(server, tmp_path).generate(asked(0, 0))


EXPECTED = Expected(
    "http://server",
    SamplingRequest([3, 4], 1, 3, 1.0, [2, 9]),
    ServedWeights(None, "now", is_adapter=False),
    *(10, 7, "length"),
)
GOOD = {"ids": [5, 6, 2], "logps": [-1.0, -2.0, 0.0], "finish_reason": "stop", "weights": "now"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ids": None}, "gave no token ids"),
        ({"ids": []}, "gave no token ids"),
        ({"ids": ["5"]}, "gave no token ids"),
        ({"ids": [5, 6, 7, 8]}, "gave 4 tokens where at most 3 were requested"),
        ({"ids": [5, 10]}, "token id 10, outside the vocabulary of 10"),
        ({"ids": [5, -1]}, "token id -1, outside"),
        ({"ids": [5, 2, 6]}, "continued after a token that ends a response"),
        ({"logps": None}, "no log-probabilities"),
        ({"logps": [-1.0, None, -1.0]}, "no log-probabilities"),
        ({"logps": [-1.0]}, "gave 1 log-probability of 3 tokens"),
        ({"logps": [-1.0, 0.5, -1.0]}, "gave 0.5 as a log-probability"),
        ({"logps": [-1.0, float("nan"), -1.0]}, "gave nan as"),
        ({"ids": [5, 6, 7]}, "ended a response with token 7, which is no token that ends one"),
        ({"ids": [5, 6, 7], "finish_reason": "abort"}, "did not complete a response"),
        ({"weights": "before"}, "with weights 'before' where 'now' were requested"),
    ],
)
def test_nothing_silently_wrong_is_taken(changes, said):
    with pytest.raises(RunError, match=said):
        EXPECTED.samples([ServerResponse(**{**GOOD, **changes})])


def test_what_is_right_is_taken_as_it_is():
    (found,) = EXPECTED.samples([ServerResponse(**GOOD)])
    assert (found.ids, found.logps) == ((5, 6, 2), (-1.0, -2.0, 0.0))
    assert (found.finish_reason, found.version) == ("stop", 7)
    cut = ServerResponse(**{**GOOD, "ids": [5, 6, 7], "finish_reason": "length"})
    assert EXPECTED.samples([cut])[0].finish_reason == "length"
    short = ServerResponse([5, 6], [-1.0, -1.0], "length", None)
    assert EXPECTED.samples([short])[0].finish_reason == "context"
    with pytest.raises(RunError, match="gave 2 responses where 1 were requested"):
        EXPECTED.samples([short, short])


def test_settings_that_mean_nothing_are_refused():
    server = {"vllm": {"url": "http://localhost:8000"}}
    with pytest.raises(RecipeError, match="sampling_batch_size has no effect"):
        read(GRPO, {"reward": "r.py:f", "sampler": server, "sampling_batch_size": 8})
    with pytest.raises(RecipeError, match="url: must begin with http"):
        read(GRPO, {"reward": "r.py:f", "sampler": {"sglang": {"url": "localhost:30000"}}})
    with pytest.raises(RecipeError, match="sampler has no effect without on_policy"):
        read(Distill, {"sampler": server})


def test_temperatures_at_which_nothing_can_be_sampled_are_refused_before_the_run():
    with pytest.raises(RecipeError, match="temperature: must be at least 1e-05, got 1e-06"):
        read(GRPO, {"reward": "r.py:f", "temperature": 1e-6})
    with pytest.raises(RecipeError, match="sampling_temperature: must be at least 1e-05"):
        read(Distill, {"on_policy": 0.5, "max_new_tokens": 8, "sampling_temperature": 1e-6})


def test_a_server_of_this_machine_is_asked_without_a_proxy_and_else_the_proxy_is_named(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://me:secret@127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with listening() as server:
        assert exchange(server.url, {"text": "hi"}, 5) is not None
        assert len(server.received) == 1
    with pytest.raises(RunError, match=r"through the proxy 127\.0\.0\.1:9 of HTTP_PROXY") as raised:
        exchange("http://gpu-7.example:8000/health", None, 5)
    assert "NO_PROXY=gpu-7.example" in str(raised.value)
    assert "secret" not in str(raised.value)
