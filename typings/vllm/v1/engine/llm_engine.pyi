from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.output_processor import OutputProcessor

class LLMEngine:
    engine_core: InprocClient
    output_processor: OutputProcessor
    def abort_request(self, request_ids: list[str], internal: bool = ...) -> None: ...
