"""What the stage of a recipe computes with: auxiliary models before the first step, whose columns
are cached on disk and joined with the examples, and the policy in windows and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..batch import Probe
from ..checkpoint.saving.saver import AsyncSaver
from ..data.order.micro_batches import Collation, without_labels
from ..data.store.cache import default_folder
from ..data.store.dataset import EncodedDataset
from ..data.text.codec import Codec
from ..data.text.collation import collate
from ..data.training_data import AnyData
from ..model.loading import resolve
from ..model.numerics import derive
from ..network.network import Network
from ..parallel.world import World
from ..recipe.recipe import Recipe
from ..training.callback import PolicyVersion
from ..training.context import BlankContext, NetworkContext
from ..training.evaluation import Evaluation, EvaluationSet, windows_of
from ..training.out_of_memory import MemoryGuard
from ..training.precompute import (
    NOTHING,
    KeptWindows,
    Precomputation,
    WindowSet,
    identity_of,
    model_of,
    precomputation,
    with_items,
    with_windows,
)
from ..training.rewards import RewardProcess
from ..training.served_policy import ServedPolicy
from ..training.stage import POLICY, auxiliary_models
from ..training.windows import Place, StageState, windows_of_run
from . import _data_loading as data_loading
from .folder import lineage_of
from .models import needs_start, open_networks
from .policy import options_of

OpenPolicy = Callable[[bool], Network]  # whether it is needed as it was before the first step
OpenModel = Callable[[str], Network]  # by role


@dataclass(frozen=True)
class RunColumns:
    """The examples of a run with all the columns that are computed before the first step."""

    data: AnyData  # with those that are cached by item
    kept: KeptWindows  # those of training's windows that are cached by window
    evals: Mapping[str, EvaluationSet]


def precompute(
    recipe: Recipe,
    data: AnyData,
    folders: Mapping[str, Path],
    codec: Codec,
    world: World,
    open_policy: OpenPolicy,
    open_model: OpenModel,
    *,
    is_blank: bool = False,
) -> tuple[RunColumns, dict[str, Network]]:
    """Compute the columns that are not known yet, and open the networks of the run, by role.

    What needs no policy is computed before the policy is opened, so that the two are never in
    memory together. ``is_blank``: columns of zeros, for measurements of speed."""
    size = recipe.train.global_batch_size
    held_out = {name: eval_set(dataset, size) for name, dataset in data.evals.items()}
    train = _train_set(recipe, data, world)
    sets = [*([] if train is None else [train]), *held_out.values()]
    columns = columns_of(recipe, folders, sets, world)
    if is_blank:
        columns.blank(BlankContext(codec, recipe.stage, collation_of(recipe)))
    ahead = {} if columns.is_complete else auxiliary_models(recipe.stage, "ahead")

    def run(policy: Network | None) -> None:
        networks = {} if policy is None else {POLICY: policy}
        for role, auxiliary in ahead.items():
            networks[role] = networks[POLICY] if auxiliary.model is None else open_model(role)
        columns.run(context_of(recipe, codec, networks, world, recipe.train.seed))

    # A reference beside the policy is half as much memory again and a third more work a step, for
    # numbers that never change (docs/decisions/0038).
    if all(auxiliary.model is not None for auxiliary in ahead.values()):
        run(None)
        ahead = {}
    policy = open_policy(bool(ahead) or needs_start(recipe))
    if ahead:
        run(policy)
    joined = _joined(columns, data, train, held_out)
    return joined, open_networks(recipe, policy, open_model)


def _joined(
    columns: Precomputation,
    data: AnyData,
    train: WindowSet | None,
    held_out: Mapping[str, WindowSet],
) -> RunColumns:
    if train is not None:
        held_out_items = {name: with_items(items, columns) for name, items in data.evals.items()}
        data = replace(data, train=with_items(train.items, columns), evals=held_out_items)
    evals = {
        name: EvaluationSet(examples, with_windows(held_out[name], columns))
        for name, examples in data.evals.items()
    }
    return RunColumns(data, NOTHING if train is None else with_windows(train, columns), evals)


def _train_set(recipe: Recipe, data: AnyData, world: World) -> WindowSet | None:
    """The training examples, and the windows of the run; None if nothing is computed for them."""
    if not auxiliary_models(recipe.stage, "ahead") or data.whole is None:
        return None
    loader = data_loading.build_loader(recipe, data, collation_of(recipe), world)
    order = {n: value for n, value in loader.state_dict().items() if n not in ("epoch", "window")}
    windows = partial(windows_of_run, loader, recipe.train, recipe.stage)
    return WindowSet(data.whole, windows, str(sorted(order.items())))


def columns_of(
    recipe: Recipe, folders: Mapping[str, Path], sets: Sequence[WindowSet], world: World
) -> Precomputation:
    """The known columns of ``sets``, and what is to be computed."""
    stage, options = recipe.stage, options_of(recipe)
    ahead = auxiliary_models(stage, "ahead")
    models = {role: model_of(auxiliary, recipe.model) for role, auxiliary in ahead.items()}
    models_and_folders = {
        role: (model, folders.get(POLICY if model is recipe.model else role) or resolve(model))
        for role, model in models.items()
    }
    identity = identity_of(stage, models_and_folders, options.precision, options.packing)
    return precomputation(stage, identity, recipe.data.cache_dir or default_folder(), sets, world)


def eval_set(dataset: EncodedDataset, size: int) -> WindowSet:
    """The examples of an evaluation, and its windows of ``size``."""
    windows = partial(windows_of, len(dataset), size)
    return WindowSet(dataset, windows, f"{dataset.fingerprint} in order, {size}")


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
    collation = collation_of(recipe, codec)
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
        stage_context = context_of(recipe, codec, networks, world, seed, guard)
        return replace(
            stage_context,
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
        collation_of(recipe, codec).for_model(policy.sharing),
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


def collation_of(recipe: Recipe, codec: Codec | None = None) -> Collation:
    """How examples become a batch everywhere in a run, and before it; with their pictures, if
    ``codec`` reads any."""
    media = None
    if codec is not None and codec.media is not None:
        media = replace(codec.media, make_spare=lambda: without_labels(codec.picture_probe()[0]))
    return Collation(recipe.stage.collate, recipe.data.packing, media=media)


def picture_probes(recipe: Recipe, codec: Codec) -> Sequence[Probe]:
    """Documents with pictures, for the check of packed rows, if there are any."""
    if codec.media is None or not recipe.data.packing:
        return ()
    packed = replace(collation_of(recipe, codec), collate=collate)  # conversations, in any stage
    items = codec.picture_probe()
    padded = replace(packed, packing=False)
    return [Probe(packed.batch(items).read(), [padded.batch([item]).read() for item in items])]
