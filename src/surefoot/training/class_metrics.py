"""Metrics of a classifier over all examples of an evaluation, by the definitions of scikit-learn.

Shapes: E examples, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"
BETTER = {"accuracy": True, "f1_*": True, "auc": True}
MOST_CLASSES = 20  # whose confusions are metrics: their square is the number of these


def of_one_label(
    labels_E: NDArray[np.int64], logits_EK: Floats, names: Sequence[str]
) -> dict[str, float]:
    """Accuracy, F1, the area under the ROC curve (of each class against all others, averaged), and
    how often each class is predicted as which."""
    import numpy as np

    predicted_E, size = logits_EK.argmax(1), len(names)
    counts_KK = np.zeros((size, size), np.int64)  # true, predicted
    np.add.at(counts_KK, (labels_E, predicted_E), 1)
    truth_EK = labels_E[:, None] == np.arange(size)
    hits_K = counts_KK.diagonal()
    metrics = _f1(hits_K, counts_KK.sum(0), counts_KK.sum(1))
    weights_EK = np.exp(logits_EK - logits_EK.max(1, keepdims=True))
    metrics |= _auc(truth_EK, weights_EK / weights_EK.sum(1, keepdims=True))
    if size <= MOST_CLASSES:
        metrics |= {
            confusion(true, predicted): float(counts_KK[i, j])
            for i, true in enumerate(names)
            for j, predicted in enumerate(names)
        }
    return {"accuracy": float((predicted_E == labels_E).mean()), **metrics}


def of_several_labels(truth_EK: NDArray[np.bool_], logits_EK: Floats) -> dict[str, float]:
    """Accuracy (of rows of which every label is right), F1 and the area under the ROC curve of each
    label, averaged. A label is predicted from a probability of 1/2."""
    predicted_EK = logits_EK > 0
    hits_K = (truth_EK & predicted_EK).sum(0)
    metrics = _f1(hits_K, predicted_EK.sum(0), truth_EK.sum(0))
    is_right_E = (truth_EK == predicted_EK).all(1)
    return {"accuracy": float(is_right_E.mean()), **metrics, **_auc(truth_EK, logits_EK)}


def confusion(true: str, predicted: str) -> str:
    """The metric that counts the examples of one class that are predicted as another. A slash
    stands between the names, so in a name it becomes a division slash."""
    names = (name.replace("/", "\u2215") for name in (true, predicted))
    return "/".join(["confusion", *names])


def table(metrics: Mapping[str, float], names: Sequence[str]) -> list[list[str]]:
    """The confusions among ``metrics`` as rows of text, true classes downwards; empty if there are
    none."""
    keys = [[confusion(true, predicted) for predicted in names] for true in names]
    if not all(key in metrics for row in keys for key in row):
        return []
    rows = [[f"{metrics[key]:,.0f}" for key in row] for row in keys]
    return [
        ["true \\ predicted", *names],
        *([name, *row] for name, row in zip(names, rows, strict=True)),
    ]


def _f1(
    hits_K: NDArray[np.int64], predicted_K: NDArray[np.int64], true_K: NDArray[np.int64]
) -> dict[str, float]:
    """Twice the hits over all that is predicted and all that is true: of all classes together, and
    the mean over those that occur."""
    sizes_K = predicted_K + true_K
    occurring_K = sizes_K > 0
    each = 2 * hits_K[occurring_K] / sizes_K[occurring_K]
    if not len(each):
        return {"f1_micro": 0.0, "f1_macro": 0.0}
    return {"f1_micro": float(2 * hits_K.sum() / sizes_K.sum()), "f1_macro": float(each.mean())}


def _auc(truth_EK: NDArray[np.bool_], scores_EK: Floats) -> dict[str, float]:
    """The mean over the classes that some examples have and others have not; nothing if there are
    none. Of a class, the probability that a random example of it is scored above one of another,
    equal scores as half (Mann and Whitney)."""
    import numpy as np

    areas = list[float]()
    for truth_E, scores_E in zip(truth_EK.T, scores_EK.T, strict=True):
        num_true, num_others = int(truth_E.sum()), int((~truth_E).sum())
        if not num_true or not num_others:
            continue
        _, inverse_E, counts = np.unique(scores_E, return_inverse=True, return_counts=True)
        ranks = np.cumsum(counts) - (counts - 1) / 2  # equal scores have their mean rank
        sum_of_ranks = ranks[inverse_E][truth_E].sum()
        areas.append((sum_of_ranks - num_true * (num_true + 1) / 2) / (num_true * num_others))
    return {"auc": float(np.mean(areas))} if areas else {}
