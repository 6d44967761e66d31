"""The table of steps as text and as a Mermaid diagram, read from the steps' own annotations."""

from collections.abc import Sequence

from rft.ledger import TABLE, Edge, Joint
from rft.ledger.table import needs
from rft.state import AXES


def rows_of_the_library() -> tuple[Edge, ...]:
    """The library's own rows, in the order of their definition."""
    return tuple(edge for (module, _), edge in TABLE.items() if module == "rft.steps")


def as_text(edges: Sequence[Edge]) -> str:
    """One line a step, as a Markdown table: what it needs of each axis, and what it makes of it."""
    lines = ["| step | from | to |", "| --- | --- | --- |"]
    for edge in edges:
        start = "–" if edge.kind == "beginning" else needs(edge)
        end = "a value" if edge.kind == "observation" else _result(edge)
        lines.append(f"| `{edge.name}` | {start} | {end} |")
    return "\n".join(lines)


def as_mermaid(edges: Sequence[Edge]) -> str:
    """The four axes as state diagrams: an arrow for each step that moves an axis, a note for each that needs one and leaves it."""
    return "\n".join(["stateDiagram-v2", *(line for axis in range(len(AXES)) for line in _axis_diagram(edges, axis))])


def reachable(edges: Sequence[Edge], start: Joint) -> dict[Joint, tuple[Edge, ...]]:
    """Every joint state of the axes that transitions lead to from `start`, with the transitions that leave it."""
    found, waiting = dict[Joint, tuple[Edge, ...]](), [start]
    while waiting:
        here = waiting.pop()
        if here not in found:
            found[here] = tuple(e for e in edges if e.kind in ("transition", "recovery", "restoration") and e.allows(here))
            waiting += [edge.apply(here) for edge in found[here]]
    return found


def _result(edge: Edge) -> str:
    axes = ["same" if becomes is None else becomes.__name__ for becomes in edge.after]
    return "[" + ", ".join(axes) + "]" + (f" and {edge.more}" if edge.more else "")


def _axis_diagram(edges: Sequence[Edge], axis: int) -> list[str]:
    name, both = AXES[axis]
    lines = [f"  state {name} {{"]
    for edge in edges:
        becomes = edge.after[axis]
        if edge.kind == "beginning" and becomes is not None:
            lines.append(f"    [*] --> {becomes.__name__}: {edge.name}")
        elif becomes is not None and edge.before[axis] != frozenset([becomes]):
            lines += [f"    {start.__name__} --> {becomes.__name__}: {edge.name}" for start in both if start in edge.before[axis]]
    for value in both:
        needing = [e.name for e in edges if e.before[axis] == frozenset([value]) and e.after[axis] in (None, value)]
        if needing:
            lines += [f"    note right of {value.__name__}: needed by {', '.join(needing)}"]
    return [*lines, "  }"]
