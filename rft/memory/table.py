"""A plan as a person reads it."""

from rich.console import Console
from rich.table import Table

from rft.memory.plan import Plan

GIB = 1 << 30
ORDER = (
    "actor weights", "engine weights", "reference weights", "critic weights", "ema weights", "gathered weights", "cache",
    "CUDA graphs, buffers", "optimizer", "critic optimizer", "gradients", "activations", "experience", "sync bucket",
    "kept by the allocator", "context",
)  # fmt: skip


def rendered(plan: Plan, *, width: int = 140) -> str:
    """The table of phases and rows in GiB, and whether it fits."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(_table(plan))
        console.print(_verdict(plan), soft_wrap=True)
    return capture.get().rstrip()


def _table(plan: Plan) -> Table:
    table = Table("GiB", *(phase.name for phase in plan.phases))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in _rows(plan):
        table.add_row(row, *(_gib(phase.rows[row]) if row in phase.rows else "" for phase in plan.phases))
    table.add_section()
    table.add_row("in all", *(_gib(phase.total) for phase in plan.phases))
    return table


def _rows(plan: Plan) -> list[str]:
    found = dict.fromkeys(row for phase in plan.phases for row in phase.rows)
    rewards = sorted(row for row in found if row not in ORDER)
    place = ORDER.index("ema weights")
    return [row for row in (*ORDER[:place], *rewards, *ORDER[place:]) if row in found]


def _verdict(plan: Plan) -> str:
    peak, card = plan.peak, plan.device_bytes
    spare = card - peak.total
    lines = [
        f"peak: {_gib(peak.total)} GiB, in {peak.name}; the device has {_gib(card)} GiB: "
        + (f"it fits, with {_gib(spare)} GiB to spare" if spare >= 0 else f"{_gib(-spare)} GiB are missing")
    ]
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in plan.host.items()) or "nothing"
    ranks = f" on each of {plan.ranks_per_host} ranks, {_gib(plan.pinned)} in all" if plan.ranks_per_host > 1 else ""
    lines.append(f"pinned on the host, in GiB: {parts}{ranks}")
    if plan.host_bytes is not None:
        over = plan.pinned - plan.host_bytes
        lines[-1] += f"; the host has {_gib(plan.host_bytes)}" + (f": {_gib(over)} are missing" if over > 0 else "")
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"
