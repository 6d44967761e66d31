import pytest
import torch

from rft.errors import BadInput
from rft.memory.activations import Pass, activations, bounded
from rft.memory.meter import Meter
from rft.memory.outline import blueprint, outline
from rft.memory.surrogates import block_width
from rft.ops import scores
from tests.memory.models import OUTSIDE, tiny

# Kept of a token in a block, in bf16, with width 128, MLP 256, keys and values 64 wide, 4 heads; two blocks:
#   each norm: its input in fp32, normed, scaled, 1/rms    2 (4 · 128 + 2 · 128 + 2 · 128 + 4) = 2056
#   queries, keys, values, the mixed heads and their sums  2 (128 + 64 + 64 + 128) + 4 · 4     =  784
#   the MLP's gate, its silu, up, their product            4 · 2 · 256                         = 2048
BLOCK = 2056 + 784 + 2048
# Outside: the last norm's input in fp32, normed and 1/rms (what is scaled is kept where it is wanted), cosines and sines of 32.
LAST = 4 * 128 + 2 * 128 + 4 + 2 * 2 * 32
# Of a token that is wanted: its hidden state, three sums in fp32, its log-prob.
WANTED = 2 * 128 + 12 + 4


def a_pass(tokens=256, wanted=128, **options):
    return Pass(tokens=tokens, wanted=wanted, longest=tokens, **{"dtype": "bfloat16", **options})


def test_what_a_block_keeps_is_as_summed_up_by_hand():
    assert BLOCK == 20 * 128 + 4 * 64 + 8 * 256 + 4 * 4 + 8
    found = activations(tiny(), a_pass())
    assert found.kept == 256 * (2 * BLOCK + LAST) + 128 * WANTED
    assert found.outside == 2 * OUTSIDE


def test_with_checkpointing_a_block_keeps_its_input():
    found = activations(tiny(), a_pass(checkpointing=True))
    assert found.kept == 256 * (2 * 2 * 128 + LAST) + 128 * WANTED


def test_the_fullest_moment_of_a_pass_without_gradient_has_one_block_or_the_head():
    few, all_of_them = (activations(tiny(), a_pass(256, wanted)).scoring for wanted in (1, 256))
    assert 256 * 128 * 2 < few < 256 * BLOCK
    assert few <= all_of_them


def test_training_holds_what_is_kept_and_a_blocks_gradients_and_the_heads():
    found = activations(tiny(), a_pass())
    assert found.kept + found.outside < found.training < found.kept + found.outside + 256 * BLOCK + 2 * 147_968 * 2
    checkpointed = activations(tiny(), a_pass(checkpointing=True))
    assert checkpointed.kept + 256 * BLOCK < checkpointed.training < found.training


def test_fp32_takes_more_and_a_longer_pass_too():
    assert activations(tiny(), a_pass(dtype="float32")).kept > activations(tiny(), a_pass()).kept
    assert activations(tiny(), a_pass(512, 256)).kept == 2 * activations(tiny(), a_pass()).kept


def test_bounded_is_exact_at_powers_of_four_and_near_between():
    for tokens in (1024, 700, 3000):
        found, exact = bounded(tiny(), a_pass(tokens, 1)), activations(tiny(), a_pass(tokens, tokens))
        assert found.training == pytest.approx(exact.training, rel=0 if tokens == 1024 else 0.03)


def test_rows_that_must_be_padded_carry_a_mask():
    from transformers import Gemma2Config, MistralConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    windowed = blueprint(MistralConfig(**sizes, vocab_size=320, sliding_window=8))
    one = Pass(tokens=256, wanted=128, longest=64, dtype="bfloat16")
    assert activations(windowed, one).kept > 256 * 64
    # Attention that caps its scores is the plain one: whole tables of 4 heads × 64 × 64 for each of 4 rows.
    capped = blueprint(Gemma2Config(**sizes, vocab_size=320, head_dim=16))
    assert activations(capped, one).kept > 2 * 4 * 4 * 64 * 64 * 2


def test_code_that_reads_values_cannot_be_planned(monkeypatch):
    import transformers

    def peeking(*_, **__):
        return torch.zeros(1, device="meta").item()

    monkeypatch.setattr(transformers.models.qwen2.modeling_qwen2.Qwen2MLP, "forward", peeking)
    with pytest.raises(BadInput, match="reads values as it runs"):
        _ = activations(tiny(vocab=352), a_pass())


@pytest.mark.parametrize("tokens", [1, 1000, 1766, 1767, 16384, 131_072, 500_000])
@pytest.mark.parametrize("vocab", [320, 32_000, 151_936])
def test_the_stand_in_for_the_head_takes_blocks_as_wide(tokens, vocab):
    hidden, weight = torch.empty(tokens, 8, device="meta"), torch.empty(vocab, 8, device="meta")
    widest = max(block.stop - block.start for block in scores._blocks(hidden, weight))
    assert block_width(tokens, vocab, "cuda") == widest


def test_the_meter_counts_storages_once_and_lets_them_go():
    known = torch.empty(10, device="meta")
    with Meter([known]) as meter:
        one = torch.empty(100, device="meta")
        view = one[:50]
        known.add_(1)
        assert meter.live == 400
        two = one + 1
        del one
        assert (meter.live, meter.peak) == (800, 800)
        del view, two
        assert (meter.live, meter.peak) == (0, 800)


def test_a_mixture_of_experts_is_planned_too():
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = blueprint(Qwen3MoeConfig(**sizes, vocab_size=320, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32))
    assert activations(experts, a_pass()).training > activations(experts, a_pass()).kept > 0
    assert outline(experts).parameters > 0
