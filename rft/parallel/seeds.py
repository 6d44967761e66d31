"""Seeds of sampled responses: the same whatever the rank, the world size, or the batch that a prompt came in."""

import hashlib


def seed_of(*, run: int, epoch: int, prompt: int, draw: int, sample: int) -> int:
    """A 63-bit seed for one response; any two that differ in one of the five numbers are unrelated (BLAKE2b)."""
    text = f"{run}/{epoch}/{prompt}/{draw}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
