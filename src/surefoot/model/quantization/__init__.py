"""Forms of quantized weights that are read here, by ``quant_method`` in ``config.json``.

A form says which tensors of the files are parts of which weight, and computes its values. A new
form is one file and one line.
"""

from collections.abc import Mapping

from .awq import AWQ
from .compressed_tensors import CompressedTensors
from .form import Form
from .gptq import GPTQ

FORMS: Mapping[str, type[Form]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
}

__all__ = ["FORMS", "Form"]
