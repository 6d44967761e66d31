"""The sync plan's recorder, on modules that load as engines do: fused, sliced, tied and padded; and on those that do more than copy."""

import weakref
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from rft.engines.delivery import delivery
from rft.engines.plan import Copy, NoPlan, Plan, record
from rft.narrow import Narrow, narrowed
from rft.ops import transfer
from rft.ops.checksum import checksum

HIDDEN, HEADS, VOCAB = 8, 12, 10
SHAPES = {
    ("embed", "head"): torch.Size((VOCAB, HIDDEN)),
    ("q",): torch.Size((HEADS, HIDDEN)),
    ("k",): torch.Size((4, HIDDEN)),
    ("v",): torch.Size((4, HIDDEN)),
    ("down",): torch.Size((HIDDEN, HEADS)),
    ("norm",): torch.Size((HIDDEN,)),
}
Stream = Iterator[tuple[str, Tensor]]


class Sliced(nn.Module):
    """One TP rank of two: fused q, k and v, rows or columns of everything but the norm, a vocabulary padded to 16."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rank = rank
        self.embed = nn.Parameter(torch.zeros(8, HIDDEN, dtype=dtype))
        self.head = self.embed
        self.qkv = nn.Parameter(torch.zeros((HEADS + 4 + 4) // 2, HIDDEN, dtype=dtype))
        self.down = nn.Parameter(torch.zeros(HIDDEN, HEADS // 2, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=dtype))

    def load(self, tensors: Stream) -> None:
        offsets = {"q": (0, 6), "k": (6, 2), "v": (8, 2)}
        for name, tensor in tensors:
            if name in offsets:
                start, size = offsets[name]
                self.qkv.data.narrow(0, start, size).copy_(tensor.narrow(0, self.rank * size, size))
            elif name == "embed":
                part = tensor[8 * self.rank : 8 * self.rank + 8]
                self.embed.data[: len(part)].copy_(part)
                self.embed.data[len(part) :].fill_(0)
            elif name == "down":
                self.down.data.copy_(tensor.chunk(2, dim=1)[self.rank])
            else:
                self.norm.data.copy_(tensor)

    def memory(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def a_set(seed: int, dtype: torch.dtype = torch.float32, *, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {names[0]: torch.randn(shape, generator=generator).to(dtype) for names, shape in SHAPES.items()}
    return {name: tensor for name, tensor in drawn.items() if name not in without}


def plan_of(module: Sliced, load: Callable[[Stream], object] | None = None) -> Plan:
    return record(load or module.load, SHAPES, module.memory(), module.norm.dtype)


def given_to(plan: Plan, whole: Mapping[str, Tensor]) -> Stream:
    """What comes of a set: no more of a tensor than the plan reads, in memory of its own."""
    return ((name, tensor.contiguous()) for name, tensor in narrowed(iter(whole.items()), plan.narrows))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaying_is_loading(rank: int, dtype: torch.dtype) -> None:
    ours, theirs = Sliced(rank, dtype), Sliced(rank, dtype)
    plan = plan_of(ours)
    for seed in range(3):
        received = plan.install(given_to(plan, a_set(seed)))
        theirs.load(iter(a_set(seed).items()))
        for name, tensor in theirs.memory().items():
            assert torch.equal(ours.memory()[name], tensor), name
        assert received == plan.checksums(tuple(received))
    assert plan.casts_to == dtype


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_that_one_copy_reads_is_summed_up_by_it(rank: int) -> None:
    plan, given = plan_of(Sliced(rank)), a_set(0)
    comes = dict(given_to(plan, given))
    received = plan.install(iter(comes.items()))
    assert all(plan.sums_up(name) for name in (*given, "head"))
    assert received == {name: int(checksum(tensor)) for name, tensor in comes.items()}


def test_a_tensor_that_is_read_in_parts_or_in_another_order_is_not() -> None:
    module = Sliced(0)

    def load(tensors: Stream) -> None:
        for name, tensor in tensors:
            if name == "norm":
                for half in (slice(4), slice(4, None)):
                    module.norm.data[half].copy_(tensor[half])
            elif name == "k":
                module.qkv.data[6:8].view(HIDDEN, 2).copy_(tensor[:2].t())
            else:
                module.load(iter([(name, tensor)]))

    plan = plan_of(module, load)
    assert {name for name in a_set(0) if not plan.sums_up(name)} == {"norm", "k"}
    received = plan.install(given_to(plan, a_set(1)))
    assert received == plan.checksums(tuple(received))


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_comes_that_is_not_read(rank: int) -> None:
    """Half of all rows or columns, of a padded vocabulary what there is of it, and the norm whole."""
    rows = Narrow(0, 8 * rank, 8 + 2 * rank)
    assert plan_of(Sliced(rank)).narrows == {
        "embed": rows, "head": rows, "q": Narrow(0, 6 * rank, 6 + 6 * rank), "k": Narrow(0, 2 * rank, 2 + 2 * rank),
        "v": Narrow(0, 2 * rank, 2 + 2 * rank), "down": Narrow(1, 6 * rank, 6 + 6 * rank),
    }  # fmt: skip


def test_where_engine_memory_has_several_dtypes_nothing_is_cast_before() -> None:
    module = Sliced(0, torch.bfloat16)
    module.norm = nn.Parameter(module.norm.float())
    assert plan_of(module).casts_to is None


def test_names_of_tied_tensors_are_interchangeable() -> None:
    module = Sliced(0)
    plan, given = plan_of(module), a_set(0)
    received = plan.install(given_to(plan, {("head" if name == "embed" else name): tensor for name, tensor in given.items()}))
    assert torch.equal(module.head, given["embed"][:8])
    assert received.keys() == {"head", "q", "k", "v", "down", "norm"}
    assert received == plan.checksums(tuple(received))


@pytest.mark.parametrize("name", ["embed", "q", "k", "v", "down", "norm"])
def test_what_was_not_installed_shows_by_name(name: str) -> None:
    plan = plan_of(Sliced(0))
    sent = plan.install(given_to(plan, a_set(1)))
    _ = plan.install(given_to(plan, {**a_set(1), name: a_set(2)[name]}))
    held = plan.checksums(tuple(sent))
    assert {key for key in sent if sent[key] != held[key]} == {name}


def test_tensors_may_lie_anyhow() -> None:
    """Streams give views: transposed ones, and parts of a bucket."""
    ours, theirs = Sliced(1), Sliced(1)
    plan, given = plan_of(ours), a_set(4)
    bucket = torch.cat([torch.zeros(3), given["q"].flatten()])
    views = {**given, "down": given["down"].t().contiguous().t(), "q": bucket[3:].view(SHAPES[("q",)])}
    assert not views["down"].is_contiguous()
    _ = plan.install(given_to(plan, views))
    theirs.load(iter(given.items()))
    assert all(torch.equal(ours.memory()[name], tensor) for name, tensor in theirs.memory().items())


def test_what_was_written_is_let_go_before_the_next_tensor_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream gathers the next bucket then, which needs the memory."""
    monkeypatch.setattr(transfer, "BATCH", 1)
    plan, given, kept = plan_of(Sliced(0)), a_set(0), list[weakref.ref[Tensor]]()

    def stream() -> Stream:
        for name in given:
            assert all(tensor() is None for tensor in kept)
            tensor = given[name].clone()
            kept.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    with delivery(narrowed(stream(), plan.narrows), SHAPES, "test", plan.narrows) as tensors:
        _ = plan.install(tensors)
    assert len(kept) == len(given)


