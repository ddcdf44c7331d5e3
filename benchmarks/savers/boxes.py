"""A Llama's weights in float32, and how eight processes cut them (reshard.py)."""

from __future__ import annotations

from collections.abc import Iterator

HIDDEN, INNER, VOCABULARY = 1024, 2816, 16_384
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")  # as tensor parallelism cuts them

Shape = tuple[int, ...]


def shapes(num_bytes: float) -> dict[str, Shape]:
    """Names and shapes of about so many bytes, by whole layers."""
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "post_attention_layernorm.weight": (HIDDEN,),
        **{f"self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for x in "kqvo"},
    }
    ends = {
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    }
    ends["model.norm.weight"] = (HIDDEN,)
    size = sum(4 * _size(shape) for shape in layer.values())
    count = max(1, round((num_bytes - sum(4 * _size(s) for s in ends.values())) / size))
    layers = {f"model.layers.{i}.{n}": s for i in range(count) for n, s in layer.items()}
    return {**layers, **ends}


def _size(shape: Shape) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def cut(shape: Shape, dim: int, ranks: int) -> Iterator[tuple[Shape, Shape]]:
    """Start and shape of every rank's part; all of these sizes divide."""
    for rank in range(ranks):
        start, part = [0] * len(shape), list(shape)
        part[dim] //= ranks
        start[dim] = rank * part[dim]
        yield tuple(start), tuple(part)


def dim_of(name: str, shape: Shape, kind: str) -> int:
    """The dimension that a matrix is cut along: ``rows``, or ``columns`` where a run with tensor
    parallelism does."""
    return 1 if kind == "columns" and name.endswith(BY_COLUMNS) and len(shape) > 1 else 0
