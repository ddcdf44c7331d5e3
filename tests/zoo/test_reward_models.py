"""A reward model of any architecture is the same one in transformers, or is refused by name."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from surefoot.batch import OutputSpec
from surefoot.checkpoint.sources import TensorsInMemory, read_whole
from surefoot.data.text.collation import collate
from surefoot.errors import ModelError
from surefoot.model import outputs
from surefoot.model.outputs import logprob_head_of
from surefoot.network.heads import add_heads
from surefoot.use.exporting._reward_model import as_sequence_classification
from zoo.architectures import SETTINGS, build

SOME = {"llama": "equal", "gpt2": "equal", "minicpm3": "changes its last hidden states"}


def outcome(name):
    """``equal``, or why there is no such reward model."""
    model = build(name).eval()
    stored = dict(model.state_dict())
    head = add_heads(model, {"values": 1}).values
    torch.nn.init.normal_(head.weight)
    ids = list(range(3, 19))
    batch = collate([{"input_ids": ids, "labels": ids}], packing=False)
    spec = OutputSpec(("values",), at="ends")
    own = {"value_head.weight": head.weight.detach()}
    try:
        with torch.no_grad():
            ours = outputs.compute(model, batch, spec, head=logprob_head_of(model), values=head)
        del model.value_head
        source, changes = as_sequence_classification(
            TensorsInMemory(stored), TensorsInMemory(own), model
        )
    except ModelError as error:
        return str(error)
    labels = {name: changes[name] for name in ("id2label", "label2id")}
    config = type(model.config).from_dict({**model.config.to_dict(), **labels})
    made = AutoModelForSequenceClassification.from_config(config).eval()
    weights = {name: read_whole(source, name) for name in source.shapes()}
    assert not made.load_state_dict(weights, strict=False).unexpected_keys
    with torch.no_grad():
        theirs = made(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[0]
    torch.testing.assert_close(theirs, ours.values, rtol=1e-4, atol=1e-4)
    return "equal"


@pytest.mark.parametrize("name", SOME)
def test_a_reward_is_that_of_sequence_classification_or_refused(name):
    assert SOME[name] in outcome(name)


@pytest.mark.proof
@pytest.mark.parametrize("name", SETTINGS)
def test_every_architecture_is_equal_or_refused(name):
    found = outcome(name)
    assert found == "equal" or "--reward-head v_head" in found or "no value head" in found
