"""What the stage of a recipe computes with before it trains, and how its policy is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..data.text.codec import Codec
from ..model.seeding import derive
from ..network.network import Network
from ..parallel.world import World
from ..recipe.recipe import Recipe
from ..training.context import NetworkContext, collate_of
from ..training.control.out_of_memory import MemoryGuard
from ..training.evaluation import Evaluation
from ..training.initial_values import InitialValues
from ..training.rewards.process import RewardProcess
from ..training.stage import POLICY
from ..training.windows import Place

NOTHING: Mapping[str, InitialValues] = {}
NO_NETWORKS: Mapping[str, Network] = {}


def context_of(
    recipe: Recipe,
    codec: Codec,
    networks: Mapping[str, Network],
    world: World,
    seed: int,
    memory: MemoryGuard | None = None,
    first: Mapping[str, InitialValues] = NOTHING,
    process: RewardProcess | None = None,
) -> NetworkContext:
    """The context of the recipe's stage over ``networks``, by role; ``first`` are the initial
    values of some."""
    memory = memory or MemoryGuard.of(recipe.train, world)
    packing = recipe.data.packing
    found = NetworkContext(codec, recipe.stage, networks, memory, packing, world, seed, first)
    return found if process is None else replace(found, process=process)


def build_evaluation(
    recipe: Recipe,
    codec: Codec,
    policy: Network,
    world: World,
    memory: MemoryGuard | None = None,
    *,
    others: Mapping[str, Network] = NO_NETWORKS,
    first: Mapping[str, InitialValues] = NOTHING,
) -> Evaluation:
    """How the policy is measured, with ``others`` by role that prepare windows, some with
    their ``first`` values; training computes and collates its windows alike."""
    section, stage = recipe.train, recipe.stage
    networks = {POLICY: policy, **others}
    process = RewardProcess()  # one for all windows
    guard = memory or MemoryGuard.of(section, world)

    def context(place: Place) -> NetworkContext:
        seed = derive(section.seed, *place)
        return context_of(recipe, codec, networks, world, seed, guard, first, process)

    return Evaluation(
        stage,
        policy,
        context,
        collate_of(stage, policy.sharing, packing=recipe.data.packing),
        guard,
        section.global_batch_size,
        world,
    )
