"""Buckets between a rank and another process: the reader is a thread here, with memory of its own over the same file."""

import itertools
import threading
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rft.engines.sglang_bucket import Bucket, accept, needed, unpacked
from rft.ops.checksum import checksum


def through(tensors: dict[str, Tensor], most: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int], int]:
    """What the reader found, the checksums of what was sent, and how many parts there were."""
    ours, theirs = Pipe()
    bucket = Bucket(needed([tensor.shape for tensor in tensors.values()], dtype, most), dtype, torch.device("cpu"))
    found: dict[str, Tensor] = {}
    parts = itertools.count()

    def read() -> None:
        memory = accept(theirs)
        while entries := theirs.recv():
            found.update({name: tensor.clone() for name, tensor in unpacked(memory, entries, dtype)})
            _ = next(parts)
            theirs.send("read")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        bucket.offer(ours)
        sent = bucket.pack(iter(tensors.items()), ours.send, lambda: _received(ours))
    finally:
        ours.send([])
        reader.join()
        bucket.close()
    return found, dict(sent), next(parts)


def _received(link: Any) -> None:
    assert link.recv() == "read"


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=20),
    most=st.integers(1, 6000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_everything_arrives_as_it_was_cast(sizes: list[int], most: int, dtype: torch.dtype) -> None:
    tensors = {str(index): torch.randn(size) for index, size in enumerate(sizes)}
    found, sent, _ = through(tensors, most, dtype)
    assert found.keys() == tensors.keys() == sent.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.to(dtype))
        assert sent[name] == int(checksum(tensor.to(dtype)))


def test_shapes_are_kept_and_parts_are_many() -> None:
    tensors = {str(index): torch.randn(16, 16)[:, : index + 1] for index in range(16)}
    found, _, parts = through(tensors, 4096, torch.float32)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert parts > 4


@pytest.mark.parametrize(("most", "size"), [(1, 1024), (1 << 12, 1 << 12), (1 << 20, 512 + 1024 + 1024)])
def test_the_size_is_what_was_asked_for_unless_one_tensor_is_larger_or_all_are_smaller(most: int, size: int) -> None:
    shapes = [torch.Size((100,)), torch.Size((256,)), torch.Size((16, 16))]
    found = needed(shapes, torch.float32, most)
    assert found == min(size, 512 + 1024 + 1024)


def test_a_part_is_waited_for_when_the_next_one_is_being_written_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device would have nothing to do meanwhile."""
    seen, number = list[str](), itertools.count()
    bucket = Bucket(4096, torch.float32, torch.device("cpu"))

    def write(pairs: list[tuple[int, Tensor]]) -> Any:
        part = next(number)
        seen.append(f"write {part}")
        return torch.zeros(len(pairs), dtype=torch.int64), lambda: seen.append(f"wait {part}")

    monkeypatch.setattr(bucket, "write", write)
    tensors = [(str(index), torch.zeros(256)) for index in range(6)]  # a part each, and four of them fill the bucket
    sent = bucket.pack(iter(tensors), lambda entries: seen.append(f"hand over {entries[0][0]}"), lambda: seen.append("read"))
    bucket.close()
    begin = ["write 0", "write 1", "wait 0", "hand over 0", "write 2", "wait 1", "hand over 1", "write 3", "wait 2", "hand over 2"]
    assert seen[: len(begin)] == begin
    assert seen[len(begin) :] == [
        *("read", "write 4", "wait 3", "hand over 3"),
        *("read", "write 5", "wait 4", "hand over 4"),
        *("read", "read", "read", "wait 5", "hand over 5", "read"),
    ]
    assert len(sent) == len(tensors)
