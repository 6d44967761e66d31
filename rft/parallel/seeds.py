"""Seeds of sampled responses: the same whatever the rank, the world size, or the batch that a prompt came in."""

import hashlib


def seed_of(*, run: int, epoch: int, prompt: int, draw: int, sample: int) -> int:
    """A 63-bit seed for one response; any two that differ in one of the five numbers are unrelated (BLAKE2b)."""
    return _seed(f"{run}/{epoch}/{prompt}/{draw}/{sample}")


def continued(seed: int) -> int:
    """The seed of the rest of a response that was begun with `seed`."""
    return _seed(f"{seed} continued")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
