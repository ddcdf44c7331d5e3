"""Every stage, method and optimizer on a GPU that the CPU pretends to be: no operation mixes
devices, and between two lines of the log the host waits for nothing."""

import itertools

import pytest
import torch

from adapted import method_of
from each import some
from pretended_gpu import GPU, MixedDevicesError, pretended_gpu
from spread import trainer
from stage_data import CODEC, examples_of, stage_of
from surefoot.checkpoint.saving import _writer_process as writer_process
from surefoot.checkpoint.saving._snapshot_buffer import SnapshotBuffer
from surefoot.errors import RecipeError
from surefoot.methods import METHODS
from surefoot.model import numerics, packed_kernels
from surefoot.model.numerics import use_deterministic_kernels
from surefoot.model.packed_attention import DocumentBounds, RowMask
from surefoot.optim import OPTIMIZERS
from surefoot.parallel.world import ALONE
from surefoot.stages import STAGES
from surefoot.training.callback import TrainerCallback

# PEFT sets it; transformers 5.23 has renamed it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
# Whether to update: only torch's fused kernels find that on the device.
OF_UPDATE = "_local_scalar_dense at training/step.py:"
ONCE = {"codebook", "singular_vectors"}  # tables of codes; a projector, every 200 steps


MORE = {"grpo": {"average_over": "max_new_tokens"}}


class Acts(TrainerCallback):
    """Sets flags at the end of each step."""

    def __init__(self, *flags):
        self.flags = flags

    def on_step_end(self, args, state, control):
        for flag in self.flags:
            setattr(control, flag, True)


def made(
    folder, *, stage="sft", method="full", optim="adamw", train=None, offloads=False, **options
):
    """A trainer in bfloat16, as recipes have it on a GPU, of packed rows and varlen attention."""
    section = {"precision": "bf16", "global_batch_size": 4, "micro_batch_size": 2, "log_steps": 9}
    built = trainer(
        ALONE,
        folder,
        stage=stage_of(stage, **MORE.get(stage, {})),
        method=method_of(method),
        optim=OPTIMIZERS[optim](learning_rate=1e-3, offload_state=offloads),
        codec=CODEC,
        examples=examples_of(stage, 9),
        train={**section, "max_steps": 1, **(train or {})},
        **{"packing": True, **options},
    )
    if options.get("packing", True) and built.section.precision != "fp32":
        packed_kernels.use(built.policy.network.inner, "varlen")
    return built


def between_logs(gpu):
    """The waits on the way from step to step, without those that prepare a window."""
    return [
        wait
        for wait in gpu.waits
        if wait.functions & {"_turn", "next_turn"} and not wait.functions & {"prepare", *ONCE}
    ]


def check(folder, stage, method, optim):
    with pretended_gpu() as gpu:
        try:
            built = made(folder, stage=stage, method=method, optim=optim)
        except RecipeError as error:
            assert method == "badam_ratio"
            assert "updates matrices as a whole" in str(error)
            return
        gpu.waits.clear()
        built.fit()
    assert built.state.global_step == 1
    waits = between_logs(gpu)
    if optim != "adamw":
        assert str(waits.pop()).startswith(OF_UPDATE)
    assert not waits, "\n".join(map(str, waits))


ALL = list(itertools.product(STAGES, METHODS, OPTIMIZERS))
# Each of them about once; each pair of two would be 108 combinations, of half a second each.
DIAGONAL = {
    (list(STAGES)[i % 8], list(METHODS)[i * 2 % 9], optim) for i, optim in enumerate(OPTIMIZERS)
}
FEW = {each for each in DIAGONAL if each[0] not in ("ppo", "grpo")}  # distill samples, too


@pytest.mark.parametrize(("stage", "method", "optim"), some(ALL, FEW))
def test_a_step_mixes_no_devices_and_waits_for_nothing(stage, method, optim, tmp_path):
    check(tmp_path, stage, method, optim)


@pytest.mark.parametrize("stage", some(STAGES, ["rm"]))
def test_a_run_is_logged_evaluated_and_saved(stage, tmp_path):
    """What is sampled in training and evaluation is, too: by ppo, grpo and distill."""
    acts = Acts("should_log", "should_evaluate", "should_save")
    with pretended_gpu() as gpu:
        held = list(examples_of(stage, 3, seed=6))
        built = made(tmp_path, stage=stage, method="lora", held=held, callbacks=[acts])
        built.fit()
    assert (tmp_path / "checkpoint-1").is_dir()
    assert {"loss", "eval_loss"} <= {name for log in built.state.log_history for name in log}
    assert not between_logs(gpu)


def test_padded_rows_wait_for_the_mask_of_transformers_alone(tmp_path):
    with pretended_gpu() as gpu:
        made(tmp_path, packing=False).fit()
    places = {wait.lines[0].partition(":")[0] for wait in between_logs(gpu)}
    assert places == {"transformers/masking_utils.py"}


@pytest.mark.parametrize("recompute", some(["full", "selective", "offload"], ["offload"]))
def test_recomputed_layers_wait_for_nothing(recompute, tmp_path):
    with pretended_gpu() as gpu:
        made(tmp_path, method="lora", recompute=recompute).fit()
    assert not between_logs(gpu)


