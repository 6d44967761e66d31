import dataclasses as dc
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import rft
from rft.checkpoint import values
from rft.data.prompts import Cursor
from rft.ops import controllers
from rft.ops.controllers import Coefficient
from rft.ops.normalisation import RunningMoments, moments


class Pair(NamedTuple):
    left: int
    right: torch.Tensor


@dc.dataclass(frozen=True)
class Inner:
    scores: list[float]
    by_name: dict[str, Any]


@dc.dataclass(frozen=True)
class Run:
    cursor: Cursor
    coefficient: Coefficient
    seen: RunningMoments
    inner: Inner
    pair: Pair
    best: float | None = None
    derived: int = dc.field(init=False, default=7)


@dc.dataclass(slots=True)
class Best:
    step: int = 0
    best: float = dc.field(init=False, default=0.0)
    where: Cursor = dc.field(init=False)

    def __post_init__(self) -> None:
        self.where = Cursor(epoch=self.step)


@dc.dataclass
class Later:
    value: int = dc.field(init=False)


def full() -> Run:
    """A run with something of everything in it."""
    return Run(
        cursor=Cursor(seed=1, epoch=2, position=3),
        coefficient=Coefficient(value=torch.tensor(0.1, dtype=torch.float64)),
        seen=moments(torch.tensor([1.0, 2.0])),
        inner=Inner(scores=[0.1, float("inf"), -0.0], by_name={"a": (1, True, "x"), "é": {3: None}}),
        pair=Pair(left=1 << 70, right=torch.tensor([[True, False]])),
        best=1e-300,
    )


def fresh() -> Run:
    """The same structure, before anything happened."""
    return Run(
        cursor=Cursor(),
        coefficient=Coefficient(value=torch.tensor(0.0, dtype=torch.float64)),
        seen=RunningMoments(),
        inner=Inner(scores=[], by_name={}),
        pair=Pair(left=0, right=torch.zeros(0, dtype=torch.bool)),
    )


def through_the_disk(tree: object, template: Any, folder: Path) -> Any:
    values.write(folder, values.to_plain(tree))
    return values.from_plain(values.read(folder), template)


def same(left: Any, right: Any) -> bool:
    return values.to_plain(left).marks == values.to_plain(right).marks


def test_a_tree_comes_back_in_the_classes_of_its_template(tmp_path: Path) -> None:
    back = through_the_disk(full(), fresh(), tmp_path)
    assert type(back) is Run
    assert type(back.pair) is Pair
    assert same(back, full())
    assert back.derived == 7
    assert json.loads((tmp_path / "run.json").read_text())["record"] == "Run"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.bool, torch.float64])
def test_tensors_of_any_real_dtype_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    views = [tensor, tensor[:, 1], tensor.t(), torch.zeros(0, 3, dtype=dtype), tensor.sum().to(dtype)]
    back = through_the_disk(views, [], tmp_path)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back, views, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 0, True, "", None, -(1 << 80)])
def test_scalars_come_back_as_they_are(tmp_path: Path, value: object) -> None:
    back = through_the_disk({"x": value}, {"x": None}, tmp_path)["x"]
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_what_has_grown_comes_back_and_records_in_it_are_of_the_first_ones_class(tmp_path: Path) -> None:
    grown = {"cursors": [Cursor(epoch=1), Cursor(epoch=2)], "names": {"a": 1, "b": 2.5}, "best": (1, torch.ones(2))}
    back = through_the_disk(grown, {"cursors": [Cursor()], "names": {}, "best": None}, tmp_path)
    assert same(back, grown)


def test_fields_that_the_constructor_does_not_take_come_back_too(tmp_path: Path) -> None:
    tree = Best(step=3)
    tree.best, tree.where = 0.5, Cursor(epoch=1, position=7)
    back = through_the_disk(tree, Best(), tmp_path)
    assert back == tree
    assert values.to_plain(tree).digest() != values.to_plain(Best(step=3)).digest()
    frozen = full()
    object.__setattr__(frozen, "derived", 8)
    assert through_the_disk(frozen, fresh(), tmp_path).derived == 8
    later = Later()
    later.value = 4
    assert through_the_disk(later, Later(), tmp_path) == later


def test_numbers_of_other_kinds_are_alike_and_none_becomes_anything(tmp_path: Path) -> None:
    tree = {"whole": 1, "real": 0.5, "yes": True, "nan": float("inf"), "none": None, "text": None, "number": "x"}
    template = {"whole": 0.0, "real": 0, "yes": 0, "nan": 0, "none": 3, "text": "x", "number": None}
    assert through_the_disk(tree, template, tmp_path) == tree


def test_a_gradient_is_not_kept(tmp_path: Path) -> None:
    back = through_the_disk(torch.ones(2, requires_grad=True), torch.zeros(2), tmp_path)
    assert not back.requires_grad


