"""Sleep and wake, what an engine refuses in between, and its memory."""

from typing import Any

import pytest

from rft.engines.protocol import Engine, Keeping
from rft.errors import EngineFailed
from rft.testing.engines.base import Contract
from rft.testing.engines.oracle import GREEDY, requests, weights


class SleepingContract(Contract):
    """See the module's head."""

    def test_sleep_and_wake_any_number_of_times(self, engine: Engine, module: Any) -> None:
        """Bit by bit what it said before. Among what must come back are buffers that no checkpoint has."""
        first = engine.generate(requests(*self.prompts), GREEDY)
        for how in self._ways(engine, "release", "keep", "keep", "release", "release"):
            engine.sleep(how)
            engine.sleep(how)
            engine.wake_weights()
            engine.wake_weights()
            if how == "release":
                assert engine.load(iter(weights(module).items())) == engine.checksums()
            engine.wake_cache()
            engine.wake_cache()
            assert engine.generate(requests(*self.prompts), GREEDY) == first

    def test_asleep_means_asleep(self, engine: Engine, module: Any) -> None:
        for how in self._ways(engine, "keep", "release"):
            engine.sleep(how)
            with pytest.raises(EngineFailed, match="wake"):
                _ = engine.generate(requests(*self.prompts), GREEDY)
        with pytest.raises(EngineFailed, match="wake_weights"):
            _ = engine.score(self.prompts)
        with pytest.raises(EngineFailed, match="wake_weights"):
            _ = engine.load(iter(weights(module).items()))
        with pytest.raises(EngineFailed, match="wake_weights"):
            _ = engine.checksums()

    def test_awake_without_weights_is_not_awake(self, engine: Engine) -> None:
        """In whichever order it is woken."""
        engine.sleep("release")
        engine.wake_cache()
        with pytest.raises(EngineFailed, match="wake_weights"):
            _ = engine.generate(requests(*self.prompts), GREEDY)
        engine.wake_weights()
        for call in (lambda: engine.generate(requests(*self.prompts), GREEDY), lambda: engine.score(self.prompts)):
            with pytest.raises(EngineFailed, match="load first"):
                _ = call()

    def test_new_weights_while_the_cache_sleeps(self, engine: Engine, other: Any) -> None:
        engine.sleep("release")
        engine.wake_weights()
        _ = engine.load(iter(weights(other).items()))
        engine.flush()
        with pytest.raises(EngineFailed, match="wake_cache"):
            _ = engine.generate(requests(*self.prompts), GREEDY)
        engine.wake_cache()
        assert engine.generate(requests(*self.prompts), GREEDY)[0].tokens == self.greedy(other, self.prompts[0])

    def test_keeping_the_weights_where_that_can_be_done(self, engine: Engine) -> None:
        """An engine that cannot says so, and is as it was."""
        first = engine.generate(requests(*self.prompts), GREEDY)
        if engine.keeps is None:
            with pytest.raises(EngineFailed, match="keep"):
                engine.sleep("keep")
            assert engine.generate(requests(*self.prompts), GREEDY) == first
        else:
            engine.sleep("keep")
            engine.sleep("release")
            assert engine.memory().mapped == 0
            engine.wake_weights()
            engine.wake_cache()
            with pytest.raises(EngineFailed, match="load first"):
                _ = engine.generate(requests(*self.prompts), GREEDY)

    def test_memory(self, engine: Engine, module: Any) -> None:
        whole = engine.memory()
        assert whole.mapped == whole.weights + whole.cache
        assert whole.weights >= sum(tensor.nbytes for tensor in weights(module).values())
        for how in self._ways(engine, "keep"):
            engine.sleep(how)
            assert engine.memory().mapped == (whole.weights if engine.keeps == "device" else 0)
        engine.sleep("release")
        assert engine.memory().mapped == 0
        engine.wake_weights()
        assert engine.memory().mapped == whole.weights

    def _ways(self, engine: Engine, *ways: Keeping) -> list[Keeping]:
        return [how for how in ways if how == "release" or engine.keeps is not None]
