"""What a run owes to its machine: compiled layers, one rank over NCCL, too little memory."""

import shutil
import socket

import pytest
import torch
from exact import needs_cuda

import surefoot
from project import Project, assert_same, checkpoints, final_weights
from spread import learn, trainer
from surefoot.errors import RunError
from surefoot.methods import LoRA
from surefoot.model.layers import compile_layers
from surefoot.parallel.section import ParallelSection
from surefoot.parallel.sharded_model import layers
from surefoot.parallel.world import ALONE, connected
from surefoot.training.callback import TrainerCallback

pytestmark = pytest.mark.gpu
CLOSE = 1e-4  # of mean losses (about 4) and of gradient norms: fused sums round differently


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("packing", [True, False])
def test_compiled_layers_give_the_losses_of_plain_ones(packing, device, tmp_path):
    needs_cuda(device, "tests/model/test_compiled.py compiles for CPUs")
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler on this machine")
    torch._dynamo.reset()
    options = {"packing": packing, "method": LoRA(rank=2, dropout=0.3), "head_dim": 16}
    expected = learn(trainer(ALONE, tmp_path, **options), 3)
    made = trainer(ALONE, tmp_path, **options)
    compile_layers(layers(made.policy.module))
    for ours, theirs in zip(learn(made, 3), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)


@pytest.fixture
def one_rank(monkeypatch):
    """The process group of a launcher that has started one rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except OSError as error:  # ranks would try for minutes, of which a GPU is lent few
            pytest.skip(f"this machine has no loopback network: {error}")
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the only one of a machine without network
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with connected(ParallelSection(num_processes=1, timeout=1), 0, 1) as world:
        yield world


@pytest.mark.parametrize("packing", [True, False])
def test_one_rank_of_a_process_group_learns_what_none_learns(packing, one_rank, device, tmp_path):
    """Sharded over itself: all-gather, reduce-scatter and sums pass through NCCL, or gloo."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    group = one_rank.mesh["dp_shard"].get_group()
    assert group._get_backend(device).name() == backend
    assert one_rank.totals(torch.ones(3, device=device)).tolist() == [1.0] * 3
    expected = learn(trainer(ALONE, tmp_path, packing=packing), 2)
    found = learn(trainer(one_rank, tmp_path, packing=packing), 2)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)


class Greedy(TrainerCallback):
    """Allocates more than any machine has, in the middle of a step."""

    def __init__(self, device, step):
        self.device, self.step = device, step

    def on_pre_optimizer_step(self, args, state, control):
        if state.global_step + 1 == self.step:
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)


@pytest.mark.proof
def test_a_step_without_memory_ends_with_a_clear_error_and_the_run_is_resumed(device, tmp_path):
    project = Project(tmp_path, train={"max_steps": 6, "output_dir": str(tmp_path / "cut")})
    with pytest.raises(RunError) as raised:
        surefoot.train(project.recipe, callbacks=[Greedy(device, 5)])
    told = str(raised.value)
    assert told.startswith("train.micro_batch_size: step 5 ran out of memory (")
    assert str(tmp_path / "cut" / "checkpoint-3") in told
    assert "model.gradient_checkpointing: true" in told
    assert "\n" not in told
    surefoot.train(project.recipe)
    surefoot.train(project.recipe, **{"train.output_dir": str(tmp_path / "whole")})
    assert checkpoints(tmp_path / "cut")[-1].name == "checkpoint-6"
    assert_same(final_weights(tmp_path / "cut"), final_weights(tmp_path / "whole"))


def test_an_error_that_is_not_about_memory_stays_what_it_is(tmp_path):
    class Wrong(TrainerCallback):
        def on_step_end(self, args, state, control):
            raise RuntimeError("of a callback")

    project = Project(tmp_path, train={"max_steps": 2})
    with pytest.raises(RuntimeError, match="of a callback"):
        surefoot.train(project.recipe, callbacks=[Wrong()])
