class Logprob:
    logprob: float
