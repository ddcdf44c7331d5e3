"""Where responses are sampled: the engine of ``generate``, or a server that takes and gives token
ids. To add a server: write its dataclass, add its line."""

from collections.abc import Mapping

from .kinds import VLLM, OpenAICompletions, SGLang
from .server import Engine as Engine
from .server import Sampler as Sampler

SAMPLERS: Mapping[str, type] = {
    "engine": Engine,
    "vllm": VLLM,
    "sglang": SGLang,
    "openai": OpenAICompletions,
}
