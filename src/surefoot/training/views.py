"""What callbacks see of the data and of the schedule of learning rates, under the names that the
Hugging Face Trainer gives them: views, through which nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RunError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shown:
    """A value under a name of the Hugging Face Trainer's arguments."""

    value: object
    setting: str | None  # of the recipe; None: the place of this rank


@dataclass(frozen=True)
class DataView:
    """Examples, and in how many batches they are read: ``len``, as that of a ``DataLoader``."""

    dataset: object  # the encoded examples; None: while they are being encoded
    batch_size: int  # examples of an optimizer step, or of a batch of an evaluation
    count: int | None  # batches of an epoch; None: not known while the data is being encoded

    @classmethod
    def of(cls, datasets: Mapping[str, Sized], size: int) -> DataView | None:
        """That of evaluation datasets by name, one of them by itself; None without any."""
        if not datasets:
            return None
        count = sum(-(-len(each) // size) for each in datasets.values())
        only = next(iter(datasets.values()))
        return cls(only if len(datasets) == 1 else datasets, size, count)

    def __len__(self) -> int:
        if self.count is None:
            raise TypeError("the number of batches is not known while the data is being encoded")
        return self.count

    def __iter__(self) -> Iterator[object]:
        raise RunError(
            "callbacks: the batches of a run are its own, as reading them would change its order; "
            "read the examples in .dataset"
        )

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"callbacks: a dataloader has no {name} here, only dataset, batch_size and len: data "
            "and train in the recipe say the order and the batches"
        )


@dataclass(frozen=True)
class ScheduleView:
    """The learning rates of the last update."""

    optimizer: torch.optim.Optimizer

    def get_last_lr(self) -> Sequence[float]:
        """One for each group of parameters."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"callbacks: lr_scheduler has no {name} here, only get_last_lr(): the rate is a "
            "function of the step, optim.NAME.schedule in the recipe"
        )
