'''What every rollout engine has to do: the same tests for each, the library's own and yours, against transformers' forward pass in fp32.

    from rft.testing.engines import MAX_MODEL_LEN, EngineContract, folder, module, other, tokenizer

    @pytest.fixture(scope="module")
    def engine(folder):
        engine = my_engine.build(folder, dtype="float32", max_model_len=MAX_MODEL_LEN)
        yield engine
        engine.close()

    class TestMyEngine(EngineContract):
        """All of it."""

`folder` is a tiny model's, which `module` is by transformers; `other` has other weights. The engine is an `rft.engines.protocol.Engine`
in fp32 with room for 256 tokens. For an engine with another model, override the four fixtures and the attributes of `Contract`. Its parts:

    sampling     greedy tokens, log-probs under the distribution sampled from, seeds, stops, lengths; requests that are refused
    loading      whole sets of weights and others, checksums, casts, tied heads, prefix caches
    sleeping     sleep and wake, what is refused in between, memory
    broadcasts   the same by states and steps: broadcasts that are whole, come again, or fail half-way; samples and seeds
    ranks        on several ranks: `check_ranks`, called by a script under torchrun
    seeing       with images: `SeeingContract`, for an engine of a model that takes some; it has fixtures of its own

What an engine says is checked where users read it: `rft.engines.requests.check_requests` refuses requests in the words that are looked
for; a verb that is called too early names the one that is missing ("load", "wake_weights", "wake_cache"); an engine that cannot keep its
weights says "keep". One that leaves stop strings to the library sets `stops_at_texts = False` in its test class. That `checksums` are read
from memory, and not remembered, is not seen from here.

`pytest.register_assert_rewrite("rft.testing.engines")` in a conftest.py has pytest show the values of what fails.
'''

from rft.testing.engines.base import Contract, folder, module, other, tokenizer
from rft.testing.engines.broadcasts import Sender, StateContract, engine_launch, prompts_of, responses
from rft.testing.engines.loading import LoadingContract
from rft.testing.engines.oracle import (
    END,
    GREEDY,
    LONG,
    MAX_MODEL_LEN,
    PROMPTS,
    distribution,
    expected_logprobs,
    greedy,
    is_close,
    requests,
    wake_with,
    weights,
)
from rft.testing.engines.ranks import check_ranks
from rft.testing.engines.sampling import SamplingContract
from rft.testing.engines.sleeping import SleepingContract

__all__ = [
    "END",
    "GREEDY",
    "LONG",
    "MAX_MODEL_LEN",
    "PROMPTS",
    "Contract",
    "EngineContract",
    "SamplingContract",
    "Sender",
    "SleepingContract",
    "StateContract",
    "LoadingContract",
    "check_ranks",
    "distribution",
    "engine_launch",
    "expected_logprobs",
    "folder",
    "greedy",
    "is_close",
    "module",
    "other",
    "prompts_of",
    "requests",
    "responses",
    "tokenizer",
    "wake_with",
    "weights",
]


class EngineContract(SamplingContract, LoadingContract, SleepingContract, StateContract):
    """All of it; see the module's head."""
