"""For tests of your own steps, loops and engines: a scripted runtime, and a random walk over every state and step."""

from rft.engines.faults import Faults, InjectedFault
from rft.testing.calls import LIBRARY, SAMPLING, Arguments, Call, Refusals, Stash
from rft.testing.scripted import (
    Company,
    scripted_average,
    scripted_devices,
    scripted_launch,
    scripted_minibatch,
    scripted_prompts,
    scripted_roles,
    scripted_snapshot,
)
from rft.testing.walk import RuntimeWalk, walk

__all__ = [
    "LIBRARY",
    "SAMPLING",
    "Arguments",
    "Call",
    "Company",
    "Faults",
    "InjectedFault",
    "Refusals",
    "RuntimeWalk",
    "Stash",
    "scripted_average",
    "scripted_devices",
    "scripted_launch",
    "scripted_minibatch",
    "scripted_prompts",
    "scripted_roles",
    "scripted_snapshot",
    "walk",
]
