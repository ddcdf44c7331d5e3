"""A plain torch loop that loses nothing: python examples/plain_torch_loop.py runs/waves

Kill it when you like, and start it again.
"""

import sys

import torch
from torch import nn

from surefoot.checkpoint import AsyncSaver, NamedOptimizer, RandomState, load, recover_latest

STEPS, SAVE_STEPS, BATCH = 2000, 50, 64


def main(root, steps=STEPS):
    """Learn a sum of two waves from random points; the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.05), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    states = {
        "model": model,
        "optimizer": NamedOptimizer(optimizer, model.named_parameters()),
        "schedule": schedule,
        "random": RandomState(),
    }
    if (path := recover_latest(root)) is not None:
        load(path, states)
        print(f"resuming from {path}")
    with AsyncSaver(root, keep=3, resumed_from=path) as saver:
        while schedule.last_epoch < steps:  # the schedule counts the steps
            x = 6 * torch.rand(BATCH, 1) - 3
            loss = nn.functional.mse_loss(model(x), torch.sin(2 * x) + torch.cos(5 * x) / 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step = schedule.last_epoch
            if step % SAVE_STEPS == 0 or step == steps:
                saver.save(step, states)
                print(f"step {step}, loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    main(sys.argv[1])
