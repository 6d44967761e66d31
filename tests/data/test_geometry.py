import json
from pathlib import Path

import pytest

from rft.data.geometry import geometry
from rft.errors import BadInput


def written(folder: Path, *lines: object) -> str:
    (folder / "figures").mkdir(exist_ok=True)
    (folder / "figures" / "1.png").touch()
    path = folder / "questions.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


GOOD = {"images": ["figures/1.png"], "problem": "<image>Find x.", "answer": " 6.5 "}


def test_images_lie_beside_the_file(tmp_path: Path) -> None:
    first, second = geometry(written(tmp_path, GOOD, "", {"problem": "What is 2 + 3?", "answer": "5"}))
    assert (first.id, first.text, first.answer, first.images) == (0, "Find x.", "6.5", (str(tmp_path / "figures" / "1.png"),))
    assert (second.id, second.text, second.images) == (1, "What is 2 + 3?", ())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not JSON"),
        ({"problem": "Find x."}, 'line 2: expected an object with the texts "problem" and "answer"'),
        ({**GOOD, "answer": " "}, "line 2: expected an object"),
        ({**GOOD, "images": "figures/1.png"}, 'line 2: "images" must be a list of files'),
        ({**GOOD, "images": ["figures/2.png"]}, "line 2: there is no image .*figures/2.png; images are looked for beside the file"),
        ({**GOOD, "problem": "<image>"}, "line 2: the problem has no text beside its images"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: object, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        geometry(written(tmp_path, GOOD, line))


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        geometry(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(BadInput, match="has no questions"):
        geometry(written(tmp_path, ""))
