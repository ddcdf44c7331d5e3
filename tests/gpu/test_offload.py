"""A state in main memory: the same updates, and its bytes are not on the GPU."""

import pytest
import torch

from surefoot.optim import OPTIMIZERS
from surefoot.optim.bf16_weights import build_optimizer, move_weights
from surefoot.optim.state import NamedState

pytestmark = pytest.mark.gpu
MODES = ["stochastic", "master", "nearest"]


def run(name, mode, device, *, offloads):
    torch.manual_seed(0)
    dtypes = [torch.bfloat16, torch.float32]
    named = {
        f"{number}.weight": torch.nn.Parameter(torch.randn(64, 96, device=device).to(dtype))
        for number, dtype in enumerate(dtypes * 2)
    }
    optim = OPTIMIZERS[name](learning_rate=1e-2, bf16_weights=mode, offload_state=offloads)
    optimizer = build_optimizer(optim, named.items())
    for step in range(1, 4):
        move_weights(optimizer, for_gradients=True)
        for parameter in named.values():
            parameter.grad = torch.sin(parameter.detach().float() * step).to(parameter.dtype)
        optimizer.step()
        move_weights(optimizer, for_gradients=False)
    return named, NamedState(optimizer).state_dict()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_in_main_memory_is_updated_as_on_the_gpu(name, mode, device):
    expected, state = run(name, mode, device, offloads=False)
    found, rested = run(name, mode, device, offloads=True)
    for key, parameter in expected.items():
        assert torch.equal(parameter, found[key])
        for part, value in state[key].items():
            other = rested[key][part]
            assert torch.equal(value.cpu(), other.cpu())
            if device.type == "cuda" and part != "step":
                assert other.is_cpu
                assert other.is_pinned()
