"""The side-by-side run of `examples/compare.py` with a reward that a model without sense gets too: compare_ranks.py ARGUMENTS."""

import dataclasses as dc

import compare
import job

import rft


def by_bytes(sample: rft.Sample) -> float:
    """Something that differs between responses."""
    return sum(sample.response.encode()) % 7 / 7


if __name__ == "__main__":
    job.main(compare.Compare, lambda given: dc.replace(compare.task(given), reward=by_bytes), compare.perform)
