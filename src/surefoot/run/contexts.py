"""What the stage of a recipe computes with before it trains, and how its policy is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..checkpoint.background.saver import AsyncSaver
from ..data.text.codec import Codec
from ..model.seeding import derive
from ..network.network import Network
from ..parallel.world import World
from ..recipe.recipe import Recipe
from ..training.context import NetworkContext
from ..training.control.out_of_memory import MemoryGuard
from ..training.evaluation import Evaluation
from ..training.rewards.process import RewardProcess
from ..training.rollouts.served_policy import ServedPolicy
from ..training.stage import POLICY
from ..training.state import PolicyVersion
from ..training.windows import Place, StageState
from .data_loading import collation_of
from .folder import lineage_of


def context_of(
    recipe: Recipe,
    codec: Codec,
    networks: Mapping[str, Network],
    world: World,
    seed: int,
    memory: MemoryGuard | None = None,
) -> NetworkContext:
    """The context of the recipe's stage over ``networks``, by role."""
    memory = memory or MemoryGuard.of(recipe.train, world)
    collation = collation_of(recipe)
    return NetworkContext(codec, recipe.stage, networks, memory, collation, world, seed)


def build_evaluation(
    recipe: Recipe,
    codec: Codec,
    networks: Mapping[str, Network],
    world: World,
    memory: MemoryGuard | None = None,
    served: ServedPolicy | None = None,
) -> Evaluation:
    """How the policy of ``networks`` is measured; training computes and collates alike. Responses
    are sampled by the policy's network, unless it is ``served``."""
    section, stage, policy = recipe.train, recipe.stage, networks[POLICY]
    process, state = RewardProcess(), StageState()  # one for all windows
    version, guard = PolicyVersion(), memory or MemoryGuard.of(section, world)

    def context(place: Place) -> NetworkContext:
        seed = derive(section.seed, *place)
        found = context_of(recipe, codec, networks, world, seed, guard)
        return replace(
            found,
            process=process,
            state=state.values,
            served=served,
            place=place,
            version=version.step,
        )

    return Evaluation(
        stage,
        policy,
        context,
        collation_of(recipe).for_model(policy.sharing),
        guard,
        section.global_batch_size,
        world,
        state,
        version=version,
    )


def served_policy(
    recipe: Recipe, policy: Network, saver: AsyncSaver, world: World
) -> ServedPolicy | None:
    """The policy in the recipe's server; None if it samples itself."""
    if (server := recipe.stage.sampler.server) is None:
        return None
    return ServedPolicy(
        server,
        policy,
        recipe.train.folder,
        saver.kind,
        dict(saver.companions),
        saver.writers,
        world,
        lineage_of(recipe),
    )
