"""What is in a packed row."""

from itertools import pairwise


def unpack(batch):
    """The examples of a packed row."""
    ids, labels = batch.input_ids[0].tolist(), batch.labels[0].tolist()
    documents = pairwise(batch.cu_seqlens.tolist())
    return [{"input_ids": ids[a:b], "labels": labels[a:b]} for a, b in documents]
