import torch

from rft.trainers.shelf import Shelf


def test_round_trips_are_bit_identical_and_free_the_storage() -> None:
    flat = torch.arange(10, dtype=torch.float32)
    shard, other, empty = flat[2:8].view(2, 3), torch.tensor([[float("nan"), -0.0]]), torch.empty(0, 4)
    before = [tensor.clone() for tensor in (shard, other, empty)]
    shelf = Shelf([shard, other, empty])
    assert shelf.bytes == 40 + 8
    for _ in range(3):
        shelf.put()
        shelf.put()
        assert shelf.away
        assert [tensor.untyped_storage().nbytes() for tensor in (flat, other, empty)] == [0, 0, 0]
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(shelf.readable(), before, strict=True))
        shelf.take()
        shelf.take()
        assert not shelf.away
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip((shard, other, empty), before, strict=True))
    assert flat.tolist() == list(range(10))  # what shares the storage came back too


def test_what_is_there_is_read_without_a_copy() -> None:
    tensor = torch.ones(3)
    shelf = Shelf([tensor])
    assert shelf.readable()[0] is tensor
    shelf.put()
    assert shelf.readable()[0].data_ptr() != tensor.data_ptr()
    assert shelf.readable()[0].tolist() == [1.0, 1.0, 1.0]


def test_bytes_do_not_depend_on_where_they_lie() -> None:
    shelf = Shelf([torch.ones(5), torch.ones(2, dtype=torch.bfloat16)])
    shelf.put()
    assert shelf.bytes == 24
    shelf.close()
    shelf.close()
    assert shelf.bytes == 0
