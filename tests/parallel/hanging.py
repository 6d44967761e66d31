"""Rank 1 waits where no signal handler of Python's can run, and rank 0 goes on to the next step: rank 0 gives up, and torchrun ends
rank 1. `torchrun hanging.py`."""

import datetime

import torch.distributed as dist

import rft
from rft.effects.runtime import runtime_of
from rft.parallel.last_words import last_words
from rft.parallel.world import open_world
from rft.testing import scripted_launch

world = open_world(1, timeout_s=300)
with scripted_launch(world=world, deadline_s=3.0) as state, last_words(runtime_of(state).lockstep.table):
    state = rft.broadcast(state)
    if world.rank:
        # As in a collective that a peer never joins; gloo itself would notice that the peer has gone.
        dist.distributed_c10d._get_default_store().wait(["what never comes"], datetime.timedelta(seconds=300))
    state = rft.wake(state)
