"""What the stage of a run computes with: auxiliary models before the first step, whose columns are
cached on disk and joined with the examples, and the policy in windows and evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..checkpoint.saving.saver import AsyncSaver
from ..data.store.cache import default_folder
from ..data.store.dataset import EncodedDataset
from ..data.training_data import AnyData
from ..model import base_identity
from ..model.base_identity import BaseModel, identify, parsed
from ..model.numerics import derive
from ..network.network import Network
from ..parallel.world import World
from ..storage import files
from ..training.callback import PolicyVersion
from ..training.context import BlankContext, NetworkContext
from ..training.evaluation import Evaluation, EvaluationSet, windows_of
from ..training.kept_rollouts import KeptRollouts
from ..training.out_of_memory import MemoryGuard
from ..training.precompute import (
    FOLDER,
    NOTHING,
    Ingredients,
    KeptWindows,
    Precomputation,
    WindowSet,
    precomputation,
    with_items,
    with_windows,
)
from ..training.rewards import RewardProcess
from ..training.served_policy import ServedPolicy
from ..training.stage import POLICY, auxiliary_models
from ..training.windows import Place, StageState, windows_of_run
from . import _data_loading as data_loading
from .models import ModelParts
from .parts import RunParts, collation_of


@dataclass(frozen=True)
class RunColumns:
    """The examples of a run with all the columns that are computed before the first step."""

    data: AnyData  # with those that are cached by item
    kept: KeptWindows  # those of training's windows that are cached by window
    evals: Mapping[str, EvaluationSet]


@dataclass(frozen=True)
class ColumnsAhead:
    """The columns that auxiliary models compute before the first step: those that the cache has,
    and those that are missing."""

    parts: RunParts
    data: AnyData
    train: WindowSet | None  # None: nothing is computed for the training examples
    evals: Mapping[str, WindowSet]
    computed: Precomputation

    @classmethod
    def of(
        cls, parts: RunParts, data: AnyData, world: World, *, is_trial: bool = False
    ) -> ColumnsAhead:
        """The known columns of ``data``; of a trial, for which no model is hashed, none."""
        size = parts.train.global_batch_size
        evals = {name: eval_set(dataset, size) for name, dataset in data.evals.items()}
        train = _train_set(parts, data, world)
        sets = [*([] if train is None else [train]), *evals.values()]
        return cls(parts, data, train, evals, columns_of(parts, sets, world, is_trial))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing."""
        return self.computed.is_complete

    @property
    def needs_policy(self) -> bool:
        """Whether the policy, as it starts, computes some that are missing."""
        models = auxiliary_models(self.parts.stage, "ahead").values()
        return not self.is_complete and any(each.model is None for each in models)

    def blank(self) -> None:
        """Fill them with zeros, for measurements of speed."""
        stage, packing = self.parts.stage, self.parts.data.packing
        collation = collation_of(stage, packing=packing)
        self.computed.blank(BlankContext(self.parts.codec, stage, collation))

    @property
    def roles(self) -> list[str]:
        """The models other than the policy that compute what is missing."""
        models = {} if self.is_complete else auxiliary_models(self.parts.stage, "ahead")
        return [role for role, each in models.items() if each.model is not None]

    def compute(
        self, world: World, others: Mapping[str, Network], policy: Network | None = None
    ) -> None:
        """Compute what is missing with ``others``, by role, and the ``policy``, if it is needed."""
        networks = dict(others)
        if policy is not None:
            roles = auxiliary_models(self.parts.stage, "ahead").keys() - others.keys()
            networks |= dict.fromkeys((POLICY, *roles), policy)
        self.computed.run(context_of(self.parts, networks, world))

    def joined(self) -> RunColumns:
        """The examples with their columns."""
        data, train, computed = self.data, self.train, self.computed
        if train is not None:
            evals = {name: with_items(items, computed) for name, items in data.evals.items()}
            data = replace(data, train=with_items(train.items, computed), evals=evals)
        eval_sets = {
            name: EvaluationSet(examples, with_windows(self.evals[name], computed))
            for name, examples in data.evals.items()
        }
        return RunColumns(
            data, NOTHING if train is None else with_windows(train, computed), eval_sets
        )


