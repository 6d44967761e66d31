"""What Actor and Critic have in common: they hold a backend, move its parts, save and install them, and give them back."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rft.errors import RoleError
from rft.trainers.backend import Steps
from rft.trainers.passes import Passes
from rft.trainers.protocol import Part


class Holder:
    """Holds something that is stepped, and how rows go through it."""

    def __init__(self, backend: Steps, passes: Passes, what: str) -> None:
        self.name, self.passes = backend.name, passes
        self._held, self._what = backend, what

    def saved(self) -> dict[str, Tensor]:
        """See `Saved`."""
        return self._held.saved()

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Saved`."""
        self._held.install(tensors)

    def offload(self, part: Part) -> None:
        """See `Trainer`."""
        self._held.shelves[part].put()

    def reload(self, part: Part) -> None:
        """See `Trainer`."""
        self._held.shelves[part].take()

    def bytes(self, part: Part) -> int:
        """See `Trainer`."""
        return self._held.shelves[part].bytes

    def close(self) -> None:
        """See `Trainer`."""
        self._held.close()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def require(self, *parts: Part) -> None:
        """Raises `RoleError` where one of them lies on the host."""
        for part in parts:
            if self._held.shelves[part].away:
                raise RoleError(f"{self._what}'s {part} lies on the host; reload it first")
