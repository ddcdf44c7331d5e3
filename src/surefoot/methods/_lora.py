"""LoRA (arXiv:2106.09685) through PEFT: low-rank updates beside frozen weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from .. import model as models
from .. import network as networks
from ..errors import RecipeError, counted
from ..model.section import ModelSection
from ..schema import KEPT, Kept, Needs, Problem, must
from .adapter import AdapterMethod, Part, names_in, target_names

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedModel

    from ..checkpoint.sources import Shape, TensorSource
    from ..model.lora_targets import Targets
    from ..network.method import UnshardedWeights

logger = logging.getLogger(__name__)
_COMPUTED = ("pissa", "olora")  # initial values that are computed from the weights


@dataclass(frozen=True, kw_only=True)
class LoRA(AdapterMethod):
    """Train a low-rank update ``scale * B A`` of chosen linear layers; the base is frozen."""

    name: ClassVar[str] = "lora"
    peft_type: ClassVar[str] = "LORA"
    peft_names: ClassVar[Mapping[str, str]] = {
        "rank": "r",
        "dropout": "lora_dropout",
        "rslora": "use_rslora",
        "dora": "use_dora",
    }
    does: ClassVar[str] = "a sum"

    rank: Annotated[int, KEPT] = 8
    """Rank of the update."""
    alpha: Annotated[float | None, Kept(lambda lora: lora.scaled_alpha)] = None
    """The update is scaled by ``alpha / rank`` (by ``alpha / sqrt(rank)`` with rslora). Unset:
    twice the rank."""
    rank_pattern: Annotated[Mapping[str, int], KEPT] = field(default_factory=dict, hash=False)
    """Other ranks of some modules, by the last part of their names or a regular expression:
    ``{q_proj: 16, layers.0.*: 4}``. The first match counts, as in PEFT."""
    alpha_pattern: Annotated[Mapping[str, float], KEPT] = field(default_factory=dict, hash=False)
    """Likewise, other values of ``alpha``, which does not follow ``rank_pattern``."""
    dropout: float = 0.0
    """Dropout on the input of the update."""
    targets: tuple[str, ...] = ("all",)
    """What to adapt, by the last part of the name: linear layers (``q_proj``) and experts that are
    fused in one parameter (``gate_up_proj``). ``all`` is every one except the head and routers."""
    parts: tuple[Part, ...] = ("language",)
    """Parts of a model that reads pictures in which targets are adapted: ``tower``, ``projector``
    and ``language``. Each of them must have a target."""
    layers: tuple[int, ...] = ()
    """Decoder layers whose targets are adapted, counted from 0 (from the end, if negative). Empty:
    all, and what is outside of the layers."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train in full and save with the adapter, such as ``embed_tokens``, ``lm_head``,
    or the ``projector`` of a model that reads pictures."""
    new_tokens: bool = False
    """Train the embeddings of new tokens (``model.new_special_tokens``), and no others: their rows
    of the input embeddings and of the output head."""
    rslora: Annotated[bool, KEPT] = False
    """Scale by ``alpha / sqrt(rank)`` (arXiv:2312.03732)."""
    dora: Annotated[bool, KEPT] = False
    """Train magnitude and direction separately (arXiv:2402.09353)."""
    init: Annotated[Literal["kaiming", "gaussian", "pissa", "olora"], KEPT] = "kaiming"
    """The initial values. ``kaiming`` and ``gaussian`` draw ``A``, and ``B`` is zero. ``pissa``
    starts from the principal part of each weight (arXiv:2404.02948), ``olora`` from its QR
    decomposition (arXiv:2406.01775): checkpoints are adapters of twice the rank, of the unchanged
    base."""
    init_iterations: Annotated[int, Needs("init", ("pissa",))] = 16
    """Iterations of the randomized singular value decomposition of ``init: pissa``. 0: the exact
    one, which takes minutes for a large matrix."""
    freeze_a: bool = False
    """Train ``B`` only (LoRA-FA, arXiv:2308.03303): no input of an adapted layer is kept for the
    backward pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self, "be at least 1", "rank")
        must(self, "be positive", "alpha")
        for name, least in (("rank_pattern", 1), ("alpha_pattern", 1e-9)):
            for pattern, value in getattr(self, name).items():
                _check_pattern(name, pattern)
                if value < least:
                    raise ValueError(f"{name} must be positive, got {value} for {pattern}")
        must(self, "be in [0, 1)", "dropout")
        must(self, "not be negative", "init_iterations")
        if self.layers and "language" not in self.parts:
            raise ValueError("layers are those of the language model, which parts does not name")
        if self.dora and self.init in _COMPUTED:
            raise ValueError(
                f"init is {self.init}, which dora cannot have: its checkpoints are the sum of two "
                "adapters, and magnitudes belong to one; leave one of them out"
            )

    @property
    def scaled_alpha(self) -> float:
        """``alpha`` as it acts."""
        return 2 * self.rank if self.alpha is None else self.alpha

    def config(self, **shared: Any) -> PeftConfig:
        """As for every model; ``apply`` adds what depends on it."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            # PEFT's own default is 8, whatever the rank.
            lora_alpha=self.scaled_alpha,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
            lora_dropout=self.dropout,
            use_rslora=self.rslora,
            use_dora=self.dora,
            init_lora_weights="gaussian" if self.init == "gaussian" else True,
            **shared,
        )

    @classmethod
    def as_lora(
        cls,
        adapter: TensorSource,
        config: Mapping[str, Any],
        weights: Mapping[str, Shape],
    ) -> tuple[TensorSource, Mapping[str, Any]]:
        """It needs no change."""
        return adapter, config

    def apply(self, model: PreTrainedModel) -> nn.Module:
        """Wrap ``model`` as PEFT does. Raises ``RecipeError`` if a target is not in it."""
        chosen = self.chosen(model)
        # All of these are found before PEFT changes the model: it ignores, converts or doubles what
        # it cannot do, and says nothing (docs/decisions/0045).
        self._check_parameters(chosen.parameters)
        self._check_layers(model, chosen.modules)
        self._check_rank(model, chosen)
        self._check_patterns(chosen)
        modules, parameters = models.lora_targets.target_patterns(model, chosen)
        config: Any = self.config(
            target_parameters=parameters or None,
            trainable_token_indices=self._rows(model, chosen) if self.new_tokens else None,
            **self.shared(model, modules),
        )
        wrapped = self.wrapped(model, chosen, config)
        if self.dora:
            models.lora_layers.set_magnitudes(wrapped)
        if self.init in ("pissa", "olora"):
            models.adapters.add_start(wrapped, config, self.init, self.init_iterations)
        self._freeze(wrapped)
        return wrapped

    def continued(self, adapter: Mapping[str, object]) -> LoRA:
        """With the settings of the adapter. Names in another order are the recipe's, and so are
        targets that it names: other names may mean the same parameters, as the model decides."""
        settings: dict[str, Any] = {
            name: bool(adapter.get(self.peft_names[name])) for name in ("rslora", "dora")
        }
        for name in ("rank_pattern", "alpha_pattern"):
            pattern = adapter.get(name) or {}
            settings[name] = dict(pattern) if isinstance(pattern, Mapping) else {}
        settled = super().continued(adapter)
        if isinstance(scaled := adapter.get("lora_alpha"), int | float):
            # Twice the rank is what an unset alpha means, and no choice to record.
            is_usual = self.alpha is None and scaled == 2 * settled.rank
            settings["alpha"] = None if is_usual else float(scaled)
        settings["new_tokens"] = bool(adapter.get("trainable_token_indices"))
        saved = names_in(adapter.get("modules_to_save"))
        if saved != set(self.modules_to_save):
            settings["modules_to_save"] = tuple(sorted(saved))
        if self.targets == ("all",) and (targets := target_names(adapter)):
            settings["targets"] = tuple(sorted(targets))
        return replace(settled, **settings)

    def attach(
        self, model: PreTrainedModel, attach: Callable[[PreTrainedModel], nn.Module]
    ) -> nn.Module:
        """``model`` with the adapter that ``attach`` reads. Raises ``RecipeError`` if it adapts
        other parameters than the targets."""
        try:
            expected = self.chosen(model).all_parameters
        except RecipeError:  # the names are the adapter's, such as a regular expression
            expected = set()
        of_parts = models.weight_matrices.names_in_parts(model)
        module = attach(model)
        self._freeze(module)
        config = self.config_of(module)
        names = target_names(vars(config))
        adapted_parameters = {*models.weight_matrices.adapted(module)}
        parts = {of_parts.get(name, "language") for name in adapted_parameters}
        if self.parts != ("language",) and parts != {*self.parts}:
            raise RecipeError(
                f"method.lora.parts: {', '.join(self.parts)}, but model.adapter adapts "
                f"{', '.join(sorted(parts))}; leave parts out to continue with all of it"
            )
        if adapted_parameters - expected and self.layers:
            raise RecipeError(
                f"method.lora.layers: {', '.join(map(str, self.layers))}, but model.adapter also "
                f"adapts {min(adapted_parameters - expected)}; leave layers out to continue with "
                "all of it"
            )
        if expected != adapted_parameters and names != set(self.targets):
            raise RecipeError(
                f"method.lora.targets: {', '.join(self.targets)}, but model.adapter adapts "
                f"{', '.join(sorted(names))}; leave targets out to continue with these"
            )
        logger.info(
            "continuing an adapter: rank %d, alpha %g, dropout %g, targets %s",
            config.r,
            config.lora_alpha,
            config.lora_dropout,
            ", ".join(sorted(names)),
        )
        return module

    def weights(self, module: nn.Module, inner: PreTrainedModel) -> UnshardedWeights:
        """The adapter, with frozen ones as one."""
        if models.adapters.has_frozen(module):
            return networks.StackedWeights(module)
        return super().weights(module, inner)

    def problems(self, model: ModelSection) -> Iterator[Problem]:
        """What an adapter on a frozen base cannot have."""
        yield from super().problems(model)
        if model.adapter is not None and self.init != "kaiming":
            yield Problem(
                ("method", "lora", "init"),
                "has no effect on model.adapter, whose values are trained further; leave it out",
            )

    def _freeze(self, model: nn.Module) -> None:
        """Freeze what is not trained of the adapter."""
        for name, parameter in model.named_parameters() if self.freeze_a else ():
            if ".lora_A." in name:
                parameter.requires_grad_(False)

    @property
    def is_sum(self) -> bool:
        """Several updates together are one, whose rank is the sum of theirs."""
        return True

    def chosen(self, model: PreTrainedModel) -> Targets:
        """The targets, of the chosen layers alone if there are any; fused experts, too."""
        chosen = models.lora_targets.choose_targets(
            model, self.targets, self.in_full(model), parts=self.parts
        )
        if not self.layers:
            return chosen
        layers = models.weight_matrices.decoder_layers(model)
        if wrong := [n for n in self.layers if not -len(layers) <= n < len(layers)]:
            raise RecipeError(
                f"method.lora.layers: the model has {len(layers)} layers, 0 to {len(layers) - 1}, "
                f"not {wrong[0]}"
            )
        return chosen.inside(model, [layers[n] for n in self.layers])

    def _rows(self, model: PreTrainedModel, chosen: Targets) -> dict[str, list[int]]:
        """The rows of new tokens in matrices that are not trained otherwise."""
        rows = models.expansion.embeddings_to_train(model)
        adapted = {f"{name}.weight" for name in rows} & chosen.all_parameters
        both = {name.rpartition(".")[2] for name in rows} & set(self.modules_to_save)
        if twice := sorted(both | adapted):
            raise RecipeError(
                f"method.lora.new_tokens: {twice[0]} is trained already, as targets or "
                "modules_to_save name it; leave one of the two out"
            )
        return rows

    def _check_patterns(self, chosen: Targets) -> None:
        """A pattern that PEFT would look for in vain is a mistake."""
        modules = [*chosen.modules, *(name.rpartition(".")[0] for name in chosen.parameters)]
        for name in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, name):
                if not any(_matches(pattern, module) for module in modules):
                    raise RecipeError(
                        f"method.lora.{name}: {pattern!r} is none of the modules that are adapted, "
                        f"such as {modules[0]}"
                    )

    def _check_layers(self, model: PreTrainedModel, modules: Sequence[str]) -> None:
        """Some settings are for linear layers only, whose rank may limit that of the adapter."""
        for name, is_on in (("init", self.init in _COMPUTED), ("freeze_a", self.freeze_a)):
            for place in modules if is_on else ():
                if not models.weight_matrices.is_linear(model.get_submodule(place)):
                    raise RecipeError(
                        f"method.lora.{name}: {place} is no linear layer; leave it out of "
                        f"method.lora.targets, or {name} out"
                    )

    def _check_rank(self, model: PreTrainedModel, chosen: Targets) -> None:
        """An update has no more ranks than the shorter side of its matrix."""
        shortest = models.lora_targets.shorter_sides(model, chosen)
        rank_of = {
            name: next((r for p, r in self.rank_pattern.items() if _matches(p, name)), self.rank)
            for name in shortest
        }
        over = [name for name, side in shortest.items() if rank_of[name] > side]
        if not over:
            return
        largest = max(over, key=lambda name: shortest[name])
        what = (
            f"method.lora.rank: {rank_of[largest]:,} is more than the shorter side of "
            f"{counted(len(over), 'matrix', 'matrices')} of {len(shortest):,}, such as {largest} "
            f"({shortest[largest]:,})"
        )
        if len(over) == len(shortest):
            raise RecipeError(f"{what}; set {shortest[largest]} or less")
        logger.warning("%s, whose update gains nothing from it (method.lora.rank_pattern)", what)

    def _check_parameters(self, parameters: Sequence[str]) -> None:
        """PEFT adds the update of a parameter to its values, not to the result of a layer."""
        is_computed = self.init in _COMPUTED
        switches = {"dropout": self.dropout > 0, "dora": self.dora, "init": is_computed}
        for name, is_on in switches.items():
            if is_on and parameters:
                raise RecipeError(
                    f"method.lora.{name}: PEFT has none for {parameters[0]}, which it adapts as a "
                    f"parameter; leave {name} out, or name in method.lora.targets what it has one "
                    "for, such as q_proj"
                )


def _matches(pattern: str, module: str) -> bool:
    """Whether PEFT applies ``pattern`` to ``module``, a full name."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _check_pattern(setting: str, pattern: str) -> None:
    """Raise ``ValueError`` if ``pattern`` is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{setting}: {pattern!r} is no regular expression: {error}") from None
