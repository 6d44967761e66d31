import torch

from rft.trainers.inputs import inputs

TOKENS = torch.tensor([[11, 12, 13], [21, -100, -100], [-100, -100, -100], [41, 42, -100]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False], [True, True, False]])
WANTED = torch.tensor([[False, True, True], [False, False, False], [False, False, False], [False, True, False]])
HEAT = torch.tensor([0.5, 1.0, 1.0, 0.0])


def test_packed_by_hand() -> None:
    # The run is 11 12 13 | 21 | 0 | 41 42, a row without tokens having one. 12, 13 and 42 are predicted at 0, 1 and 5.
    asked = inputs(TOKENS, MASK, WANTED, HEAT, "packed")
    assert asked.tokens.tolist() == [[11, 12, 13, 21, 0, 41, 42]]
    assert asked.segments is not None
    assert asked.segments.bounds.tolist() == [0, 3, 4, 5, 7]
    assert asked.segments.positions.tolist() == [0, 1, 2, 0, 0, 0, 1]
    assert asked.predictors.tolist() == [0, 1, 5]
    assert asked.targets.tolist() == [12, 13, 42]
    assert asked.temperature.tolist() == [0.5, 0.5, 0.0]


def test_padded_by_hand() -> None:
    # 12, 13 and 42 stand at 1, 2 and 10 of 4 × 3 places.
    asked = inputs(TOKENS, MASK, WANTED, HEAT, "padded")
    assert asked.tokens.tolist() == [[11, 12, 13], [21, 0, 0], [0, 0, 0], [41, 42, 0]]
    assert asked.segments is None
    assert asked.predictors.tolist() == [0, 1, 9]
    assert asked.targets.tolist() == [12, 13, 42]
    assert asked.temperature.tolist() == [0.5, 0.5, 0.0]
