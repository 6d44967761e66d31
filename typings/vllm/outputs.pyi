from vllm.logprobs import Logprob

class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str | None

class RequestOutput:
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob]]
