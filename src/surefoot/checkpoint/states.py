"""What a part of the run owes its checkpoint: to say what it is, and to become it again."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """Anything with a state: the model, the optimizer, the loader, the random generators.

    A state is made of dicts, lists, tuples, numbers, text, None and dense tensors. Two states have
    files of their own: ``model``, a flat dict of tensors under the names of the weight file, and
    ``optimizer``, a dict of parameter name to dict.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state as it is now. Tensors may be the owner's own: saving only reads them.

        Loading asks for the state as well, and reads into the tensors of it that fit, so that
        ``load_state_dict`` may find its own tensors filled already.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become ``state``."""
