"""Questions about figures, in the manner of Geometry3K: a JSON-lines file with the images beside it.

Each line is an object:

    {"images": ["figures/1.png"], "problem": "<image>Find x. Round to the nearest tenth, if necessary.", "answer": "6.5"}

`images` are files, relative to the folder of the JSON-lines file; there may be none, or several. `problem` is the question; marks
`<image>` in it are left out, since the images stand before the text. `answer` is what a rule compares with, such as `math_answer`.

Lu et al., Inter-GPS: Interpretable Geometry Problem Solving with Formal Language and Symbolic Reasoning, https://arxiv.org/abs/2105.04165
"""

from pathlib import Path
from typing import Any

from rft.data.lines import json_lines
from rft.data.questions import Question, check_questions
from rft.errors import BadInput

MARK = "<image>"
"""Stands in a problem for an image."""


def geometry(source: str) -> tuple[Question, ...]:
    """Questions from such a file. Ids are row numbers from 0.

    Raises `BadInput` where the file is missing or empty, a line is no such object, or an image is no file; the message names the line.
    """
    path = Path(source).expanduser()
    questions = tuple(_question(number, row, where, path.parent) for number, (row, where) in enumerate(json_lines(path)))
    check_questions(questions, source)
    return questions


def _question(number: int, row: Any, where: str, folder: Path) -> Question:
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) and row[key].strip() for key in ("problem", "answer")):
        raise BadInput(f'{where}: expected an object with the texts "problem" and "answer", got {str(row)[:120]}')
    names: Any = row.get("images", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadInput(f'{where}: "images" must be a list of files, got {str(names)[:120]}')
    files = [folder / name for name in names]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise BadInput(f"{where}: there is no image {missing[0]}; images are looked for beside the file, in {folder}")
    text = row["problem"].replace(MARK, "").strip()
    if not text:
        raise BadInput(f"{where}: the problem has no text beside its images")
    return Question(id=number, text=text, answer=row["answer"].strip(), images=tuple(map(str, files)))
