"""VeRA (arXiv:2310.11454) through PEFT: one pair of random matrices, and two vectors a layer.

Every adapted layer adds ``diag(lambda_b) B diag(lambda_d) A x``. ``A`` and ``B`` are drawn once,
frozen, and shared: a layer uses the columns and rows that it needs. The vectors are trained.
Shapes: O outputs and I inputs of a layer, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ..errors import CheckpointError
from ..parallel.sharding import Box
from ..schema import KEPT, must
from ..storage.weight_files import ADAPTER_PREFIX
from .adapter import AdapterMethod, Part

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig

    from ..checkpoint.sources import Shape, TensorSource

A, B = "base_model.vera_A", "base_model.vera_B"  # [R, most I] and [most O, R], in files
_D, _B = ".vera_lambda_d", ".vera_lambda_b"  # [R] and [O], of a layer


@dataclass(frozen=True, kw_only=True)
class VeRA(AdapterMethod):
    """Train two vectors for each of chosen linear layers, between random matrices that all layers
    share; the base is frozen. Far fewer trained values than LoRA has."""

    name: ClassVar[str] = "vera"
    peft_type: ClassVar[str] = "VERA"
    peft_names: ClassVar[Mapping[str, str]] = {
        "rank": "r",
        "dropout": "vera_dropout",
        "initial_scale": "d_initial",
        "projection_seed": "projection_prng_key",
    }
    does: ClassVar[str] = "an update from matrices that layers share"

    rank: Annotated[int, KEPT] = 256
    """Rows of the shared matrix ``A``. It costs a trained value a layer, so it is far above the
    rank of LoRA."""
    dropout: float = 0.0
    """Dropout on the input of the update."""
    initial_scale: float = 0.1
    """The trained vector between the matrices at first; the other one is zero."""
    projection_seed: Annotated[int, KEPT] = 0
    """The seed of the shared matrices. Checkpoints contain them."""
    targets: tuple[str, ...] = ("all",)
    """The linear layers to adapt, by the last part of the name; ``all`` is every one except the
    head, routers and experts."""
    parts: tuple[Part, ...] = ("language",)
    """Parts of a model that reads pictures in which targets are adapted: ``tower``, ``projector``
    and ``language``. Each of them must have a target."""
    modules_to_save: tuple[str, ...] = ()
    """Modules to train in full and save with the adapter, such as ``embed_tokens``, ``lm_head``,
    or the ``projector`` of a model that reads pictures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(self, "be at least 1", "rank")
        must(self, "be in [0, 1)", "dropout")
        if self.initial_scale == 0:
            raise ValueError("initial_scale is 0, so no vector would ever get a gradient")

    def config(self, **shared: Any) -> PeftConfig:
        """With the shared matrices in files, so that they are the same everywhere."""
        from peft import VeraConfig

        settings = {peft_name: getattr(self, name) for name, peft_name in self.peft_names.items()}
        return VeraConfig(save_projection=True, **settings, **shared)

    @classmethod
    def as_lora(
        cls,
        adapter: TensorSource,
        config: Mapping[str, Any],
        weights: Mapping[str, Shape],
    ) -> tuple[TensorSource, Mapping[str, Any]]:
        """A LoRA adapter with ``diag(lambda_d) A`` and ``diag(lambda_b) B``, scaled by 1."""
        shapes = adapter.shapes()
        if missing := {A, B} - shapes.keys():
            raise CheckpointError(
                f"{min(missing)} is missing (save_projection: false), from which the update is "
                "computed; merge it with peft's own merge_and_unload()"
            )
        products: dict[str, _Product] = {}
        for key in shapes:
            if key.endswith(_D):
                module = key.removesuffix(_D)
                out = shapes[f"{module}{_B}"][0]
                if (shape := weights.get(module.removeprefix(ADAPTER_PREFIX))) is None:
                    raise CheckpointError(
                        f"an adapter of another model: {key} belongs to a module that the base "
                        "does not have"
                    )
                is_transposed = shape[0] != out or bool(config.get("fan_in_fan_out"))
                size = shape[0 if is_transposed else -1]
                products[f"{module}.lora_A.weight"] = _Product(key, A, (shapes[A][0], size))
                products[f"{module}.lora_B.weight"] = _Product(
                    f"{module}{_B}", B, (out, shapes[B][1])
                )
        rank = shapes[A][0]
        lora = {"peft_type": "LORA", "lora_alpha": rank, "r": rank}
        return _AsLoRA(adapter, products), {**config, **lora}


@dataclass(frozen=True)
class _Product:
    """``diag(vector) matrix``, of a part of the matrix."""

    vector: str
    matrix: str
    shape: Shape


@dataclass(frozen=True)
class _AsLoRA:
    """A ``TensorSource``: ``adapter`` with products in the place of its vectors and matrices."""

    adapter: TensorSource
    products: Mapping[str, _Product]

    def shapes(self) -> Mapping[str, Shape]:
        """Of the products, and of modules that were trained in full."""
        used = {name for p in self.products.values() for name in (p.vector, p.matrix)}
        rest = {n: shape for n, shape in self.adapter.shapes().items() if n not in used}
        return {**rest, **{name: product.shape for name, product in self.products.items()}}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Those of the vectors."""
        dtypes = self.adapter.dtypes()
        vector_dtypes = {name: dtypes[product.vector] for name, product in self.products.items()}
        others = {name: dtypes[name] for name in self.shapes() if name not in vector_dtypes}
        return {**others, **vector_dtypes}

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The values in ``box``."""
        if name not in self.products:
            return self.adapter.read(name, box)
        product = self.products[name]
        rows = Box(box.start[:1], box.shape[:1])
        vector = self.adapter.read(product.vector, rows)
        return vector[:, None] * self.adapter.read(product.matrix, box).to(vector.dtype)
