"""The names of this package, each imported on first use: a recipe is read without torch."""

from typing import TYPE_CHECKING

from ...lazy_exports import lazy_getattr

if TYPE_CHECKING:
    from .blockwise import (
        dequantized,
        dynamic_map,
        quantize,
    )
    from .orthogonalization import (
        newton_schulz,
        ns_dtype,
        orthogonalized,
    )
    from .projection import (
        adam_direction,
        corrected_rate,
        large_dim,
        project,
        project_back,
        projector_of_rank,
        projector_shape,
        random_projector,
        singular_vectors,
        small_dim,
        state_of_rank,
    )
    from .rounding import (
        noise_for,
        round_stochastically,
    )
    from .rule_optimizer import (
        Update,
        adamw,
        adamw_of,
        build,
    )
    from .sharded import (
        add_over_shards,
        complete,
        epsilon_of,
        gathered_rows,
        mean_over,
        mean_square,
        own_rows,
        part_of,
    )

__all__ = [
    "Update",
    "adam_direction",
    "adamw",
    "adamw_of",
    "add_over_shards",
    "build",
    "complete",
    "corrected_rate",
    "dequantized",
    "dynamic_map",
    "epsilon_of",
    "gathered_rows",
    "large_dim",
    "mean_over",
    "mean_square",
    "newton_schulz",
    "noise_for",
    "ns_dtype",
    "orthogonalized",
    "own_rows",
    "part_of",
    "project",
    "project_back",
    "projector_of_rank",
    "projector_shape",
    "quantize",
    "random_projector",
    "round_stochastically",
    "singular_vectors",
    "small_dim",
    "state_of_rank",
]

__getattr__ = lazy_getattr(
    __package__,
    {
        ".blockwise": (
            "dequantized",
            "dynamic_map",
            "quantize",
        ),
        ".orthogonalization": (
            "newton_schulz",
            "ns_dtype",
            "orthogonalized",
        ),
        ".projection": (
            "adam_direction",
            "corrected_rate",
            "large_dim",
            "project",
            "project_back",
            "projector_of_rank",
            "projector_shape",
            "random_projector",
            "singular_vectors",
            "small_dim",
            "state_of_rank",
        ),
        ".rounding": (
            "noise_for",
            "round_stochastically",
        ),
        ".rule_optimizer": (
            "Update",
            "adamw",
            "adamw_of",
            "build",
        ),
        ".sharded": (
            "add_over_shards",
            "complete",
            "epsilon_of",
            "gathered_rows",
            "mean_over",
            "mean_square",
            "own_rows",
            "part_of",
        ),
    },
)
