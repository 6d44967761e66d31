"""A process that has an SGLang engine, says so, and waits to be killed."""

import sys
import time

from rft.engines.sglang import build
from rft.models import find_model
from rft.parallel.world import open_world
from tests.engines.sglang.test_contract import SPEC

if __name__ == "__main__":
    engine = build(SPEC, find_model(sys.argv[1]), open_world(1, timeout_s=60))
    print(engine._group.pid, flush=True)
    time.sleep(600)
