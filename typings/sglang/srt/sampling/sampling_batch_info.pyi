from torch import Tensor

class SamplingBatchInfo:
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    is_all_greedy: bool
    need_top_k_sampling: bool
    need_top_p_sampling: bool
    need_min_p_sampling: bool
    sampling_seed: Tensor | None

    @classmethod
    def from_schedule_batch(cls, batch: object, vocab_size: int) -> SamplingBatchInfo: ...
