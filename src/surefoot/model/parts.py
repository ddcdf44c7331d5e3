"""The parts of a model that reads pictures: the tower that encodes them, the projector that brings
what it says to the width of the language model, and the language model with its head.

No model is named: transformers finds the encoder and the decoder of most. The projector is what
is in neither. Some models have it inside of the tower (Qwen's ``visual.merger``): there it is
what follows the tower's layers and has linear maps, as LLaMA-Factory's table of models has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOWER, PROJECTOR, LANGUAGE = PARTS = ("tower", "projector", "language")


def parts_of(model: PreTrainedModel) -> Mapping[str, list[nn.Parameter]]:
    """The parameters of each part; empty if the model reads text alone, or has no such parts."""
    decoder, tower = model.get_decoder(), model.get_encoder(modality="image")
    if tower in (model, model.base_model, decoder) or decoder in (model, model.base_model):
        return {}
    language = {id(p) for p in decoder.parameters()}
    if (head := model.get_output_embeddings()) is not None:
        language |= {id(p) for p in head.parameters()}
    inside = {id(p) for p in tower.parameters()}
    projector = {id(p) for p in model.parameters()} - language - inside
    if not projector:
        projector = {id(p) for module in _behind_layers(tower) for p in module.parameters()}
    parts: dict[str, list[nn.Parameter]] = {name: [] for name in PARTS}
    for parameter in model.parameters():
        key = id(parameter)
        name = LANGUAGE if key in language else PROJECTOR if key in projector else TOWER
        parts[name].append(parameter)
    return parts


def _behind_layers(tower: nn.Module) -> list[nn.Module]:
    """The modules of a tower that follow its layers, and have linear maps."""
    children = list(tower.children())
    layers = next((i for i, m in enumerate(children) if isinstance(m, nn.ModuleList)), None)
    return [
        child
        for child in ([] if layers is None else children[layers + 1 :])
        if not isinstance(child, nn.ModuleList)  # Qwen3-VL's mergers of single layers are its own
        and any(isinstance(module, nn.Linear) for module in child.modules())
    ]
