"""The sync plan: where in an engine's memory each named tensor belongs, learnt by watching the engine load once.

An engine fuses projections, slices them over TP ranks, ties heads and pads vocabularies. How it does so is in its own loading code,
and nowhere else; so that code is run once over tensors of random values while every write into the engine's memory is recorded. If
all of them are copies out of the tensor at hand, or constants, the list of them is the exact map, and replaying it is loading.
The plan is only trusted after its replay has given the same bits everywhere that the engine's own loading gave.
"""

import dataclasses as dc
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rft.engines.delivery import Names, common_dtype
from rft.narrow import Narrow, Narrows, narrowed, shape_in
from rft.ops.checksum import checksum
from rft.ops.transfer import Table, reading, transfer

Load = Callable[[Iterator[tuple[str, Tensor]]], object]
"""An engine's own loading of named tensors."""


class NoPlan(Exception):
    """Loading this engine is more than copying; the message says what else was seen."""


@dc.dataclass(frozen=True)
class Copy:
    """One write: `target`, a view of engine memory, takes the view of the named tensor that is described by the other three."""

    target: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def source(self, tensor: Tensor) -> Tensor:
        """The part of the named tensor that is copied."""
        whole = tensor.contiguous()
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)

    def first(self, shape: torch.Size) -> tuple[int, ...] | None:
        """Where it begins in each dimension of a tensor of that shape; None: it is no plain block of it."""
        strides, rest, found = _strides(shape), self.offset, list[int]()
        if len(self.size) != len(shape) or any(
            size > 1 and stride != whole for size, stride, whole in zip(self.size, self.stride, strides, strict=True)
        ):
            return None
        for stride in strides:
            index, rest = divmod(rest, stride)
            found.append(index)
        inside = all(index + size <= limit for index, size, limit in zip(found, self.size, shape, strict=True))
        return tuple(found) if inside else None

    def within(self, narrow: Narrow, shape: torch.Size) -> "Copy":
        """The same write, where only that part of the whole tensor comes."""
        first, strides = self.first(shape), _strides(narrow.shape(shape))
        assert first is not None
        moved = [index - narrow.first * (dim == narrow.dim) for dim, index in enumerate(first)]
        offset = sum(index * stride for index, stride in zip(moved, strides, strict=True))
        return Copy(self.target, self.size, strides, offset)


@dc.dataclass(frozen=True)
class Fill:
    """One write of a constant: the padding of a vocabulary."""

    target: Tensor
    value: float


class Plan:
    """The writes of one whole loading, by the names of what they read."""

    def __init__(self, copies: Mapping[str, list[Copy]], fills: list[Fill], shapes: Mapping[Names, torch.Size]) -> None:
        self._fills, self._aliases = fills, {name: names[0] for names in shapes for name in names}
        of = {names[0]: (shape, _narrow(copies.get(names[0], []), shape)) for names, shape in shapes.items()}
        self._copies = {
            name: copies.get(name, []) if narrow is None else [copy.within(narrow, shape) for copy in copies[name]]
            for name, (shape, narrow) in of.items()
        }
        found = {alias: of[name][1] for alias, name in self._aliases.items()}
        self.narrows: Narrows = {alias: narrow for alias, narrow in found.items() if narrow is not None}
        """What of each tensor is read, where it is not all: nothing else of it is to come."""
        self.casts_to = common_dtype(copy.target for each in copies.values() for copy in each)
        """The dtype that everything is cast to as it is written; None: there are several."""
        self._whole = {
            alias
            for alias, name in self._aliases.items()
            for shape in [shape_in(self.narrows, name, of[name][0])]
            if [(copy.size, copy.stride) for copy in self._copies[name]] == [(tuple(shape), _strides(shape))]
        }
        self._reading: tuple[Sequence[str], Table] = ((), reading([]))

    def sums_up(self, name: str) -> bool:
        """Whether what `install` returns for a tensor is the checksum of all of it, cast: one copy reads it, in its order."""
        return name in self._whole

    def install(self, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, int]:
        """Replays every write. Returns the checksums of what the copies read, cast to the engine's dtype, by the given names."""
        self.fill()
        return self.write(tensors)()

    def fill(self) -> None:
        """Replays the writes of constants, which come before all others."""
        for fill in self._fills:
            _ = fill.target.fill_(fill.value)

    def write(self, tensors: Iterator[tuple[str, Tensor]]) -> Callable[[], dict[str, int]]:
        """Replays the writes of some tensors, without waiting for the device; what is returned waits, and gives their checksums."""
        names = list[str]()

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for name, tensor in tensors:
                names.append(name)
                for copy in self._copies[self._aliases[name]]:
                    yield copy.target, copy.source(tensor)
                del tensor  # as `transfer` lets go of it

        sums = transfer(pairs())
        return lambda: self._by_name(sums, names)

    def checksums(self, names: Sequence[str]) -> dict[str, int]:
        """Checksums of what lies now where the copies of each name wrote."""
        if self._reading[0] != names:  # the targets stay where they are, so that what is known of them is good for the next time
            self._reading = names, reading([copy.target for name in names for copy in self._copies[self._aliases[name]]])
        return self._by_name(self._reading[1].run(store=False), names)

    def _by_name(self, sums: Tensor, names: Sequence[str]) -> dict[str, int]:
        """One number a name: several copies of one tensor count together, in their order. Waits for the device once."""
        values = iter(sums.tolist())
        found = ((name, tuple(itertools.islice(values, len(self._copies[self._aliases[name]])))) for name in names)
        return {name: each[0] if len(each) == 1 else hash(each) for name, each in found}


