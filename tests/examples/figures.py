"""Questions about figures that are drawn here, and the example with them."""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from tests.launching import ROOT, torchrun

EXAMPLES, SCRIPT = ROOT / "examples", Path(__file__).with_name("geometry_ranks.py")
SMALL = ("--steps", 2, "--prompts", 2, "--samples", 3, "--max-new-tokens", 6, "--held-out", 3, "--dtype", "float32", "--lr", 1e-3)


def drawn(folder: Path) -> Path:
    """Seven questions: five about squares on a figure of their own, one about two figures, one about none."""
    (folder / "figures").mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for count in range(1, 6):
        image = Image.new("RGB", (50 + 10 * count, 64), "white")
        for number in range(count):
            ImageDraw.Draw(image).rectangle((4 + 18 * number, 20, 14 + 18 * number, 30), fill=(200, 30 * number, 0))
        image.save(folder / "figures" / f"{count}.png")
        rows.append({"images": [f"figures/{count}.png"], "problem": "<image>How many squares are there?", "answer": str(count)})
    rows.append({"images": ["figures/2.png", "figures/3.png"], "problem": "<image><image>How many in all?", "answer": "5"})
    rows.append({"images": [], "problem": "What is 2 + 3?", "answer": "5"})
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "questions.jsonl"


def trained(folder: Path, model: Path, *arguments: object) -> Path:
    """The folder of a run on two ranks, and of what they saw."""
    data, path = drawn(folder / "data"), {"PYTHONPATH": f"{EXAMPLES}:{ROOT}"}
    given = ("--model", model, "--train", data, "--test", data, "--max-prompt-tokens", 200, *SMALL, *arguments)
    _ = torchrun(SCRIPT, folder, *given, timeout=400, env=path)
    return folder


def see_the_same(folder: Path) -> None:
    """Engine, Actor and Reference, of the same rows."""
    grids = []
    for rank in range(2):
        seen = torch.load(folder / f"{rank}.pt")
        assert seen["shared"]
        grids += seen["images"][::2]
        for name in ("engine", "reference"):
            torch.testing.assert_close(seen[name], seen["actor"], atol=1e-5, rtol=0)
        assert seen["gap"] < 1e-5
        assert seen["grad_norm"] > 0
    assert sorted(len(each or []) for each in grids) == [0, 1, 1, 1, 1, 1, 2]
