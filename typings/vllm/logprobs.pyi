class Logprob:
    logprob: float

class FlatLogprobs:
    logprobs: list[float]
