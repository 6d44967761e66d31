from vllm.logprobs import FlatLogprobs, Logprob

class CompletionOutput:
    token_ids: list[int]
    logprobs: FlatLogprobs
    finish_reason: str | None

class RequestOutput:
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob]]
