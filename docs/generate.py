"""Writes `algorithms.md` beside this file from the docstrings: `python docs/generate.py`. A test holds the page to the code.

A docstring is one line, its formula as an indented block, prose, and last the paragraphs "Known as:" and "Source:".
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rft import loops
from rft.objectives import compositions
from rft.ops import (
    advantages,
    aggregation,
    controllers,
    corrections,
    entropy,
    kl,
    losses,
    normalisation,
    returns,
    scores,
    shaping,
    values,
)
from rft.sampling import Sampling

PAGE = Path(__file__).with_name("algorithms.md")
OPERATIONS: tuple[ModuleType, ...] = (
    advantages, returns, shaping, normalisation, losses, values, aggregation, kl, entropy, corrections, controllers, scores,
)  # fmt: skip
COMPOSITIONS: tuple[tuple[ModuleType, tuple[Callable[..., Any], ...]], ...] = (
    (
        compositions,
        (compositions.policy_loss, compositions.reference_kl, compositions.entropy_bonus, compositions.imitation, compositions.combined),
    ),
    (loops, (loops.collect_groups,)),
)
HEAD = """\
# Algorithms

<!-- Written by docs/generate.py from the docstrings: change those, and run it. -->

Every estimator, loss, regulariser and correction here is a pure function of tensors in `rft.ops`; `rft.objectives` composes them. Each is
held to numbers worked out by hand and to an independent naive loop (`tests/ops`). [examples/objectives.py](../examples/objectives.py)
writes the objectives of the usual algorithms as compositions of a few lines.

In the formulas t counts tokens, i responses; r_t = exp(new_t − old_t) is the ratio of the Actor's probability of the sampled token now to
that when the batch began, A the advantage. What stands outside of a mask is never read.
"""


class Entry(NamedTuple):
    """One function or class as the page shows it."""

    name: str
    signature: str
    title: str
    formulas: tuple[str, ...]
    prose: tuple[str, ...]
    known_as: str
    source: str


def entry(module: str, thing: Callable[..., Any]) -> Entry:
    """Reads a docstring."""
    text = inspect.getdoc(thing) or ""
    body, known_as, source = text, "", ""
    if "\nSource:" in body:
        body, source = body.rsplit("\nSource:", 1)
    if "\nKnown as:" in body:
        body, known_as = body.rsplit("\nKnown as:", 1)
    title, *paragraphs = [part for part in re.split(r"\n\s*\n", body.strip("\n")) if part.strip()]
    formulas = tuple(part for part in paragraphs if part.startswith("    "))
    prose = tuple(_line(part) for part in paragraphs if not part.startswith("    "))
    name = f"{module}.{thing.__name__}"
    return Entry(name, name + _arguments(thing), _line(title), formulas, prose, _line(known_as), _line(source))


def entries(module: ModuleType) -> list[Entry]:
    """All public functions of a module, in the order in which they stand there."""
    own = [f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__ and name[0] != "_"]
    return [entry(_short(module), function) for function in own]


def aliases(known_as: str) -> Iterator[tuple[str, str]]:
    """(system, its name) of a "Known as:" paragraph."""
    for part in re.split(r";\s+", known_as.rstrip(".")):
        system, _, name = part.strip().partition(" ")
        if name:
            yield system, name


def page() -> str:
    """The whole page."""
    sections = [(_short(m), _line((m.__doc__ or "").split("\n\n")[0]), entries(m)) for m in OPERATIONS]
    sections += [(_short(m), _line((m.__doc__ or "").split("\n\n")[0]), [entry(_short(m), f) for f in fs]) for m, fs in COMPOSITIONS]
    sections.append(("sampling", "How responses are drawn.", [entry("rft", Sampling)]))
    everything = [item for _, _, items in sections for item in items]
    parts = [HEAD, "## By the name you know\n", _table(everything)]
    for name, title, items in sections:
        parts += [f"## {name}\n", f"{title}\n", *(_shown(item) for item in items)]
    return "\n".join(parts)


def _table(everything: list[Entry]) -> str:
    rows = sorted((system, name, item.name) for item in everything for system, name in aliases(item.known_as))
    lines = [f"| {system} | {name} | [`{here}`](#{_anchor(here)}) |" for system, name, here in rows]
    return "\n".join(["| system | there | here |", "| --- | --- | --- |", *lines, ""])


def _shown(item: Entry) -> str:
    parts = [f"### {item.name}\n", f"`{item.signature}`\n", f"{item.title}\n"]
    parts += [f"```text\n{inspect.cleandoc(formula)}\n```\n" for formula in item.formulas]
    parts += [f"{paragraph}\n" for paragraph in item.prose]
    parts += [f"Known as: {item.known_as}\n"] if item.known_as else []
    parts += [f"Source: {item.source}\n"] if item.source else []
    return "\n".join(parts)


def _arguments(thing: Callable[..., Any]) -> str:
    signature = inspect.signature(thing)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return re.sub(r"<function (\w+) at [^>]*>", r"\1", str(inspect.Signature(bare)))


def _line(text: str) -> str:
    return " ".join(text.split())


def _short(module: ModuleType) -> str:
    return module.__name__.rsplit(".", 1)[-1]


def _anchor(name: str) -> str:
    return name.lower().replace(".", "")


if __name__ == "__main__":
    _ = PAGE.write_text(page())
