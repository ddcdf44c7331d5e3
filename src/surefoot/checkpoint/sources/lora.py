"""Base weights with a merged low-rank adapter, computed box by box.

Shapes: O outputs, I inputs, R rank. LoRA (Hu et al. 2021): ``W_OI + scale * B_OR @ A_RI``. DoRA
(Liu et al. 2024) then scales every row to a learned length: ``m_O / ||V_OI|| * V_OI`` with
``V = W + scale * B A`` and the norm over I. Experts, of which a model may have all E in one tensor,
have an update each: PEFT stores A as [E R, I] and B as [O, R E].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

import torch

from ...parallel.box import Box
from .source import Shape, TensorSource, once, read_whole

_BLOCK = 4 << 20  # elements computed at a time


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """The position of a tensor of the files in the weights of all experts: [E, O, I] in memory."""

    num_experts: int
    start: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Delta:
    """The update of one weight: names in the adapter, and its settings."""

    a: str  # [R, I]
    b: str  # [O, R]
    scale: float
    magnitude: str | None = None  # [O], DoRA only
    is_transposed: bool = False  # the weight is stored as [I, O]: embeddings, GPT-2's Conv1D
    experts: ExpertSlice | None = None  # it is an update of experts


@dataclass(frozen=True)
class Merged:
    """A base whose tensors are replaced, or updated, by an adapter.

    Computed in float32 (float64 for a float64 base) and rounded once, to the dtype of the base.
    """

    base: TensorSource
    adapter: TensorSource
    deltas: Mapping[str, Delta]  # by base name
    replaced: Mapping[str, str] = field(default_factory=dict)  # base name -> adapter name
    added: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # biases: name, scale
    _norms: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    _factors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @once
    def shapes(self) -> Mapping[str, Shape]:
        """Those of the base, except for replaced tensors: a resized vocabulary has more rows."""
        shapes = self.adapter.shapes()
        return {**self.base.shapes(), **{name: shapes[new] for name, new in self.replaced.items()}}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Those of the base."""
        return self.base.dtypes()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The merged values."""
        dtype = self.base.dtypes()[name]
        if name not in self.deltas and name not in self.added:
            return self._plain(name, box).to(dtype)
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        if name in self.added:
            bias, scale = self.added[name]
            update = self.adapter.read(bias, box).to(exact) * scale
            return (self._plain(name, box).to(exact) + update).to(dtype)
        delta = self.deltas[name]
        if delta.magnitude is None:
            return self._with_update(name, box, delta, exact).to(dtype)
        return self._scaled(name, box, delta, exact).to(dtype)

    def _plain(self, name: str, box: Box) -> torch.Tensor:
        if name in self.replaced:
            return self.adapter.read(self.replaced[name], box)
        return self.base.read(name, box)

    def _with_update(self, name: str, box: Box, delta: Delta, exact: torch.dtype) -> torch.Tensor:
        """V = W + scale * B A in ``box``."""
        weight = self._plain(name, box).to(exact)
        if delta.experts is not None:
            return self._with_experts(weight, box, delta, delta.experts)
        out, inner = (1, 0) if delta.is_transposed else (0, 1)
        a_RI, b_OR = self._factor(delta.a, exact), self._factor(delta.b, exact)
        a_RI = a_RI[:, box.start[inner] : box.stop[inner]]
        b_OR = b_OR[box.start[out] : box.stop[out]]
        left, right = (a_RI.T, b_OR.T) if delta.is_transposed else (b_OR, a_RI)
        return torch.addmm(weight, left, right, alpha=delta.scale)

    def _with_experts(
        self, weight: torch.Tensor, box: Box, delta: Delta, at: ExpertSlice
    ) -> torch.Tensor:
        """The same for one expert's matrix, or for the matrices of several."""
        a, b = self._factor(delta.a, weight.dtype), self._factor(delta.b, weight.dtype)
        a_ERI, b_ORE = a.view(at.num_experts, -1, a.shape[1]), b.view(len(b), -1, at.num_experts)
        missing = 3 - len(box.shape)  # of one expert, the files may have a matrix
        start, shape = (0,) * missing + box.start, (1,) * missing + box.shape
        first, row, column = map(add, at.start, start)
        rows, columns = slice(row, row + shape[1]), slice(column, column + shape[2])
        outs, ins = (columns, rows) if delta.is_transposed else (rows, columns)
        merged = weight.reshape(shape).clone()
        for index, expert_weight in enumerate(merged):
            update = b_ORE[outs, :, first + index] @ a_ERI[first + index, :, ins]
            expert_weight.add_(update.T if delta.is_transposed else update, alpha=delta.scale)
        return merged.view(weight.shape)

    def _factor(self, name: str, exact: torch.dtype) -> torch.Tensor:
        """A or B; the last few are cached, because every block of a weight needs them, and experts
        take turns with two kinds of weights."""
        if name not in self._factors:
            while len(self._factors) > 3:
                del self._factors[next(iter(self._factors))]
            self._factors[name] = read_whole(self.adapter, name).to(exact)
        return self._factors[name]

    def _scaled(self, name: str, box: Box, delta: Delta, exact: torch.dtype) -> torch.Tensor:
        """DoRA: rows of V scaled to their learned lengths; the norm is over complete rows."""
        assert delta.magnitude is not None  # or there is nothing to scale to
        out = 1 if delta.is_transposed else 0
        outs = Box((box.start[out],), (box.shape[out],))
        m_O: torch.Tensor = self.adapter.read(delta.magnitude, outs).to(exact)
        if delta.is_transposed:
            value = self._with_update(name, box, delta, exact)
            norm_O = self._column_norms(name, delta, exact)[box.start[1] : box.stop[1]]
            return value * (m_O / norm_O)[None, :]
        whole = self.shapes()[name]
        rows = Box((box.start[0], 0), (box.shape[0], whole[1]))
        value_OI = self._with_update(name, rows, delta, exact)
        norm_O = value_OI.square().sum(1).sqrt()
        scaled_OI = value_OI * (m_O / norm_O)[:, None]
        return scaled_OI[:, box.start[1] : box.stop[1]]

    def _column_norms(self, name: str, delta: Delta, exact: torch.dtype) -> torch.Tensor:
        """Norms over the stored rows; cached, because every block of rows needs them."""
        if name not in self._norms:
            shape = self.shapes()[name]
            total = torch.zeros(shape[1], dtype=torch.float64)
            for box in Box.whole(shape).blocks(max(shape[1], _BLOCK)):
                total += self._with_update(name, box, delta, exact).double().square().sum(0)
            self._norms[name] = total.sqrt().to(exact)
        return self._norms[name]


def same_values(source: TensorSource, a: str, b: str) -> bool:
    """Whether two tensors of a source are equal."""
    if source.shapes()[a] != source.shapes()[b]:
        return False
    return torch.equal(read_whole(source, a), read_whole(source, b))


@dataclass(frozen=True)
class ReplacedRows:
    """``base`` with rows from ``adapter``: by the name of a matrix, the adapter's tensor, and the
    row that each row of it replaces."""

    base: TensorSource
    adapter: TensorSource
    rows: Mapping[str, tuple[str, Sequence[int]]]

    def shapes(self) -> Mapping[str, Shape]:
        """Unchanged."""
        return self.base.shapes()

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Unchanged."""
        return self.base.dtypes()

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The values of the base, but for those rows."""
        values = self.base.read(name, box)
        if name not in self.rows:
            return values
        key, ids = self.rows[name]
        values = values.clone()
        for adapter_row, row in enumerate(ids):
            if box.start[0] <= row < box.stop[0]:
                part = Box((adapter_row, *box.start[1:]), (1, *box.shape[1:]))
                values[row - box.start[0]] = self.adapter.read(key, part)[0].to(values.dtype)
        return values
