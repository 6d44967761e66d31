"""GSM8K, grade-school word problems with a worked solution that ends in "#### answer".

Cobbe et al., Training Verifiers to Solve Math Word Problems, https://arxiv.org/abs/2110.14168
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rft.data.lines import json_lines
from rft.data.questions import Question, check_questions
from rft.errors import BadInput

MARK = "####"
"""Stands before the answer in a solution."""


def gsm8k(source: str, *, split: str = "train") -> tuple[Question, ...]:
    """Questions from a JSON-lines file, or by hub id through `datasets` (`openai/gsm8k`, configuration `main`).

    A file is one split by itself; `split` is for the hub. Ids are row numbers from 0, and answers lose their thousands separators.
    Raises `BadInput` where the source is missing or empty, or a row is not one of GSM8K; the message names the line.
    """
    path = Path(source).expanduser()
    rows = json_lines(path) if path.suffix in (".jsonl", ".json") or path.is_file() else _hub_rows(source, split)
    questions = tuple(_question(number, row, where) for number, (row, where) in enumerate(rows))
    check_questions(questions, source)
    return questions


def _question(number: int, row: Any, where: str) -> Question:
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("question", "answer")):
        raise BadInput(f'{where}: expected an object with the texts "question" and "answer", got {str(row)[:120]}')
    _, mark, answer = row["answer"].rpartition(MARK)
    if not mark or not answer.strip():
        raise BadInput(f"{where}: the answer has nothing after {MARK}: {row['answer'][-120:]!r}")
    if not row["question"].strip():
        raise BadInput(f"{where}: the question is empty")
    return Question(id=number, text=row["question"], answer=answer.strip().replace(",", ""))


def _hub_rows(name: str, split: str) -> Iterable[tuple[Any, str]]:
    try:
        import datasets
    except ImportError as error:
        raise BadInput(f"{name!r} is no file, and a hub id needs the package datasets: pip install 'rft-runtime[gsm8k]'") from error
    hub: Any = datasets
    try:
        rows = hub.load_dataset(name, "main", split=split)
    except (OSError, ValueError, hub.exceptions.DatasetsError) as error:
        raise BadInput(f"{name!r} is neither a JSON-lines file nor a data set that the hub gives (split {split!r}): {error}") from error
    return ((row, f"{name}, row {number}") for number, row in enumerate(rows))
