"""A run that trains on responses of the server."""

import pytest

import surefoot
from project import Project, losses, metrics
from stage_data import written

from .running import running

LORA = {"lora": {"rank": 2}}


FULL = pytest.param("openai", "full", marks=pytest.mark.proof)
VLLM = pytest.param("vllm", LORA, marks=pytest.mark.proof)


@pytest.mark.parametrize(("form", "method"), [("openai", LORA), FULL, VLLM])
def test_a_server_samples_with_the_weights_of_now(form, method, tmp_path):
    """Were they others, their log-probabilities would not be those of training."""
    usual = written("grpo")["grpo"] | {"passes": 1, "mini_batches": 1}
    made = Project(
        tmp_path,
        stage={"grpo": {**usual, "sampler": {form: {"url": "http://unset"}}}},
        method=method,
        train={"max_steps": 2, "global_batch_size": 4},
        checkpoint={"save_steps": 2, "async_save": False},
        optim={"adamw": {"learning_rate": 0.05}},
    )
    with running(made.folder / "model", sampled_logprobs=True) as client:
        address = {"url": client.url, "timeout": 30, "concurrency": 4}
        if form == "openai":
            address["update_url"] = f"{client.url}/v1/update_weights"
        surefoot.train(made.recipe, **{"stage.grpo.sampler": {form: address}})
        names = [card["id"] for card in client.http.get("/v1/models").json()["data"]]
    assert len(losses(made.run)) == 2
    gaps = [row["sampling_gap_max"] for row in metrics(made.run) if "sampling_gap_max" in row]
    assert len(gaps) == 2
    assert 0 < max(gaps) < 1e-4
    assert len(names) == 2  # those before are let go
