"""Which rollouts are of this Actor: version numbers begin again from a checkpoint's, for other weights than those that came after it.

An Actor descends through branches: one begins at each launch and each restore, and ends, for what goes on from it, at the version of the
checkpoint that was restored. Rollouts are of this Actor if all that they are made of was sampled on its branches, before they ended.
"""

import math
import re
from collections.abc import Mapping

from rft.experience import Rollouts
from rft.state import BatchId, PolicyVersion

NAMED = re.compile(r"\d+@\d+ v(\d+) of (\w+)-\d+")
"""A batch, by its version and its branch; an assembled one has the names of its parts in its own."""


class Lineage:
    """Names the batches of one rank of a launch, and knows where others come from. `branch` is its own alone, and alike on all ranks."""

    def __init__(self, rank: int, branch: str) -> None:
        self._rank, self._branch = rank, branch
        self._ends: dict[str, float] = {branch: math.inf}
        self.count = 0
        """Batches so far, of this launch and of those that it goes on from."""

    def next_batch(self, generation: int, version: PolicyVersion) -> BatchId:
        """The name of a new one, sampled from a version."""
        self.count += 1
        return BatchId(f"{self.count}@{generation} v{version} of {self._branch}-{self._rank}")

    def at(self, version: PolicyVersion) -> dict[str, int]:
        """The branches of the Actor of that version, with the last version on each: what a checkpoint keeps."""
        return {branch: version if end == math.inf else int(end) for branch, end in self._ends.items()}

    def go_on(self, ends: Mapping[str, int], branch: str, count: int) -> None:
        """The Actor is one that a checkpoint kept, and begins a new branch."""
        self._branch, self._ends = branch, {**ends, branch: math.inf}
        self.count = max(self.count, count)

    def is_of_another(self, rollouts: Rollouts) -> bool:
        """Whether some were sampled from weights that this Actor never had. What was named by hand is taken for its own."""
        return any(int(version) > self._ends.get(branch, -1) for version, branch in NAMED.findall(rollouts.batch))
