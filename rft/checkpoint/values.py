"""The user's own tree to plain data and back: records, tuples, dicts and lists of tensors, numbers, strings and None.

What was saved decides the structure; a template of the same structure gives the classes of its records and the devices of its tensors.
Lists and dicts may have grown since, what was None may be there now, and a number may be of another kind. Nothing is pickled: what is
more than data is refused where it is saved.
"""

import dataclasses as dc
import hashlib
import json
import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rft.checkpoint import manifest
from rft.errors import BadInput

ROOT = "run"
STRUCTURE, TENSORS = "run.json", "run.safetensors"
SCALARS = (bool, int, float, str)
SEQUENCES: dict[str, type] = {"tuple": tuple, "list": list}


@dc.dataclass(frozen=True, kw_only=True)
class Plain:
    """A tree as data: its structure, for JSON, and its tensors by their paths. `marks` has something short for each node by its path."""

    structure: Any
    tensors: dict[str, Tensor]
    marks: dict[str, str] = dc.field(default_factory=dict)

    def digest(self) -> str:
        """The same for equal trees."""
        return hashlib.blake2b(repr(sorted(self.marks.items())).encode()).hexdigest()


def write(checkpoint: Path, plain: Plain) -> None:
    """Writes a tree. Raises `OSError`."""
    from safetensors.torch import save

    manifest.write_json(checkpoint / STRUCTURE, plain.structure)
    manifest.write_bytes(checkpoint / TENSORS, save(plain.tensors))


def read(checkpoint: Path) -> Plain:
    """What `write` wrote."""
    from safetensors.torch import load_file

    return Plain(structure=json.loads((checkpoint / STRUCTURE).read_bytes()), tensors=load_file(checkpoint / TENSORS))


# ---- to plain data ----


def to_plain(tree: object) -> Plain:
    """The tree as data; tensors are copied to the host. Raises `BadInput` with the path of what cannot be saved."""
    tensors, marks = dict[str, Tensor](), dict[str, str]()
    try:
        structure = _plain(tree, ROOT, tensors, marks)
    except RecursionError:
        raise _refusal(f"{max(marks, key=len):.40}…", "never ends: something there contains itself") from None
    return Plain(structure=structure, tensors=tensors, marks=marks)


def _plain(value: Any, path: str, tensors: dict[str, Tensor], marks: dict[str, str]) -> Any:
    if value is None or type(value) in SCALARS:
        marks[path] = repr(value)
        return {"float": str(value)} if type(value) is float and not math.isfinite(value) else value
    if isinstance(value, Tensor):
        tensors[path] = _copy(value, path)
        marks[path] = _mark(tensors[path])
        return {"tensor": path}
    marks[path] = type(value).__qualname__
    if _is_record(value):
        for name in (name for name in _fields(value) if not hasattr(value, name)):
            raise _refusal(f"{path}.{name}", "has no value yet")
        fields = {name: _plain(getattr(value, name), f"{path}.{name}", tensors, marks) for name in _fields(value)}
        return {"record": marks[path], "fields": fields}
    if type(value) in SEQUENCES.values():
        return {marks[path]: [_plain(item, f"{path}[{place}]", tensors, marks) for place, item in enumerate(value)]}
    if type(value) is dict:
        entries = _checked_keys(value, path)
        return {"dict": [[key, _plain(item, f"{path}[{key!r}]", tensors, marks)] for key, item in entries.items()]}
    raise _refusal(path, f"is a {type(value).__module__}.{marks[path]}")


def _copy(tensor: Tensor, path: str) -> Tensor:
    if isinstance(tensor, DTensor) or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
        raise _refusal(
            path, f"is a {type(tensor).__name__} of {tensor.dtype} and {tensor.layout}, and not a dense one that each rank has whole"
        )
    return tensor.detach().to("cpu", copy=True).contiguous()


def _mark(tensor: Tensor) -> str:
    content = bytes(tensor.flatten().view(torch.uint8).numpy()) if tensor.numel() else b""
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.blake2b(content, digest_size=8).hexdigest()}"


def _checked_keys(entries: dict[Any, Any], path: str) -> dict[Any, Any]:
    for key in entries:
        if type(key) not in (str, int):
            raise _refusal(path, f"has the key {key!r}, and keys must be str or int")
    return entries