def record(load: Load, shapes: Mapping[Names, torch.Size], memory: Mapping[str, Tensor], dtype: torch.dtype) -> Plan:
    """Learns the plan of `load`, which fills `memory` (the engine's parameters by name), and proves it.

    `shapes` are those of the named tensors that will come. The memory holds nothing of meaning afterwards.
    Raises `NoPlan` where loading is more than copies of the tensor at hand and constants, where it leaves a parameter unwritten, or
    where the replay does not give the same bits.
    """
    samples = _Samples(shapes, dtype, next(iter(memory.values())).device)
    recorder = _Recorder(memory, samples)
    with torch.inference_mode(), recorder:
        _ = load(iter(samples))
    if recorder.trouble:
        raise NoPlan(recorder.trouble[0])
    if unwritten := recorder.unwritten():
        raise NoPlan(f"loading does not write {', '.join(unwritten)}")
    plan = Plan(recorder.copies, recorder.fills, shapes)
    _prove(plan, load, samples, memory)
    return plan


def _prove(plan: Plan, load: Load, samples: "_Samples", memory: Mapping[str, Tensor]) -> None:
    """Replay and loading give the same bits, for other values than those that were recorded: a constant may have been one of them."""
    samples.seed += 1
    with torch.inference_mode():
        _ = load(iter(samples))
    loaded = {name: int(checksum(tensor)) for name, tensor in memory.items()}
    for tensor in memory.values():
        _ = tensor.detach().fill_(1)
    read = plan.install(narrowed(iter(samples), plan.narrows))
    for name, tensor in memory.items():
        if int(checksum(tensor)) != loaded[name]:
            raise NoPlan(f"the replay does not give the bits of {name} that loading gives")
    if plan.checksums(tuple(read)) != read:
        raise NoPlan("what the replay wrote is not what lies there in the end")


class _Samples:
    """A whole set of named tensors with random values, the same ones for the same seed; only the one at hand exists."""

    def __init__(self, shapes: Mapping[Names, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self.name, self.address, self.seed = "", 0, 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for names, shape in self._shapes.items():
            self.name = names[0]
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(self.name.encode(), self.seed))
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device).uniform_(-1, 1, generator=generator)
            self.address = _storage(tensor)
            yield self.name, tensor
            del tensor
        self.name, self.address = "", 0


class _Recorder(TorchDispatchMode):
    """Sees every operator, and notes those that write into `memory`."""

    def __init__(self, memory: Mapping[str, Tensor], samples: _Samples) -> None:
        super().__init__()
        self._owners = {_storage(tensor): name for name, tensor in memory.items()}
        self._samples = samples
        self._written = set[int]()
        self.copies, self.fills, self.trouble = dict[str, list[Copy]](), list[Fill](), list[str]()

    def unwritten(self) -> list[str]:
        """Parameters that nothing wrote to."""
        return [name for address, name in self._owners.items() if address not in self._written]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for target in _written_by(func, args, kwargs or {}):
            if _storage(target) in self._owners and target.numel():
                self._written.add(_storage(target))
                self._note(func, target, args)
        return result

    def _note(self, func: Any, target: Tensor, args: Any) -> None:
        name = self._samples.name
        source = args[1] if len(args) > 1 else None
        if func is torch.ops.aten.copy_.default and isinstance(source, Tensor) and _storage(source) == self._samples.address:
            if source.shape != target.shape:
                self.trouble.append(f"{name} is spread out over {self._owners[_storage(target)]}")
            copy = Copy(target.detach(), tuple(source.shape), source.stride(), int(source.storage_offset()))
            self.copies.setdefault(name, []).append(copy)
        elif func is torch.ops.aten.fill_.Scalar or func is torch.ops.aten.zero_.default:
            self.fills.append(Fill(target.detach(), float(source or 0)))
        else:
            what = f"{func} writes {self._owners[_storage(target)]}, and is no copy out of {name or 'a tensor of the set'}"
            self.trouble.append(what)


def _narrow(copies: Sequence[Copy], shape: torch.Size) -> Narrow | None:
    """The stretch of one dimension that has all that is read of a tensor, if it is less than all."""
    firsts = [copy.first(shape) for copy in copies]
    begins = [first for first in firsts if first is not None]
    if not copies or len(begins) < len(copies):
        return None
    for dim, limit in enumerate(shape):
        first = min(begin[dim] for begin in begins)
        end = max(begin[dim] + copy.size[dim] for begin, copy in zip(begins, copies, strict=True))
        if (first, end) != (0, limit):
            return Narrow(dim, first, end)
    return None


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
