"""The page of algorithms is the docstrings, and every public operation has what the page needs."""

import importlib.util
import inspect
from types import ModuleType
from typing import Any

import pytest

from tests.launching import ROOT


def generator() -> Any:
    """docs/generate.py, which is no module of a package."""
    found = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


GENERATE = generator()
ENTRIES = [item for module in GENERATE.OPERATIONS for item in GENERATE.entries(module)]
OF_THE_RUNTIME = {"rft.ops.checksum", "rft.ops.transfer", "rft.ops.transfer_kernel", "rft.ops.scores_kernel"}
HELPERS = {
    "rft.ops.logprobs",
    "rft.ops.masked",
    "rft.ops.metrics",
    "rft.ops.groups",
    "rft.ops.packing",
    "rft.ops.parameters",
    "rft.ops.ratios",
}


def test_the_page_is_as_the_docstrings_are() -> None:
    assert GENERATE.PAGE.read_text() == GENERATE.page(), "docstrings have changed; run: python docs/generate.py"


def test_every_module_of_operations_is_on_the_page_or_known_not_to_be() -> None:
    shown = {module.__name__ for module in GENERATE.OPERATIONS}
    there = {f"rft.ops.{path.stem}" for path in (ROOT / "rft" / "ops").glob("*.py") if path.stem != "__init__"}
    assert there == shown | OF_THE_RUNTIME | HELPERS


@pytest.mark.parametrize("item", ENTRIES, ids=lambda item: item.name)
def test_every_operation_has_a_line_a_formula_and_a_source(item: Any) -> None:
    assert item.title.endswith(".")
    assert item.formulas
    assert "http" in item.source or item.name in WITHOUT_A_PAPER


WITHOUT_A_PAPER = {"advantages.per_token", "normalisation.normalise", "controllers.fixed"}
"""What is plain arithmetic, or has been common knowledge for too long to have one source."""


def test_links_of_the_table_lead_to_headings() -> None:
    page = GENERATE.page()
    anchors = {line.removeprefix("### ").lower().replace(".", "") for line in page.splitlines() if line.startswith("### ")}
    links = {part.split(")")[0] for part in page.split("](#")[1:]}
    assert links <= anchors
    assert len(links) > 30


@pytest.mark.parametrize("system", ["TRL", "verl", "OpenRLHF", "LightRFT"])
def test_users_of_other_systems_find_theirs(system: str) -> None:
    names = {name for item in ENTRIES for found, name in GENERATE.aliases(item.known_as) if found == system}
    assert len(names) >= 10


def test_a_docstring_is_taken_apart() -> None:
    def example(x: int, *, cap: float = 2.0) -> None:
        """One line.

            a = b

        Prose over
        two lines.

        Known as: verl `x`; TRL `y`
        and more.
        Source: Someone, https://example.org
        """

    module = ModuleType("rft.ops.made_up")
    item = GENERATE.entry(module.__name__.rsplit(".", 1)[-1], example)
    assert item.signature == "made_up.example(x, *, cap=2.0)"
    assert (item.title, item.prose, item.source) == ("One line.", ("Prose over two lines.",), "Someone, https://example.org")
    assert [inspect.cleandoc(formula) for formula in item.formulas] == ["a = b"]
    assert list(GENERATE.aliases(item.known_as)) == [("verl", "`x`"), ("TRL", "`y` and more")]
