"""What vLLM keeps of a response while it samples."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rft.engines.vllm_requests import sparing


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_it_notes_the_log_prob_that_was_asked_for_and_nothing_beside_it() -> None:
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    noted, usual = FlatLogprobs(), LogprobsProcessor._update_sample_logprobs
    processor: Any = SimpleNamespace(logprobs=noted)
    with sparing():
        update: Any = LogprobsProcessor._update_sample_logprobs
        for step in ([[-0.5]], [[-1.25], [-2.0]]):
            update(processor, SimpleNamespace(logprobs=np.array(step, dtype=np.float32)))
    assert noted.logprobs == [-0.5, -1.25, -2.0]
    assert not noted.token_ids
    assert LogprobsProcessor._update_sample_logprobs is usual
