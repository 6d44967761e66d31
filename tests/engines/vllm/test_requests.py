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
    from vllm.v1.outputs import LogprobsLists

    usual = LogprobsProcessor._update_sample_logprobs, LogprobsLists.slice_request
    noted = [FlatLogprobs(), FlatLogprobs()]
    with sparing():
        update: Any = LogprobsProcessor._update_sample_logprobs
        for logprobs, rows in (([[-0.5], [-0.75]], None), ([[-1.25], [-1.5], [-1.75]], [0, 2])):  # two tokens for the first response
            step = LogprobsLists(np.zeros((len(logprobs), 1)), np.array(logprobs, dtype=np.float32), np.zeros(len(logprobs)), rows)
            for row, response in enumerate(noted):
                count = 1 if rows is None or row else 2
                update(SimpleNamespace(logprobs=response), step.slice_request(row, count))
        assert step.slice_request(0, 2).slice_request(0, 1) == [-1.25]
    assert [response.logprobs for response in noted] == [[-0.5, -1.25, -1.5], [-0.75, -1.75]]
    assert not noted[0].token_ids
    assert (LogprobsProcessor._update_sample_logprobs, LogprobsLists.slice_request) == usual
