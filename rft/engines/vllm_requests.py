"""What vLLM is asked for, and what it says, request by request."""

import contextlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from rft.engines.protocol import Completion, Request
from rft.engines.vllm_host import replaced
from rft.errors import EngineFailed
from rft.sampling import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

CHARACTER = 4
"""Tokens that a character may be cut into, at most: bytes."""
CUT = "\ufffd"
"""What the tokenizer shows of a part of a character."""


def parameters(request: Request, sampling: Sampling, ends: Sequence[int], tokenizer: Any) -> "SamplingParams":
    """vLLM's of one request."""
    from vllm import SamplingParams

    stop = list(sampling.stop) if sampling.stop and _ends_whole(request.tokens, tokenizer) else []
    made = SamplingParams(
        temperature=1.0 if sampling.temperature else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_new_tokens,
        seed=request.seed,
        logprobs=0,
        stop=stop,
        stop_token_ids=[*ends, *sampling.stop_tokens],
        ignore_eos=True,
        detokenize=bool(stop),
    )
    # Set afterwards: the constructor refuses what is above 2 and lifts what is below 0.01, and the sampler takes any. These are
    # made for one request, so vLLM need not copy them, which would go through the constructor again.
    made.temperature = sampling.temperature
    made.skip_clone = True
    made.flat_logprobs = True  # a list of numbers, instead of a dictionary of records for each token
    return made


@contextlib.contextmanager
def sparing() -> Generator[None]:
    """While vLLM samples what `parameters` asks for: it notes the log-prob of each token, and nothing of what else it keeps beside it.

    It goes through every response in every step on the one thread that also launches the next step's kernels. A version of vLLM that
    does not let itself be spared does all of it.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    step = _Step()

    def of_one(lists: Any, row: int, count: int) -> "_Numbers":
        return step.of_one(lists, row, count)

    def note(processor: Any, numbers: "_Numbers") -> None:
        processor.logprobs.logprobs.extend(numbers)

    with contextlib.ExitStack() as stack:
        if hasattr(LogprobsProcessor, "_update_sample_logprobs") and hasattr(LogprobsLists, "slice_request"):
            _ = stack.enter_context(replaced(LogprobsProcessor, "_update_sample_logprobs", note))
            _ = stack.enter_context(replaced(LogprobsLists, "slice_request", of_one))
        yield


class _Numbers(list[float]):
    """The log-probs of a response's new tokens, as vLLM hands them on."""

    def slice_request(self, first: int, count: int) -> "_Numbers":
        """As `LogprobsLists` has it."""
        return _Numbers(self[first : first + count])


class _Step:
    """The log-probs of all responses in the step that vLLM is going through."""

    def __init__(self) -> None:
        self._lists: Any = None
        self._numbers: list[float] = []

    def of_one(self, lists: Any, row: int, count: int) -> _Numbers:
        """Those of the response in a row, which has `count` new tokens."""
        if lists is not self._lists:
            self._lists, self._numbers = lists, lists.logprobs[:, 0].tolist()
        first = row if lists.cu_num_generated_tokens is None else lists.cu_num_generated_tokens[row]
        return _Numbers(self._numbers[first : first + count])


def completion(output: "RequestOutput") -> Completion:
    """What vLLM sampled. Raises `EngineFailed` for a response that it broke off."""
    sampled = output.outputs[0]
    if sampled.finish_reason not in ("stop", "length"):
        raise EngineFailed(f"vLLM ended a response for the reason {sampled.finish_reason!r}; recover(state) leads on")
    # There is one for each token: none beside that of the sampled one was asked for.
    logprobs: Any = sampled.logprobs
    return Completion(tokens=tuple(sampled.token_ids), logprobs=tuple(map(float, logprobs.logprobs)), finish=sampled.finish_reason)


def _ends_whole(prompt: Sequence[int], tokenizer: Any) -> bool:
    """Whether a prompt ends with a whole character.

    vLLM makes the text of a response out of the prompt's last character on, if that is not whole, and would find stop strings in the
    prompt. Without them the response goes on, and is cut afterwards, where it really has one.
    """
    text: str = tokenizer.decode(list(prompt[-2 * CHARACTER :]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return not text.endswith(CUT)
