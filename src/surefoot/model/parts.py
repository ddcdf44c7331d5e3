"""The parts of a model that reads pictures: the tower that encodes them, the projector that brings
what it says to the width of the language model, and the language model with its head. A tower for
sounds beside it is of the same part.

No model is named: transformers finds the encoder and the decoder of most. The projector is what
is in neither. Some models have it inside of the tower (Qwen's ``visual.merger``): there it is
what follows the tower's layers and has linear maps, as LLaMA-Factory's table of models has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOWER, PROJECTOR, LANGUAGE = PARTS = ("tower", "projector", "language")


def parts_of(model: PreTrainedModel) -> Mapping[str, list[nn.Parameter]]:
    """The parameters of each part; empty if the model reads text alone, or has no such parts."""
    decoder, tower = model.get_decoder(), model.get_encoder(modality="image")
    if tower in (None, model, model.base_model, decoder) or decoder in (model, model.base_model):
        return {}
    language = {id(p) for p in decoder.parameters()}
    if (head := model.get_output_embeddings()) is not None:
        language |= {id(p) for p in head.parameters()}
    towers = [tower, *sound_towers(model)]
    inside = {id(p) for encoder in towers for p in encoder.parameters()}
    projector = {id(p) for p in model.parameters()} - language - inside
    if not projector:
        projector = {id(p) for module in _behind_layers(tower) for p in module.parameters()}
    parts: dict[str, list[nn.Parameter]] = {name: [] for name in PARTS}
    for parameter in model.parameters():
        key = id(parameter)
        name = LANGUAGE if key in language else PROJECTOR if key in projector else TOWER
        parts[name].append(parameter)
    return parts


def sound_towers(model: PreTrainedModel) -> list[nn.Module]:
    """The tower for sounds, if there is one."""
    encoder = model.get_encoder(modality="audio")
    others = (None, model, model.base_model, model.get_decoder())
    return [] if encoder in others else [encoder]


def modules_of(module: nn.Module, parameters: Set[nn.Parameter]) -> Iterator[str]:
    """The names of the largest modules in ``module`` that have no others than ``parameters``."""
    for name, child in module.named_children():
        inside = list(child.parameters())
        if inside and all(parameter in parameters for parameter in inside):
            yield name
        else:
            yield from (f"{name}.{rest}" for rest in modules_of(child, parameters))


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
