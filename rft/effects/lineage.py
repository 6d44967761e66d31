"""Which rollouts are of this Actor: a restore takes back what came after its checkpoint, and version numbers begin again from there."""

import re
import secrets

from rft.experience import Rollouts
from rft.state import BatchId, PolicyVersion

NAMED = re.compile(r"(\d+)@\d+ of (\w+)")
"""A batch, by its number and its launch; an assembled one has the names of its parts in its own."""


class Lineage:
    """Names the batches of one launch, and knows those that a restore took back."""

    def __init__(self) -> None:
        self._launch = secrets.token_hex(3)
        self.count = 0
        """Batches so far, of this launch and of those that it goes on from."""
        self._rewound = list[tuple[int, PolicyVersion]]()

    def next_batch(self, generation: int) -> BatchId:
        """The name of a new one."""
        self.count += 1
        return BatchId(f"{self.count}@{generation} of {self._launch}")

    def rewind(self, version: PolicyVersion, count: int) -> None:
        """The Actor is that of `version` again, which `count` batches had led to."""
        self._rewound.append((self.count, version))
        self.count = max(self.count, count)

    def is_lost(self, rollouts: Rollouts) -> bool:
        """Whether some were sampled from weights that a restore has taken back since."""
        sampled = rollouts.versions[rollouts.sampled]
        newest = int(sampled.max()) if sampled.numel() else 0
        numbers = [int(number) for number, launch in NAMED.findall(rollouts.batch) if launch == self._launch]
        return any(number <= count and newest > version for number in numbers for count, version in self._rewound)