def _refusal(path: str, what: str) -> BadInput:
    return BadInput(
        f"save(state, folder, run): {path} {what}. A run is saved as dataclasses, tuples, lists and dicts of tensors, int, float, bool, "
        "str and None; leave this out and make it anew, or keep what it is made from (a controller's coefficient, not the controller)"
    )


def _is_record(value: Any) -> bool:
    """Dataclasses and named tuples, but not their classes."""
    return not isinstance(value, type) and (dc.is_dataclass(value) or (isinstance(value, tuple) and hasattr(value, "_fields")))


def _fields(record: Any) -> list[str]:
    return [field.name for field in dc.fields(record)] if dc.is_dataclass(record) else list(record._fields)


# ---- and back ----


def from_plain(plain: Plain, template: object) -> Any:
    """The tree, in the classes and on the devices of `template`. Raises `BadInput` with the path where their structures differ."""
    return _tree(plain.structure, template, ROOT, plain.tensors)


def _tree(saved: Any, template: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(saved, dict):
        _require(saved is None or _takes(template, text=isinstance(saved, str)), path, repr(saved), template)
        return saved
    kind, content = next(iter(cast(dict[str, Any], saved).items()))
    if kind == "float":
        _require(_takes(template, text=False), path, content, template)
        return float(content)
    if kind == "tensor":
        return _tensor(tensors[content], template, path)
    if kind == "record":
        return _record(content, saved["fields"], template, path, tensors)
    if kind == "dict":
        return _dict(dict(content), template, path, tensors)
    return _sequence(kind, content, template, path, tensors)


def _takes(template: object, *, text: bool) -> bool:
    """Whether a text, or else a number, may come where the template has this: numbers of all kinds are alike."""
    return template is None or (type(template) in SCALARS and isinstance(template, str) == text)


def _tensor(tensor: Tensor, template: Any, path: str) -> Tensor:
    fits = template is None or (isinstance(template, Tensor) and template.dtype == tensor.dtype)
    _require(fits, path, f"a tensor of {tensor.dtype}", template)
    return tensor if template is None else tensor.to(template.device)


def _record(name: str, fields: dict[str, Any], template: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    known = _is_record(template) and type(template).__qualname__ == name and set(_fields(template)) == set(fields)
    _require(known, path, f"{name}({', '.join(fields)})", template)
    values = {field: _tree(item, getattr(template, field, None), f"{path}.{field}", tensors) for field, item in fields.items()}
    later = {field.name for field in dc.fields(template) if not field.init} if dc.is_dataclass(template) else set[str]()
    record = type(template)(**{field: value for field, value in values.items() if field not in later})
    for field in values if dc.is_dataclass(template) else ():
        object.__setattr__(record, field, values[field])  # what the record makes of its fields at first, it had made before it was saved
    return record


def _dict(entries: dict[Any, Any], template: Any, path: str, tensors: dict[str, Tensor]) -> dict[Any, Any]:
    known: dict[Any, Any] = template if type(template) is dict else {}
    _require(template is None or type(template) is dict, path, "a dict", template)
    for key in known.keys() - entries.keys():
        _require(False, f"{path}[{key!r}]", "missing", known[key])
    first = next(iter(known.values()), None)
    return {key: _tree(item, known.get(key, _like(first, item)), f"{path}[{key!r}]", tensors) for key, item in entries.items()}


def _sequence(kind: str, items: list[Any], template: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    fits = template is None or (type(template) is SEQUENCES[kind] and (kind == "list" or len(template) == len(items)))
    _require(fits, path, f"a {kind} of {len(items)}", template)
    known: list[Any] = list(template or ())[: len(items)]
    first = known[0] if known else None
    known += [_like(first, item) for item in items[len(known) :]]
    return SEQUENCES[kind](_tree(item, known[place], f"{path}[{place}]", tensors) for place, item in enumerate(items))


def _like(first: object, item: Any) -> object:
    """The template of an entry that the template does not have: records are of one class, and anything else needs none."""
    return first if isinstance(item, dict) and "record" in item else None


def _require(holds: bool, path: str, saved: str, template: object) -> None:
    if not holds:
        raise BadInput(
            f"restore(state, folder, run): {path} is {saved} in the checkpoint, and {_kind(template)} in the `run` that was given"
        )


def _kind(template: object) -> str:
    if isinstance(template, Tensor):
        return f"a tensor of {template.dtype}"
    if _is_record(template):
        return f"{type(template).__qualname__}({', '.join(_fields(template))})"
    return f"{type(template).__name__} {template!r}"[:80]
