"""Counts the bytes of tensors that live while code runs on the meta device, where they take none."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rft import tree


class Meter(TorchDispatchMode):
    """Inside `with Meter(known) as meter:` whatever an operation makes is counted until it is let go; `known` tensors never are.

    It looks at storages, so that views count once. Small tensors count as they are: a device's allocator rounds up to 512 bytes.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._seen: dict[int, Any] = {_key(tensor): None for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree.tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self._count(leaf)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._seen:
            return
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)

        def gone(_: Any) -> None:
            del self._seen[key]
            self.live -= size

        self._seen[key] = weakref.ref(storage, gone)


def _key(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata
