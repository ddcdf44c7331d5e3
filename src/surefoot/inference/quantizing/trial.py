"""Keep those scales of AWQ with which a rounded layer computes less wrong.

Scales are chosen by the errors of the matrices that share them. In the outputs of the layer these
errors do not count alike, so a choice can be worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...model.pretrained.weights import place
from .awq import round_to_nearest
from .foldings import Folding
from .inputs import QuantizedMatrix
from .layerwise import Call, run
from .schemes import WeightScheme

_TINY = 1e-30
Choice = tuple[Folding, torch.Tensor]  # with its scales [E, n]


@dataclass(frozen=True)
class LayerTrial:
    """A loaded layer, and some rows with what it is called with."""

    module: nn.Module
    matrices: Sequence[QuantizedMatrix]
    rows: Sequence[tuple[torch.Tensor, Call]]
    scheme: WeightScheme
    dtypes: Mapping[int, torch.dtype]  # in the files, by the id of each parameter

    @torch.no_grad()
    def fold_better(self, chosen: Sequence[Choice]) -> list[Choice]:
        """Fold each choice after which the layer, once rounded, computes less wrong than before;
        returns these. Takes the memory of a second layer."""
        if not chosen:
            return []
        plain = [(p, p.detach().clone()) for p in self.module.parameters()]
        expected = [run(self.module, *row) for row in self.rows]

        def fold(choices: Sequence[Choice]) -> None:
            for parameter, values in plain:
                parameter.copy_(values)
            for folding, scales in choices:
                folding.fold(scales, self.dtypes[id(folding.producer)])

        def error(choices: Sequence[Choice]) -> float:
            fold(choices)
            self._round()
            return self._distance(expected)

        kept, least = list[Choice](), error([])
        for one in chosen:
            if (now := error([*kept, one])) < least:
                kept, least = [*kept, one], now
        fold(kept)
        return kept

    def _round(self) -> None:
        """All parameters become what the files would have."""
        quantized = {matrix.place[0] for matrix in self.matrices}
        for parameter in self.module.parameters():
            if place(parameter.detach())[0] not in quantized:
                parameter.copy_(parameter.to(self.dtypes[id(parameter)]))
        for matrix in self.matrices:
            matrix.weight.copy_(round_to_nearest(matrix.weight, self.scheme, matrix.dtype))

    def _distance(self, expected: Sequence[torch.Tensor]) -> float:
        """The squared difference of the outputs, relative to their squares at each token: what
        reads them normalizes them."""
        total = 0.0
        for row, one in zip(self.rows, expected, strict=True):
            change_T = (run(self.module, *row) - one).square().sum(-1)
            total += float((change_T / one.square().sum(-1).clamp(min=_TINY)).double().sum())
        return total