def test_addresses_may_be_given_back_and_taken_again() -> None:
    """Views of the engine's memory stay valid where its addresses do."""
    module = Sliced(0)
    plan = plan_of(module)
    for parameter in module.parameters():
        parameter.data.zero_()
    _ = plan.install(given_to(plan, a_set(0)))
    assert torch.equal(module.norm, a_set(0)["norm"])


# ---- what is no plan ----


def refused(change: Callable[[Sliced, str, Tensor], object]) -> str:
    module = Sliced(0)

    def load(tensors: Stream) -> None:
        for name, tensor in tensors:
            module.load(iter([(name, tensor)]))
            _ = change(module, name, tensor)

    with pytest.raises(NoPlan) as caught:
        _ = plan_of(module, load)
    return str(caught.value)


def test_computing_with_weights() -> None:
    assert "mul" in refused(lambda module, name, _: module.norm.data.mul_(2) if name == "norm" else None)


def test_deriving_from_weights() -> None:
    said = refused(lambda module, name, tensor: module.norm.data.copy_(tensor.flip(0)) if name == "norm" else None)
    assert "is no copy out of norm" in said


def test_copying_a_tensor_that_came_before() -> None:
    kept = dict[str, Tensor]()
    said = refused(lambda m, n, t: kept.setdefault(n, t) if n == "k" else (m.norm.data.copy_(kept["k"][0]) if n == "norm" else None))
    assert "is no copy out of norm" in said


def test_spreading_out_one_value() -> None:
    assert "spread" in refused(lambda module, name, tensor: module.norm.data.copy_(tensor[0]) if name == "norm" else None)


def test_a_constant_that_was_read_from_a_tensor() -> None:
    """Loaders write scalars so; the recorded constant would be that of the recording for ever."""
    said = refused(lambda module, name, tensor: module.norm.data[:1].fill_(float(tensor[1])) if name == "norm" else None)
    assert "does not give the bits of norm" in said


def test_a_parameter_that_nothing_writes() -> None:
    module = Sliced(0)

    def load(tensors: Stream) -> None:
        module.load((name, tensor) for name, tensor in tensors if name != "norm")

    with pytest.raises(NoPlan, match="does not write norm"):
        _ = plan_of(module, load)


def test_a_parameter_that_is_written_in_part() -> None:
    module = Sliced(0)

    def load(tensors: Stream) -> None:
        for name, tensor in tensors:
            module.norm.data[:4].copy_(tensor[:4]) if name == "norm" else module.load(iter([(name, tensor)]))

    with pytest.raises(NoPlan, match="does not give the bits of norm"):
        _ = plan_of(module, load)


def test_a_parameter_that_is_replaced() -> None:
    module = Sliced(0)
    memory = module.memory()

    def load(tensors: Stream) -> None:
        for name, tensor in tensors:
            if name == "norm":
                module.norm = nn.Parameter(tensor.clone())
            else:
                module.load(iter([(name, tensor)]))

    with pytest.raises(NoPlan, match="does not write norm"):
        _ = record(load, SHAPES, memory, torch.float32)


def test_a_copy_reads_its_part_of_the_whole() -> None:
    whole = torch.arange(12.0).view(3, 4)
    copy = Copy(torch.zeros(3, 2), (3, 2), (4, 1), 1)
    assert copy.source(whole).tolist() == whole[:, 1:3].tolist()
    assert copy.source(torch.arange(24.0).view(6, 4)[3:]).tolist() == [[13, 14], [17, 18], [21, 22]]
