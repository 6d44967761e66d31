"""A whole job with vLLM, an adapter sent alone beside merged weights."""

import dataclasses as dc
from pathlib import Path

import pytest

from rft.spec import VLLMEngine
from rft.testing.engines import MAX_MODEL_LEN, folder
from tests.engines.lora_contract import LORA, same_job
from tests.engines.lora_cycle import cycle

__all__ = ["folder"]

_ = pytest.importorskip("peft")


@pytest.mark.slow
def test_a_job_that_sends_the_adapter_alone(folder: Path) -> None:
    spec = VLLMEngine(dtype="float32", max_model_len=MAX_MODEL_LEN, max_rows=16, cache_bytes=1 << 26)
    same_job(cycle(folder, spec, LORA), cycle(folder, spec, dc.replace(LORA, sync="merged")))
