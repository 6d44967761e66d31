from typing import Any

from vllm import SamplingParams
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.output_processor import OutputProcessor

class LLMEngine:
    engine_core: InprocClient
    output_processor: OutputProcessor
    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams) -> str: ...
    def reset_encoder_cache(self) -> None: ...
    def abort_request(self, request_ids: list[str], internal: bool = ...) -> None: ...
