"""GPTQ (arXiv:2210.17323): round a weight column by column, and correct the columns that follow for
what each has lost, so that the outputs on given inputs change least.

Legend of shapes: O outputs, I inputs. With inputs X [N, I] and H = X'X, what is minimized is
tr((W - Q) H (W - Q)').
"""

from __future__ import annotations

import torch

from .schemes import WeightScheme

_BLOCK = 128  # columns whose corrections are applied to the others at once
DAMPING = 0.01  # of the mean of H's diagonal, which is added to it


def round_to_nearest(
    weight_OI: torch.Tensor, scheme: WeightScheme, dtype: torch.dtype
) -> torch.Tensor:
    """The values that ``weight_OI`` has in the file, if scales are stored in ``dtype``."""
    high = 2 ** (scheme.args.num_bits - 1) - 1
    scales_OG = scheme.scales(weight_OI.to(dtype))[0].float()
    scales_OI = scales_OG.repeat_interleave(weight_OI.shape[1] // scales_OG.shape[1], 1)
    return (weight_OI / scales_OI).round().clamp(-high - 1, high) * scales_OI


def round_by_gptq(
    weight_OI: torch.Tensor, hessian_II: torch.Tensor, scheme: WeightScheme
) -> torch.Tensor:
    """The values [O, I] float32 that take the place of ``weight_OI``, each a multiple of its scale.

    The scales are those of the unchanged weight. Columns are rounded in the order of their inputs'
    energy, greatest first; the layout of the files does not depend on that order.
    """
    low, high = -(2 ** (scheme.args.num_bits - 1)), 2 ** (scheme.args.num_bits - 1) - 1
    scales_OG = scheme.scales(weight_OI)[0].float()
    per_group = weight_OI.shape[1] // scales_OG.shape[1]
    scales_OI = scales_OG.repeat_interleave(per_group, 1)
    order_I = hessian_II.diagonal().argsort(descending=True)
    left_OI = weight_OI.float()[:, order_I]
    scales_OI = scales_OI[:, order_I]
    root_II = _root(hessian_II.float()[order_I][:, order_I])
    found_OI = torch.empty_like(left_OI)
    for start in range(0, left_OI.shape[1], _BLOCK):
        stop = min(start + _BLOCK, left_OI.shape[1])
        lost = torch.empty_like(left_OI[:, start:stop])
        for i in range(start, stop):
            scale_O = scales_OI[:, i]
            found_OI[:, i] = (left_OI[:, i] / scale_O).round_().clamp_(low, high) * scale_O
            lost[:, i - start] = (left_OI[:, i] - found_OI[:, i]) / root_II[i, i]
            left_OI[:, i:stop] -= torch.outer(lost[:, i - start], root_II[i, i:stop])
        left_OI[:, stop:] -= lost @ root_II[start:stop, stop:]
    back_I = order_I.argsort()
    return found_OI[:, back_I].contiguous()


def _root(hessian_II: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse. Inputs that were always 0 decide nothing; damping
    is raised until the factor exists."""
    diagonal = hessian_II.diagonal()
    diagonal[diagonal == 0] = 1
    damping = DAMPING * diagonal.mean()
    for _ in range(10):
        damped = hessian_II + damping * torch.eye(len(hessian_II), device=hessian_II.device)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(factor)
            root: torch.Tensor
            root, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and root.isfinite().all():
                return root
        damping *= 10
    raise AssertionError("a matrix that is nearly diagonal has a factor")


def output_error(
    weight_OI: torch.Tensor, found_OI: torch.Tensor, hessian_II: torch.Tensor
) -> float:
    """The mean squared change of the outputs, relative to their mean square."""
    change = (weight_OI - found_OI).double()
    hessian = hessian_II.double()
    plain = weight_OI.double()
    total = float(((plain @ hessian) * plain).sum())
    return float(((change @ hessian) * change).sum()) / total if total else 0.0