def test_fp16_waits_once_a_step_to_know_its_scale(tmp_path):
    with pretended_gpu() as gpu:
        made(tmp_path, train={"precision": "fp16", "max_steps": 2}).fit()
    assert [str(wait).startswith(OF_UPDATE) for wait in between_logs(gpu)] == [True, True]


def test_an_offloaded_state_waits_once_a_step_until_it_may_be_read(tmp_path):
    with pretended_gpu() as gpu:
        made(tmp_path, offloads=True, train={"max_steps": 2}).fit()
    waits = [str(wait).partition(":")[0] for wait in between_logs(gpu)]
    assert waits == ["synchronize at optim/bf16_weights.py"] * 2


def test_it_computes_what_the_cpu_computes(tmp_path):
    train, logs = {"precision": "fp32", "max_steps": 3}, [Acts("should_log")]
    settings = {"train": train, "callbacks": logs}
    on_cpu = made(tmp_path / "cpu", **settings)
    on_cpu.fit()
    with pretended_gpu() as gpu:
        pretended = made(tmp_path / "gpu", **settings)
        pretended.fit()
    assert gpu.num_operations > 1000
    logs = [
        [(log["loss"], log["grad_norm"]) for log in each.state.log_history if "loss" in log]
        for each in (on_cpu, pretended)
    ]
    assert len(logs[0]) == 3
    assert logs[1] == [pytest.approx(each, rel=1e-5) for each in logs[0]]


def test_attention_that_fails_in_its_backward_pass_leaves_no_strict_mode(tmp_path):
    """As when memory runs out there: the step is repeated, and padding has no strict algorithm."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            raise MemoryError

    with pretended_gpu():
        built = made(tmp_path)
        use_deterministic_kernels(True)
        try:
            x = torch.ones(2, device=GPU, requires_grad=True)
            output = numerics.deterministically(lambda heads: Fails.apply(heads[0]), [x])
            with pytest.raises(MemoryError):
                output.sum().backward()
            built.policy.drop_gradients()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        finally:
            use_deterministic_kernels(False)


def test_a_mask_of_pictures_waits_once_for_all_documents_of_a_row():
    def sees(_row, _head, query, key):
        return (key <= query) | (query // 4 == key // 4)  # within a picture in both directions

    with pretended_gpu() as gpu:
        masks = RowMask(sees, GPU).of_documents(DocumentBounds([0, 1, 4, 9]))
    assert [mask is None for mask in masks] == [True, False, False]
    assert [wait.operation for wait in gpu.waits] == ["copy to the host"]


def test_memory_that_cannot_be_pinned_leaves_no_error_for_the_next_kernel():
    with pretended_gpu() as gpu:
        gpu.refuses_to_pin = True
        buffer = SnapshotBuffer.create(1 << 12)
        assert not writer_process.pin(buffer)
        assert torch.ones(2, device=GPU).sum().item() == 2
        buffer.close()


def waits_of(work):
    with pretended_gpu() as gpu:
        work()
    return [wait.operation for wait in gpu.waits]


def test_the_pretended_gpu_refuses_and_waits_as_a_true_one():
    with pretended_gpu():
        x = torch.ones(2, 3, device="cuda")
        assert (x.device, x.is_cuda, torch.zeros_like(x).device) == (GPU, True, GPU)
        assert (x * torch.tensor(2.0)).device == GPU  # a number of the host
        for mixes in (
            lambda: x + torch.ones(2, 3),
            lambda: torch.stack([x.sum(), torch.tensor(0.0)]),
            lambda: x[torch.zeros(1, dtype=torch.int64, device="cuda")].copy_(x[0]) @ torch.ones(3),
        ):
            with pytest.raises(MixedDevicesError):
                mixes()
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
    on_gpu = {"device": "cuda"}
    assert waits_of(lambda: torch.ones(2, **on_gpu).sum().item()) == ["_local_scalar_dense"]
    assert waits_of(lambda: bool(torch.ones(1, **on_gpu))) == ["_local_scalar_dense"]
    assert waits_of(lambda: torch.ones(2, **on_gpu).tolist()) == ["copy to the host"]
    assert waits_of(lambda: torch.tensor([1, 2], device=GPU)) == ["copy to the device"]
    assert waits_of(lambda: torch.ones(2, **on_gpu)[torch.ones(2, **on_gpu) > 0]) == [
        "index by a mask"
    ]
    assert waits_of(lambda: torch.ones(2).pin_memory().to(GPU, non_blocking=True)) == []
    assert waits_of(lambda: torch.ones(2).to(GPU, non_blocking=True)) == [
        "copy to the device of memory that is not pinned"
    ]


def test_a_copy_that_nobody_waited_for_has_no_numbers():
    with pretended_gpu() as gpu:
        host, sent = torch.ones(2, device="cuda").to("cpu", non_blocking=True), torch.cuda.Event()
        sent.record()
        assert host.isnan().all()
        sent.synchronize()
        assert host.tolist() == [1, 1]
    assert not gpu.waits
