"""Records as optree nodes. The only module that names optree.

A record's leaves are its tensors, and those of the records and tuples in its fields; every other field is metadata and must compare
equal for two trees to have the same structure.
Unflattening does not run `__post_init__`: trees are mapped over things that are no tensors, too.
"""

import dataclasses as dc
from collections.abc import Callable
from typing import Any, TypeVar, cast

import optree
import torch

NAMESPACE = "rft"
T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=type)


class _Same:
    """Metadata of a node: compared by equality where that means something, else by identity."""

    def __init__(self, fields: dict[str, Any], slots: tuple[str, ...]) -> None:
        self.fields, self.slots = fields, slots

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.slots == other.slots and self.fields == other.fields

    def __hash__(self) -> int:
        return hash((tuple(self.fields), self.slots))


def _is_branch(value: object) -> bool:
    """Whether there are tensors, or records, below a field: those are children of its node, all else is metadata."""
    below = cast(tuple[object, ...], value) if isinstance(value, tuple) else ()
    return isinstance(value, torch.Tensor) or type(value) in _RECORDS or any(map(_is_branch, below))


_RECORDS: set[type] = set()


def record(cls: RecordT) -> RecordT:
    """Registers a frozen dataclass as an optree node in the namespace `rft`; use it as the outermost decorator."""

    def flatten(node: Any) -> tuple[list[Any], _Same, tuple[str, ...]]:
        fields = {f.name: getattr(node, f.name) for f in dc.fields(node)}
        slots = tuple(name for name, value in fields.items() if _is_branch(value))
        return [fields.pop(name) for name in slots], _Same(fields, slots), slots

    def unflatten(meta: _Same, children: Any) -> Any:
        node = object.__new__(cls)
        for name, value in {**meta.fields, **dict(zip(meta.slots, children, strict=True))}.items():
            object.__setattr__(node, name, value)
        return node

    _RECORDS.add(cls)
    register: Any = optree.register_pytree_node  # its own annotations admit collections only
    register(cls, flatten, unflatten, namespace=NAMESPACE)
    return cls


def tree_map(function: Callable[..., Any], tree: T, *rest: Any) -> T:
    """Maps `function` over the tensors of a record, or of a nest of records, tuples and dicts."""
    mapped: Any = optree.tree_map(function, cast(Any, tree), *rest, namespace=NAMESPACE)
    return mapped


def tree_leaves(tree: Any) -> list[Any]:
    """The tensors of a record, or of a nest of records, tuples and dicts, in a fixed order."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)
