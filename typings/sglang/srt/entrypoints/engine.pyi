import asyncio
from collections.abc import Callable, Sequence
from typing import Any

class Engine:
    loop: asyncio.AbstractEventLoop
    tokenizer_manager: Any
    server_args: Any
    run_scheduler_process_func: Callable[..., None]

    def __init__(self, **options: Any) -> None: ...
    def generate(
        self,
        *,
        input_ids: Sequence[Sequence[int]],
        sampling_params: Any,
        return_logprob: bool,
        logprob_start_len: int,
    ) -> Any: ...
    def get_server_info(self) -> dict[str, Any]: ...
    def collective_rpc(self, method: str, **parameters: Any) -> None: ...
    def release_memory_occupation(self, tags: list[str] | None = None) -> object: ...
    def resume_memory_occupation(self, tags: list[str] | None = None) -> object: ...
