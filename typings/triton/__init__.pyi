from collections.abc import Callable
from typing import Any

def jit(fn: Callable[..., Any]) -> Any: ...
