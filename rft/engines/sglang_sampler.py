"""SGLang's sampler, exchanged for one that draws from and reports the same distribution, by each request's own seed.

SGLang's own reports log-probs before top-k and top-p have cut the distribution, and takes a request's seed in its deterministic mode
alone, which costs speed everywhere else. It has a place where other samplers are registered; this one takes the name of its plainest,
which is the one that it allows everywhere.
"""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from rft.engines.sampling import invert

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

NAME = "pytorch"
"""Of the sampler, among SGLang's."""
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""The constants of splitmix64, as signed numbers."""


def register() -> None:
    """Tells SGLang of the sampler, in this process."""
    from sglang.srt.layers.sampler import register_sampler_backend

    register_sampler_backend(NAME, _make)


def carry_seeds() -> None:
    """Lets the seed of every request reach the sampler, which SGLang does in its deterministic mode alone."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    original: Any = SamplingBatchInfo.from_schedule_batch

    def with_seeds(cls: object, batch: Any, vocab_size: int) -> "SamplingBatchInfo":
        del cls
        info = original(batch, vocab_size)
        info.sampling_seed = torch.tensor([request.sampling_params.sampling_seed or 0 for request in batch.reqs]).to(batch.device)
        return info

    setattr(SamplingBatchInfo, "from_schedule_batch", classmethod(with_seeds))  # noqa: B010 (SGLang's, and declared otherwise there)


def _make() -> Any:
    from sglang.srt.layers.sampler import Sampler

    class SeededSampler(Sampler):
        """See the module's head."""

        def forward(
            self,
            logits_output: Any,
            sampling_info: "SamplingBatchInfo",
            return_logprob: bool,
            top_logprobs_nums: list[int],
            token_ids_logprobs: list[Any],
            positions: Tensor,
            **unused: object,
        ) -> Tensor:
            del unused
            logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
            logprobs = distribution(logits, sampling_info)
            tokens = logits.argmax(-1) if sampling_info.is_all_greedy else _drawn(logprobs, sampling_info, positions)
            if return_logprob:
                found = self.output_logprob_processor.compute_logprobs(logprobs, top_logprobs_nums, token_ids_logprobs, tokens)
                found.write_output_to(logits_output)
            return tokens

    return SeededSampler()


def distribution(logits: Float[Tensor, "row vocab"], info: "SamplingBatchInfo") -> Float32[Tensor, "row vocab"]:
    """log p that each row's token is drawn from, as `Sampling` describes it; of greedy rows, the model's own at temperature 1."""
    if info.is_all_greedy:
        return logits.float().log_softmax(-1)
    scaled = logits.float() / info.temperatures
    if info.need_min_p_sampling:
        least = scaled.max(-1, keepdim=True).values + info.min_ps[:, None].log()
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if info.need_top_k_sampling or info.need_top_p_sampling:
        scaled = _cut(scaled, info.top_ks, info.top_ps)
    return scaled.log_softmax(-1)


def uniforms_at(seeds: Int64[Tensor, "row"], positions: Int64[Tensor, "row"]) -> Float64[Tensor, "row"]:
    """A random number in [0, 1) for each seed and position, which depends on nothing else: any step of any batch can have it alone.

    Two rounds of splitmix64's finalizer, with the position added after the first one.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, https://doi.org/10.1145/2660193.2660195
    """
    mixed = _mix(_mix(seeds + GOLDEN) + (positions + 1) * GOLDEN)
    return _shifted(mixed, 11).double() * 2.0**-53


def _drawn(logprobs: Float32[Tensor, "row vocab"], info: "SamplingBatchInfo", positions: Tensor) -> Int64[Tensor, "row"]:
    assert info.sampling_seed is not None, "see carry_seeds"
    return invert(logprobs.exp(), uniforms_at(info.sampling_seed, positions.long()))


def _cut(logits: Float32[Tensor, "row vocab"], top_ks: Tensor, top_ps: Tensor) -> Float32[Tensor, "row vocab"]:
    """Sets to −∞ what lies outside of a row's `top_k` most likely tokens, and then of the smallest set whose mass reaches `top_p`."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[1], device=logits.device)
    _ = ordered.masked_fill_(ranks >= top_ks[:, None], -torch.inf)
    mass = ordered.softmax(-1)
    before = mass.cumsum(-1) - mass
    _ = ordered.masked_fill_((before >= top_ps[:, None]) & (ranks > 0) & (top_ps[:, None] < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _mix(z: Int64[Tensor, "row"]) -> Int64[Tensor, "row"]:
    z = (z ^ _shifted(z, 30)) * FIRST
    z = (z ^ _shifted(z, 27)) * SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Int64[Tensor, "row"], bits: int) -> Int64[Tensor, "row"]:
    """To the right, with zeros coming in."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
