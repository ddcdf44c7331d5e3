"""A step waits for nothing: neither the host for the device, nor one tensor after another."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import small
import tiny
from surefoot.batch import Loss
from surefoot.methods import LoRA
from surefoot.model.numerics import LossScaler
from surefoot.optim._variants.adamw import AdamW
from surefoot.optim.optimizer import Schedule
from surefoot.training.callback import TrainerCallback
from surefoot.training.step import Step

# On a GPU, the host learns from each of these what the device has computed: it waits.
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"}
STEP = ("on_step_begin", "on_step_end")


class Watching(TorchDispatchMode, TrainerCallback):
    """Notes what is read of tensors within steps, and how many kernels a step starts."""

    def __init__(self):
        super().__init__()
        self.reads, self.kernels, self.is_within = [], [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.is_within:
            name = function.overloadpacket.__name__
            self.kernels[-1].append(name)
            if name in READS:
                self.reads.append(name)
        return function(*args, **(kwargs or {}))

    def on_step_begin(self, args, state, control):
        self.is_within = True
        self.kernels.append([])

    def on_step_end(self, args, state, control):
        self.is_within = False


@pytest.mark.parametrize(
    ("method", "on_nan"),
    [
        (None, "stop"),
        (LoRA(rank=2), "skip"),
        pytest.param(None, "rollback", marks=pytest.mark.proof),
        pytest.param(None, "skip", marks=pytest.mark.proof),
        pytest.param(LoRA(rank=2), "stop", marks=pytest.mark.proof),
        pytest.param(LoRA(rank=2), "rollback", marks=pytest.mark.proof),
    ],
)
def test_no_step_reads_what_the_device_computes(method, on_nan, tmp_path):
    watching = Watching()
    built = small.trainer(tmp_path, watching, method=method, on_nan=on_nan, log_steps=3)
    with watching:
        built.fit()
    assert len(watching.kernels) == 8
    assert watching.reads == []


def test_what_is_read_would_be_noticed(tmp_path):
    class Reads(TrainerCallback):
        def on_optimizer_step(self, args, state, control):
            float(next(args.model.parameters()).detach().sum())

    watching = Watching()
    with watching:
        small.trainer(tmp_path, watching, Reads(), max_steps=2, save_steps=None).fit()
    assert watching.reads == ["_local_scalar_dense"] * 2


def steps(optimizer, window, max_grad_norm=1.0):
    schedule = Schedule(name="constant", total_steps=9)
    return Step(optimizer, schedule, window, max_grad_norm, LossScaler(enabled=False))


def test_scaling_begins_anew_after_a_run_without_it_and_goes_on_after_one_with_it():
    fresh, lowered = LossScaler(enabled=True), LossScaler(enabled=True)
    lowered.update(overflowed=True)
    for saved, scale in ((LossScaler(enabled=False), fresh.scale), (lowered, fresh.scale / 2)):
        resumed = LossScaler(enabled=True)
        resumed.load_state_dict(saved.state_dict())
        assert resumed.scale == scale


def kernels(layers):
    """What normalising, clipping and the update start, in a step that is not the first."""
    model = tiny.model(num_hidden_layers=layers)
    optimizer = AdamW().build(list(model.named_parameters()))

    def window(_window, _loss, *, before, after):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        watching.is_within = True
        return [Loss(torch.ones(()), torch.ones(()))]

    step = steps(optimizer, window)
    watching = Watching()
    for number in range(2):
        watching.kernels = [[]]
        with watching:
            step.update(step.gradients([], None, step=number, before=None, after=None))
        watching.is_within = False
    return watching.kernels[0]


def test_clipping_and_optimizer_start_no_kernel_for_each_parameter():
    assert kernels(1) == kernels(3) != []


def test_a_step_that_is_not_a_number_moves_nothing_before_anyone_has_looked():
    model = torch.nn.Linear(3, 2)
    optimizer = AdamW(learning_rate=0.1).build(list(model.named_parameters()))
    total = torch.ones(())

    def window(_window, _loss, *, before, after):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return [Loss(total, torch.ones(()))]

    step = steps(optimizer, window)

    def learn():
        step.update(step.gradients([], None, step=0, before=None, after=None))
        state = optimizer.state_dict()["state"].values()
        tensors = [*model.parameters(), *(tensor for each in state for tensor in each.values())]
        return [tensor.detach().clone() for tensor in tensors]

    first = learn()
    total.fill_(float("nan"))
    second = learn()
    assert all(map(torch.equal, first, second))
    total.fill_(1.0)
    assert not any(map(torch.equal, first, learn()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_divided_and_clipped_as_torch_does(dtype):
    torch.manual_seed(0)
    given = [torch.randn(5, 4).to(dtype), torch.randn(7).to(dtype)]
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in given]

    def window(_window, _loss, *, before, after):
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        return [Loss(torch.ones(()), torch.tensor(37))]

    optimizer = torch.optim.SGD(parameters, lr=0.1)
    step = steps(optimizer, window, 0.05)
    norm = step.gradients([], None, step=0, before=None, after=None).read().grad_norm

    expected = [torch.nn.Parameter(torch.zeros(tensor.shape).double()) for tensor in given]
    for parameter, gradient in zip(expected, given, strict=True):
        parameter.grad = gradient.double() / 37
    assert norm == pytest.approx(
        float(torch.nn.utils.clip_grad_norm_(expected, 0.05)), rel=4 * torch.finfo(dtype).eps
    )
    for parameter, reference in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad.to(dtype), rtol=None, atol=None)
