import torch

from rft.ops.masked import masked_mean, masked_sum

NAN = float("nan")


def test_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, 8.0]]), torch.tensor([[True, True, False], [True, False, False]])
    assert masked_sum(values, mask).item() == 7.0
    assert masked_mean(values, mask).item() == torch.tensor(7 / 3).item()
    assert masked_mean(values, mask, 14).item() == 0.5


def test_nothing_marked_is_zero_and_not_nan() -> None:
    values, mask = torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_sum(values, mask).item() == masked_mean(values, mask).item() == masked_mean(values, mask, 0).item() == 0.0


def test_what_is_not_marked_gets_no_gradient() -> None:
    values = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    masked_mean(values, torch.tensor([True, False, True])).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5]


def test_bfloat16_is_added_up_in_float32() -> None:
    values = torch.ones(1000, dtype=torch.bfloat16)
    assert masked_sum(values, torch.ones(1000, dtype=torch.bool)).item() == 1000.0  # bf16 stops at 256