# ---- what cannot be saved ----


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (controllers.fixed(0.1), "run.init is a builtins.function"),
        ({"a": [1, object()]}, "run['a'][1] is a builtins.object"),
        (Inner(scores=[], by_name={"x": {1, 2}}), "run.by_name['x'] is a builtins.set"),
        ({"a": {(1, 2): 3}}, "run['a'] has the key (1, 2), and keys must be str or int"),
        ({True: 3}, "run has the key True"),
        ([Path("x")], "run[0] is a pathlib.PosixPath"),
        (Cursor, "run is a builtins.type"),
        (torch.ones(2, dtype=torch.complex64), "run is a Tensor of torch.complex64"),
        (torch.ones(2, 2).to_sparse(), "run is a Tensor of torch.float32 and torch.sparse_coo"),
        (b"bytes", "run is a builtins.bytes"),
        ([Later()], "run[0].value has no value yet"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(tree: object, says: str) -> None:
    with pytest.raises(rft.BadInput) as caught:
        _ = values.to_plain(tree)
    assert f"save(state, folder, run): {says}" in str(caught.value)


def test_what_contains_itself_is_refused() -> None:
    endless: list[object] = [1]
    endless.append({"again": endless})
    with pytest.raises(rft.BadInput, match=r"run\[1\]\['again'\]\[1\]\['again'\].*… never ends: something there contains itself"):
        _ = values.to_plain(endless)


# ---- what does not fit the template ----


@dc.dataclass(frozen=True)
class Other:
    scores: list[float]


@pytest.mark.parametrize(
    ("tree", "template", "says"),
    [
        ({"a": Cursor()}, {"a": Other(scores=[])}, "run['a'] is Cursor(seed, epoch, position) in the checkpoint, and Other(scores)"),
        ({"a": Cursor()}, {"a": None}, "run['a'] is Cursor(seed, epoch, position) in the checkpoint, and NoneType None"),
        ({"a": 1}, {"a": 1, "b": 2}, "run['b'] is missing in the checkpoint, and int 2"),
        ((1, 2), (1, 2, 3), "run is a tuple of 2 in the checkpoint, and tuple (1, 2, 3)"),
        ([1], (1,), "run is a list of 1 in the checkpoint, and tuple (1,)"),
        ({"a": 1}, [1], "run is a dict in the checkpoint, and list [1]"),
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.float64),
            "run is a tensor of torch.float32 in the checkpoint, and a tensor of torch.f",
        ),
        (torch.zeros(2), 3, "run is a tensor of torch.float32 in the checkpoint, and int 3"),
        (3, torch.zeros(2), "run is 3 in the checkpoint, and a tensor of torch.float32"),
        (float("nan"), [], "run is nan in the checkpoint, and list []"),
        ({"a": 1, "b": "x"}, {"a": "s", "b": 3}, "run['a'] is 1 in the checkpoint, and str 's'"),
        (["x"], [3], "run[0] is 'x' in the checkpoint, and int 3"),
        (float("inf"), "s", "run is inf in the checkpoint, and str 's'"),
        ("inf", 1.5, "run is 'inf' in the checkpoint, and float 1.5"),
        (Pair(1, torch.ones(1)), (1, torch.ones(1)), "run is Pair(left, right) in the checkpoint, and tuple (1,"),
    ],
)
def test_another_structure_is_refused_by_its_path(tree: object, template: object, says: str) -> None:
    with pytest.raises(rft.BadInput) as caught:
        _ = values.from_plain(values.to_plain(tree), template)
    assert f"restore(state, folder, run): {says}" in str(caught.value)


def test_a_record_that_is_no_longer_valid_says_so_itself() -> None:
    plain = values.to_plain(Cursor(epoch=1))
    plain.structure["fields"]["epoch"] = -1
    with pytest.raises(rft.BadInput, match="at least 0"):
        _ = values.from_plain(plain, Cursor())


# ---- comparing ranks ----


def test_trees_are_alike_only_if_every_leaf_is() -> None:
    one = values.to_plain(full())
    assert one.digest() == values.to_plain(full()).digest()
    for other in (
        dc.replace(full(), best=1e-299),
        dc.replace(full(), pair=Pair(1 << 70, torch.tensor([[True, True]]))),
        dc.replace(full(), pair=Pair(1 << 70, torch.tensor([True, False]))),
        dc.replace(full(), inner=Inner(scores=[0.1, float("inf"), 0.0], by_name=full().inner.by_name)),
    ):
        assert one.digest() != values.to_plain(other).digest()


@dc.dataclass
class Grown:
    """Makes something of its fields, which must not be made twice."""

    total: int = 100
    more: dc.InitVar[int] = 7

    def __post_init__(self, more: int) -> None:
        self.total += more


def test_what_a_record_made_of_its_fields_is_not_made_again() -> None:
    assert values.from_plain(values.to_plain(Grown()), Grown()).total == 107
