"""The pictures of a batch: pixels, positions of several axes, and kinds of tokens, for the model.

32 pictures of SmolVLM's are 1.2 GiB of pixels. They are read when a micro-batch is about to run,
and gone when it has. None is stored with the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature

import torch

from ...batch import Batch, Features
from ...errors import DataError, ModelError
from ..example import MEDIA_COLUMN
from ..text.collation import split
from .files import MediaFiles, Seen, seen_in
from .processor import MediaProcessor

RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # positions [A, B, T], and more
_GRID = "image_grid_thw"  # what positions of several axes are computed from
_SAME = 0.05  # of a side: processors round it to a multiple of their patches
_KINDS = ("token_type_ids", "mm_token_type_ids")  # 1 at the tokens of pictures


@dataclass(frozen=True)
class ModelInputs:
    """What a model takes beside tokens."""

    names: frozenset[str]  # of the arguments of its forward pass
    rope_index: RopeIndex | None = None  # of M-RoPE


def check_inputs(processor: MediaProcessor, model: ModelInputs) -> None:
    """Raise ``ModelError`` if the model would get anything else of a picture than its processor
    gives it, or if its positions are computed from anything else than is known here. Packed rows
    and documents alone would be wrong in the same way: in PaliGemma, ``token_type_ids`` are 1 at
    the answer, and at pictures the answer would see itself."""
    name = type(processor.processor).__name__
    ids_BT, expected = processor.example()
    media = processor.tensors([[processor.blank]])
    media |= dict.fromkeys(_KINDS, _kinds(ids_BT, processor))
    inputs = [key for key in expected if key in model.names]
    wrong = [k for k in inputs if k not in media or not torch.equal(media[k], expected[k])]
    if wrong:
        raise ModelError(
            f"{name} gives its model {', '.join(wrong)} of a row with a picture, which is not "
            "supported"
        )
    if model.rope_index is None:
        return
    supported = {"input_ids", "attention_mask", _GRID, *_KINDS}
    needed = signature(model.rope_index).parameters.keys()
    unsupported = sorted(needed & {*media, *expected} - supported)
    if unsupported or not {_GRID, "mm_token_type_ids"} <= needed:
        of = ", ".join(unsupported) or "the grids of pictures in a way of its own"
        raise ModelError(
            f"{name}: its model computes positions from {of}, which is not supported for pictures"
        )


@dataclass(frozen=True)
class BatchMedia:
    """Adds the pictures of examples to their batch."""

    processor: MediaProcessor
    files: MediaFiles
    model: ModelInputs
    spare: Features | None = None  # a masked example with a picture, for batches without one
    make_spare: Callable[[], Features] | None = None

    def resizes(self, sources: Sequence[str | bytes]) -> bool:
        """Whether the model sees one of the pictures of a row in another size than its file has, by
        ``data.media.max_pixels`` or by its processor."""
        for source in sources:
            try:
                seen, full = self.files.look_with_size(source)
                size = self.processor.size_seen((seen.width, seen.height))
            except DataError:
                continue  # which the encoding says
            if size is not None and any(
                abs(a - b) > _SAME * b for a, b in zip(size, full, strict=True)
            ):
                return True
        return False

    def complete(self, features: Sequence[Features]) -> Sequence[Features]:
        """With a picture in it, if a spare is set: ranks that share weights must run the same
        modules, or the collectives of one would meet others of another rank. The spare has no
        labels, so the gradients of the tower are 0. Among pairs it is one, of two short answers,
        and it has the columns that a stage has added."""
        if self.spare is None or has_pictures(features):
            return features
        spare = {**features[0], **self.spare}
        if "lengths" in spare:
            spare["lengths"] = [len(spare["input_ids"]) - 2, 1, 1]
        return [*features, spare]

    def with_spare(self) -> BatchMedia:
        """The same, with a picture in every batch."""
        assert self.make_spare is not None
        return self if self.spare is not None else replace(self, spare=self.make_spare())

    def added(self, batch: Batch, features: Sequence[Features]) -> Batch:
        """The same batch, of items in the same order, with their pictures, which are not read yet.
        Without a picture in it, it stays the batch of text that it is."""
        if not has_pictures(features):
            return batch
        return replace(batch, pictures=UnreadPictures(self, features))

    def read(self, batch: Batch, features: Sequence[Features]) -> Batch:
        """The same batch with what the model gets of the pictures of its items."""
        is_packed = batch.cu_seqlens is not None
        if batch.branches is None:  # each response has the pictures of its own prompt
            pairs = [split(item) if "lengths" in item else (item,) for item in features]
            features = [conversation for pair in pairs for conversation in pair]
        rows = [seen_in(item) for item in features]
        is_one_row = is_packed and not self.processor.depends_on_others
        together = [[seen for row in rows for seen in row]] if is_one_row else rows
        read = replace(batch, pictures=None, media=self.inputs(batch.input_ids, together))
        if (rope_index := self.model.rope_index) is None:
            return read
        num_pictures, grids_P3 = [len(row) for row in rows], read.media.get(_GRID)
        axes = self._axes(rope_index, batch, features, num_pictures, grids_P3)
        return replace(read, axes=axes)

    def inputs(
        self, ids_BT: torch.Tensor, rows: Sequence[Sequence[Seen]]
    ) -> dict[str, torch.Tensor]:
        """What the model gets beside tokens for the pictures in ``rows``; it may compute positions
        of several axes from it itself."""
        return self.model_inputs(ids_BT, self.tensors(rows))

    def tensors(self, rows: Sequence[Sequence[Seen]]) -> dict[str, torch.Tensor]:
        """What the processor makes of the pictures in ``rows``. Raises ``DataError``."""
        decoded = {seen: self.files.decode(seen) for row in rows for seen in row}  # each once
        return self.processor.tensors([[decoded[seen] for seen in row] for row in rows])

    def model_inputs(
        self, ids_BT: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What the model gets of ``tensors``, and of the places of pictures in these ids."""
        inputs = {**tensors, **dict.fromkeys(_KINDS, _kinds(ids_BT, self.processor))}
        return {name: value for name, value in inputs.items() if name in self.model.names}

    def _axes(
        self,
        rope_index: RopeIndex,
        batch: Batch,
        features: Sequence[Features],
        num_pictures: Sequence[int],
        grids_P3: torch.Tensor | None,
    ) -> torch.Tensor:
        """[A, B, T] the positions of each document, computed as if it were alone; in a packed row
        [1 + A, 1, T], behind those that tell documents apart. A: axes, B: rows, T: tokens, P: the
        pictures of all documents, one after another."""
        is_packed, width = batch.cu_seqlens is not None, batch.input_ids.shape[1]
        kinds_BT = _kinds(batch.input_ids, self.processor)
        documents, end, first = [], 0, 0
        for number, (item, count) in enumerate(zip(features, num_pictures, strict=True)):
            row, start = (0, end) if is_packed else (number, 0)
            end = start + len(item["input_ids"])
            positions_A1T = _document_axes(
                rope_index,
                batch.input_ids[row : row + 1, start:end],
                kinds_BT[row : row + 1, start:end],
                grids_P3[first : first + count] if grids_P3 is not None and count else None,
                None if batch.branches is None else item["lengths"],
            )
            if not is_packed:  # padding, which nothing attends to
                rest = torch.arange(end, width).expand(len(positions_A1T), 1, -1)
                positions_A1T = torch.cat([positions_A1T, rest.to(positions_A1T)], dim=-1)
            documents.append(positions_A1T)
            first += count
        axes = torch.cat(documents, dim=-1 if is_packed else 1)
        if not is_packed:  # HunYuan takes no other axes than its own
            return axes
        return torch.cat([batch.position_ids[None].to(axes), axes])


