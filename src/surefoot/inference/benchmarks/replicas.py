"""Likelihoods of continuations on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...generate.likelihoods.likelihood import (
    Likelihood,
    LikelihoodStore,
    Question,
    likelihoods,
    share_of,
)
from ...network.network import Network


@torch.no_grad()
def network_likelihoods(
    network: Network,
    questions: Sequence[Question],
    *,
    batch_size: int,
    on_scored: Callable[[int], None] = lambda _: None,
    store: LikelihoodStore | None = None,
) -> list[list[Likelihood]]:
    """The likelihoods of the continuations of all ``questions``, in order, on every rank. A
    collective call; questions are divided among the replicas. ``on_scored`` gets numbers of
    questions, ``store`` their likelihoods. Raises ``RecipeError`` as ``Network.generate``."""
    known = {} if store is None else dict(store.known)
    mine = share_of(questions, network.share.index, network.share.count)
    own = [i for i in mine if i not in known]
    on_scored(len(known))
    found, waiting = dict(known), dict[int, list[Likelihood]]()
    with network.evaluating(), network.engine.generating(network.inner, network.world):
        asked = [questions[i] for i in own]
        for place, one in likelihoods(network.module, asked, batch_size=batch_size):
            found[own[place]] = waiting[own[place]] = one
            on_scored(1)
            if store is not None and len(waiting) >= batch_size:
                store.add(waiting)
                waiting = {}
    if store is not None and waiting:
        store.add(waiting)
    everywhere = {i: one for part in network.world.gathered(found) for i, one in part.items()}
    return [everywhere[i] for i in range(len(questions))]
