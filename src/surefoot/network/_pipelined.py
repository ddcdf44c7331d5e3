"""Pipeline parallelism for one rank: its stages, its checkpoint state, and the runner of a window.

The stages do not depend on ranks, the pipeline not on models; this module combines them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ..batch import Batch, Outputs
from ..checkpoint.state.states import PipelinedOptimizer, PipelinedWeights, owners
from ..errors import RecipeError
from ..model import outputs
from ..model.numerics import PrecisionName, autocast
from ..model.pipeline_stages import IdentityStub, Stages, keep, plan_pipeline_stages
from ..model.routers import refuse_stages
from ..optim.trained import TrainedParameters
from ..parallel.pipeline import Finish, Pipeline, connect, tie
from ..parallel.section import ParallelSection
from ..parallel.sharded_model import gather_nothing, reduce_gradients
from ..parallel.sharding import Cuts
from ..parallel.tensor_parallel import placed, widened
from ..parallel.tp_plan import LayerRange
from ..parallel.world import Axis, World
from .method import UnshardedWeights, Weights


@dataclass(frozen=True)
class PipelinedModel:
    """This rank's part of a model that is divided into pipeline stages."""

    model: nn.Module
    stages: Stages
    names: Mapping[str, str]  # of its parameters: the name here, the name in files
    whole: Mapping[str, torch.Tensor]  # what the files hold, on the meta device
    learning: Collection[str]  # of all parameters that learn, the names in files
    learns: Sequence[bool]  # for each stage, whether anything learns in it or before it
    tied: str | None  # the name here of a weight that both ends have
    world: World
    along: Axis | None  # over which the tokens are divided between the layers, if they are

    def stretches(self) -> list[LayerRange]:
        """The layers of each stage of this rank."""
        last = self.stages.last
        # Without the stubs, which stand for layers of other stages and have nothing to shard.
        return [
            LayerRange(
                [x for x in run if not isinstance(x, IdentityStub)], number == 0, number == last
            )
            for number, run in self.stages.here.items()
        ]

    def weights(self, own: Weights) -> PipelinedWeights:
        """The weights as a state of the full model."""
        second = {}
        if self.tied is not None:
            name = self.names[self.tied]
            if name in self.whole and name not in own.state_dict():  # an adapter's files lack it
                second = {name: self.tied}
        names = {*own.state_dict(), *second}
        mine = owners(self.world, names)[self.world.pp_rank]
        elsewhere = {name: t for name, t in self.whole.items() if name not in names}
        return PipelinedWeights(
            own, self.model, elsewhere, names - mine, second, self.world, own.kind, own.small_files
        )

    def optimizer(self, trained: TrainedParameters) -> PipelinedOptimizer:
        """The optimizer state of this rank as one of the full model's."""
        elsewhere = set(self.learning) - set(self._learning_here())
        return PipelinedOptimizer(trained, elsewhere, self._copies(), self.world)

    def copies(self) -> set[nn.Parameter]:
        """The parameters here that count on another rank."""
        copies, learning = self._copies(), self._learning_here()
        return {p for name, p in learning.items() if name in copies}

    def _learning_here(self) -> dict[str, nn.Parameter]:
        parameters = self.model.named_parameters()
        return {self.names[name]: p for name, p in parameters if p.requires_grad}

    def _copies(self) -> set[str]:
        here = set(self._learning_here())
        return here - owners(self.world, here)[self.world.pp_rank]

    def pipeline(
        self, section: ParallelSection, precision: PrecisionName, cuts: Mapping[str, Cuts]
    ) -> Pipeline:
        """The pipeline; a collective call."""
        model, stages = self.model, self.stages
        size = stages.parts.model.config.get_text_config().hidden_size
        device = next(model.parameters()).device
        links = connect(self.world, num_parts=section.num_parts, device=device)

        def advance(stage: int, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
            with autocast(precision, device), stages.only(stage):
                return outputs.hidden_states(model, *self._whole(batch, hidden))

        tied = None
        # A collective call: stages between the ends, which have no such weight, make it, too.
        if any(self.world.of_stages(self.tied)):
            self._check_tied(cuts)
            parameter = None if self.tied is None else model.get_parameter(self.tied)
            tied = tie(self.world, parameter)
        return Pipeline(
            links,
            section.pp_schedule,
            advance,
            lambda batch: (*self._held(batch), size),
            self.learns,
            lambda is_last: reduce_gradients(model, now=is_last),
            lambda: gather_nothing(model),
            tied,
        )

    def _held(self, batch: Batch) -> tuple[int, int]:
        """Rows, and tokens of each on this rank, between two stages."""
        rows, tokens = widened(batch, self._num_parts).input_ids.shape
        return rows, tokens // self._num_parts

    def _whole(
        self, batch: Batch, hidden: torch.Tensor | None
    ) -> tuple[Batch, torch.Tensor | None]:
        """The input of a stage: lengths are those that all stages see."""
        if hidden is not None and self.along is not None:
            hidden = placed(hidden, self.along)
        return widened(batch, self._num_parts), hidden

    @property
    def _num_parts(self) -> int:
        return 1 if self.along is None else self.along.size

    def _check_tied(self, cuts: Mapping[str, Cuts]) -> None:
        mine = None if self.tied is None else cuts[self.names[self.tied]]
        first, *_, last = self.world.of_stages(mine)
        if first != last:
            raise RecipeError(
                "parallel.tp: embedding and head of this model share a matrix, but its plan "
                "shards only one of them; leave tp at 1 and use parallel.dp_shard"
            )

    def finish(self, compute: Callable[..., Outputs]) -> Finish:
        """The last stage: ``compute(batch, hidden=...)`` computes outputs of its input."""

        def run(batch: Batch, hidden: torch.Tensor | None) -> Outputs:
            batch, hidden = self._whole(batch, hidden)
            with self.stages.only(self.stages.last):
                return compute(batch, hidden=hidden)

        return run


def to_pipeline(
    model: nn.Module,
    inner: PreTrainedModel,
    weights: UnshardedWeights,
    names: Mapping[str, str],
    world: World,
    section: ParallelSection,
) -> PipelinedModel | None:
    """Keep this rank's stages in ``model``; None if it runs all layers. ``inner`` is the same
    without its adapter, ``weights`` are its weights in checkpoints, ``names`` those of its
    parameters in files. Raises ``RecipeError`` if the model cannot be split between its layers."""
    if world.mesh is None or world.pp == 1:
        return None
    refuse_stages(inner, None)
    num_stages = world.pp * section.num_parts
    learns, shared = plan_pipeline_stages(inner, num_stages, is_converted=weights.is_converted)
    in_files = {parameter: names[name] for name, parameter in model.named_parameters()}
    learning = {name for p, name in in_files.items() if p.requires_grad}
    whole = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in weights.state_dict().items()
    }
    # Stages in turn, not in a row: each rank has early layers and late ones, and idles less.
    stages = keep(inner, range(world.pp_rank, num_stages, world.pp), num_stages)
    here = dict(model.named_parameters())
    return PipelinedModel(
        model,
        stages,
        {name: in_files[parameter] for name, parameter in here.items()},
        whole,
        learning,
        learns,
        next((name for name, p in here.items() if p is shared), None),
        world,
        world.along("tp") if section.sequence_parallel else None,
    )