@dataclass(frozen=True)
class UnreadPictures:
    """The pictures of a batch, by the items that it was made of."""

    media: BatchMedia
    features: Sequence[Features]

    def read(self, batch: Batch) -> Batch:
        """``batch`` with what the model gets of them."""
        return self.media.read(batch, self.features)


@dataclass(frozen=True)
class PromptPictures:
    """The pictures of one prompt. Their pixels are read when the prompt is answered, or before."""

    media: BatchMedia
    pictures: Sequence[Seen]
    tensors: Mapping[str, torch.Tensor] | None = None  # that were read before

    @property
    def key(self) -> str:
        """Equal for equal pictures."""
        return " ".join(f"{each.digest}:{each.width}x{each.height}" for each in self.pictures)

    def thumbnails(self) -> list[str]:
        """Small copies, as data URLs."""
        return [self.media.files.thumbnail(each) for each in self.pictures]

    def read(self) -> PromptPictures:
        """The same, with all that the model gets of them. Raises ``DataError``."""
        return replace(self, tensors=self.media.tensors([self.pictures]))

    def inputs(
        self, ids_BT: torch.Tensor, prompts: Sequence[PromptPictures]
    ) -> Mapping[str, torch.Tensor]:
        """What the model gets beside rows of ids, each of which is one of ``prompts``."""
        if len(prompts) == 1 and prompts[0].tensors is not None:
            return self.media.model_inputs(ids_BT, prompts[0].tensors)
        return self.media.inputs(ids_BT, [each.pictures for each in prompts])


def _document_axes(
    rope_index: RopeIndex,
    ids_1T: torch.Tensor,
    kinds_1T: torch.Tensor,
    grids_P3: torch.Tensor | None,
    lengths: Sequence[int] | None,
) -> torch.Tensor:
    """[A, 1, T] the positions of one document. One of a pair is prompt, chosen and rejected
    response, of these ``lengths``: both responses continue the prompt."""

    def axes(tokens: torch.Tensor) -> torch.Tensor:
        ids, kinds = ids_1T[:, tokens], kinds_1T[:, tokens]
        return rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids_P3)[0]

    tokens = torch.arange(ids_1T.shape[1])
    if lengths is None:
        return axes(tokens)
    prompt, behind = int(lengths[0]), int(lengths[0]) + int(lengths[1])
    rejected = axes(torch.cat([tokens[:prompt], tokens[behind:]]))[..., prompt:]
    return torch.cat([axes(tokens[:behind]), rejected], dim=-1)


def _kinds(ids_BT: torch.Tensor, processor: MediaProcessor) -> torch.Tensor:
    """[B, T] 1 at the tokens of pictures, as ``ProcessorMixin.create_mm_token_type_ids``."""
    return torch.isin(ids_BT, torch.tensor(sorted(processor.token_ids))).long()


def has_pictures(features: Sequence[Features]) -> bool:
    """Whether any of some examples has one."""
    return any(len(item.get(MEDIA_COLUMN, b"")) for item in features)