def _train_set(parts: RunParts, data: AnyData, world: World) -> WindowSet | None:
    """The training examples, and the windows of the run; None if nothing is computed for them."""
    if not auxiliary_models(parts.stage, "ahead") or data.whole is None:
        return None
    collation = collation_of(parts.stage, packing=parts.data.packing)
    loader = data_loading.build_loader(parts, data, collation, world)
    order = {n: value for n, value in loader.state_dict().items() if n not in ("epoch", "window")}
    windows = partial(windows_of_run, loader, parts.train, parts.stage)
    return WindowSet(data.whole, windows, str(sorted(order.items())))


def columns_of(
    parts: RunParts, sets: Sequence[WindowSet], world: World, is_trial: bool = False
) -> Precomputation:
    """The known columns of ``sets``, and what is to be computed."""
    stage, root = parts.stage, parts.data.cache_dir or default_folder()
    roles = {role: parts.models.auxiliary(role) for role in auxiliary_models(stage, "ahead")}
    identity = "trial"
    if roles and not is_trial:
        identity = world.on_main(lambda: _ingredients(parts, roles, root / FOLDER).identity)
    return precomputation(stage, identity, root, sets, world)


def _ingredients(parts: RunParts, roles: Mapping[str, ModelParts], folder: Path) -> Ingredients:
    """What columns are made from. Files that a record knows, that of the run or the one in
    ``folder``, are not read again."""
    models = {
        f"{role} {model.folder} {model.section.adapter} {model.section.frozen_adapters}": BaseModel(
            model.section,
            model.folder,
            adapter=model.section.adapter,
            has_adapter_weights=model.section.adapter is not None,
        )
        for role, model in roles.items()
    }
    known, of_run = base_identity.read(folder), parsed(parts.record.get(base_identity.NAME, b"{}"))
    for role, name in zip(roles, models, strict=True):
        if (record := of_run.get(role, of_run.get(POLICY))) is not None:
            known[name] = record
    now = identify(models, known)
    with contextlib.suppress(OSError):  # a cache that can only be read
        files.make_folder(folder)
        files.write_aside(folder / base_identity.NAME, base_identity.dump({**known, **now}))
    hashes = ({n: f.hash for n, f in record.files.items()} for record in now.values())
    specs, options = parts.stage.auxiliary, parts.models.policy.options
    return Ingredients(
        type(parts.stage).__qualname__,
        {r: (specs[r].spec, m.section, h) for (r, m), h in zip(roles.items(), hashes, strict=True)},
        len(parts.codec.tokenizer),
        (options.precision, options.packing),
    )


def eval_set(dataset: EncodedDataset, size: int) -> WindowSet:
    """The examples of an evaluation, and its windows of ``size``."""
    windows = partial(windows_of, len(dataset), size)
    return WindowSet(dataset, windows, f"{dataset.fingerprint} in order, {size}")


def context_of(
    parts: RunParts,
    networks: Mapping[str, Network],
    world: World,
    memory: MemoryGuard | None = None,
) -> NetworkContext:
    """The context of the stage over ``networks``, by role."""
    memory, seed = memory or MemoryGuard.of(parts.train, world), parts.train.seed
    return NetworkContext(parts.codec, parts.stage, networks, memory, parts.collation, world, seed)


def build_evaluation(
    parts: RunParts,
    networks: Mapping[str, Network],
    world: World,
    memory: MemoryGuard | None = None,
    *,
    served: ServedPolicy | None = None,
    version: PolicyVersion | None = None,
    kept: KeptRollouts | None = None,
) -> Evaluation:
    """How the policy of ``networks`` is measured; training computes and collates alike. Responses
    are sampled by the policy's network, unless it is ``served``."""
    section, policy = parts.train, networks[POLICY]
    process, state = RewardProcess(), StageState()  # one for all windows
    version, guard = version or PolicyVersion(), memory or MemoryGuard.of(section, world)

    def context(place: Place) -> NetworkContext:
        return replace(
            context_of(parts, networks, world, guard),
            seed=derive(section.seed, *place),
            process=process,
            state=state.values,
            served=served,
            place=place,
            version=version.step,
        )

    return Evaluation(
        parts.stage,
        policy,
        context,
        parts.collation.for_model(policy.sharing),
        guard,
        section.global_batch_size,
        world,
        state,
        kept or KeptRollouts(),
        version,
    )


def served_policy(
    parts: RunParts, policy: Network, saver: AsyncSaver, world: World
) -> ServedPolicy | None:
    """The policy in the server of the stage; None if it samples itself."""
    if (server := parts.stage.sampler.server) is None:
        return None
    return ServedPolicy(
        server,
        policy,
        parts.train.folder,
        saver.kind,
        dict(saver.companions),
        saver.writers,
        world,
        parts.lineage,
    )
