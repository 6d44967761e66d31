from typing import Any

class TokenToKVPoolAllocator:
    def __init__(self, size: int, **options: Any) -> None: ...
