"""New weights: what a whole set is, what is said of one that is not, and that nothing of older ones is served."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from rft.engines.protocol import WHOLE, Engine
from rft.errors import EngineFailed, SyncFailed
from rft.sampling import Sampling
from rft.testing.engines.base import Contract
from rft.testing.engines.oracle import GREEDY, expected_logprobs, is_close, requests, wake_with, weights

Fault = Literal["missing", "surplus", "misnamed", "shape", "twice"]
"""What may be wrong with a set of weights."""
FAULTS: tuple[Fault, ...] = ("missing", "surplus", "misnamed", "shape", "twice")


def faulty(whole: Mapping[str, Tensor], fault: Fault) -> list[tuple[str, Tensor]]:
    """A set of weights with a fault in its last tensor."""
    *most, (name, tensor) = whole.items()
    last = {
        "missing": [],
        "surplus": [(name, tensor), ("model.extra", tensor)],
        "misnamed": [("model.extra", tensor)],
        "shape": [(name, tensor.new_zeros(tensor.numel() + 1))],
        "twice": [(name, tensor), (name, tensor)],
    }
    return [*most, *last[fault]]


class LoadingContract(Contract):
    """See the module's head."""

    def test_new_weights_are_used(self, engine: Engine, module: Any, other: Any) -> None:
        """Among them tied heads, which come once: the scores would be those of the old head else."""
        before = engine.checksums()
        received = engine.load(iter(weights(other).items()))
        engine.flush()
        assert received == engine.checksums()
        assert received.keys() == before.keys()
        for prompt, scores in zip(self.prompts, engine.score(self.prompts), strict=True):
            assert is_close(scores, expected_logprobs(other, prompt[:1], prompt[1:], Sampling()), 1e-5)
        assert [c.tokens for c in engine.generate(requests(*self.prompts), GREEDY)] == self.all_greedy(other)
        assert engine.load(iter(weights(module).items())) == before

    def test_weights_that_come_again_change_nothing(self, engine: Engine, module: Any) -> None:
        first, sums = engine.generate(requests(*self.prompts), GREEDY), engine.checksums()
        for _ in range(2):
            assert engine.load(iter(weights(module).items())) == engine.checksums() == sums
            engine.flush()
            assert engine.generate(requests(*self.prompts), GREEDY) == first

    def test_a_tied_tensor_may_come_under_its_other_name(self, engine: Engine, module: Any) -> None:
        """Where the model has tied heads, under the names that transformers gives them."""
        renamed = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in weights(module).items()}
        assert engine.load(iter(renamed.items())) == engine.checksums()
        engine.flush()
        assert engine.generate(requests(*self.prompts), GREEDY)[0].tokens == self.greedy(module, self.prompts[0])

    def test_an_update_that_was_held_back_shows(self, engine: Engine, module: Any, other: Any) -> None:
        old, new = weights(module), weights(other)
        sent = engine.load(iter(new.items()))
        for held in (next(iter(new)), list(new)[len(new) // 2], list(new)[-1]):
            _ = engine.load(iter({**new, held: old[held]}.items()))
            assert _changed(sent, engine.checksums()) in ({held}, {WHOLE})
        _ = engine.load(iter(old.items()))
        assert _changed(sent, engine.checksums()) == sent.keys()

    def test_any_float_dtype_is_cast(self, engine: Engine, module: Any) -> None:
        rounded = weights(module, torch.bfloat16)
        received = engine.load(iter(rounded.items()))
        assert received == engine.checksums()
        assert received == engine.load((name, tensor.double()) for name, tensor in rounded.items())

    def test_what_it_casts_to_may_be_cast_before(self, engine: Engine, module: Any) -> None:
        """A sender that casts first, so that fewer bytes travel, changes nothing."""
        exact, dtype = {name: tensor.double() / 3 for name, tensor in weights(module).items()}, engine.casts_to or torch.float64
        assert engine.load(iter(exact.items())) == engine.load((name, tensor.to(dtype)) for name, tensor in exact.items())

    def test_the_prefix_cache_ends_with_its_weights(self, engine: Engine, other: Any) -> None:
        """The prefix is long enough to be cached, and has just been computed with the old weights."""
        _ = engine.generate(requests(self.long), GREEDY)
        _ = engine.load(iter(weights(other).items()))
        engine.flush()
        assert engine.generate(requests(self.long), GREEDY)[0].tokens == self.greedy(other, self.long)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_set_that_is_not_whole(self, engine: Engine, module: Any, fault: Fault) -> None:
        """It is named what is wrong; the stream is taken to its end, since other ranks take part in it; and nothing is generated."""
        sent, given = faulty(weights(module), fault)[::-1], list[str]()

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in sent:
                given.append(name)
                yield name, tensor

        with pytest.raises(SyncFailed, match=rf"model\.extra|{list(weights(module))[-1]}"):
            _ = engine.load(stream())
        assert len(given) == len(sent)
        with pytest.raises(EngineFailed, match="load"):
            _ = engine.generate(requests(*self.prompts), GREEDY)

    def test_a_stream_that_fails(self, engine: Engine, module: Any) -> None:
        def stream() -> Iterator[tuple[str, Tensor]]:
            yield from list(weights(module).items())[: len(weights(module)) // 2]
            raise ConnectionError("a rank is gone")

        with pytest.raises(ConnectionError, match="a rank is gone"):
            _ = engine.load(stream())
        with pytest.raises(EngineFailed):
            _ = engine.generate(requests(*self.prompts), GREEDY)
        wake_with(engine, module)
        assert engine.generate(requests(*self.prompts), GREEDY)[0].tokens == self.greedy(module, self.prompts[0])


def _changed(before: Mapping[str, int], after: Mapping[str, int]) -> set[str]:
    return {name for name, value in after.items() if value != before[name]}
