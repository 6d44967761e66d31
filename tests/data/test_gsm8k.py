import json
import sys

import pytest

from rft.data.gsm8k import gsm8k
from rft.errors import BadInput

GOOD = {"question": "How many?", "answer": "Three and four are <<3+4=7>>7.\n#### 1,007"}


def written(folder, *lines):
    path = folder / "questions.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def test_the_answer_stands_after_the_mark(tmp_path):
    first, second = gsm8k(written(tmp_path, GOOD, "", {"question": "Und—？\u2028", "answer": "#### -5"}))
    assert (first.id, first.text, first.answer) == (0, "How many?", "1007")
    assert (second.id, second.text, second.answer) == (1, "Und—？\u2028", "-5")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not JSON"),
        ({"question": "How many?"}, 'line 2: expected an object with the texts "question" and "answer"'),
        (["a"], "line 2: expected an object"),
        ({"question": 3, "answer": "#### 1"}, "line 2: expected an object"),
        ({"question": "How many?", "answer": "seven"}, "line 2: the answer has nothing after ####"),
        ({"question": "How many?", "answer": "seven ####  "}, "line 2: the answer has nothing after ####"),
        ({"question": "  ", "answer": "#### 1"}, "line 2: the question is empty"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, line, says):
    with pytest.raises(BadInput, match=says):
        gsm8k(written(tmp_path, GOOD, line))


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(BadInput, match="cannot be read"):
        gsm8k(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(BadInput, match="has no questions"):
        gsm8k(written(tmp_path, ""))
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(BadInput, match="cannot be read"):
        gsm8k(str(tmp_path / "latin.jsonl"))


def test_a_hub_id_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"pip install 'rft-runtime\[gsm8k\]'"):
        gsm8k("openai/gsm8k")


def test_a_hub_id_goes_through_datasets(monkeypatch):
    class Hub:
        class exceptions:
            DatasetsError = RuntimeError

        @staticmethod
        def load_dataset(name, configuration, *, split):
            if name == "openai/none":
                raise RuntimeError("no such data set")
            assert (name, configuration, split) == ("openai/gsm8k", "main", "test")
            return [GOOD, {"question": "And?", "answer": "#### 2"}]

    monkeypatch.setitem(sys.modules, "datasets", Hub)
    assert [q.answer for q in gsm8k("openai/gsm8k", split="test")] == ["1007", "2"]
    with pytest.raises(BadInput, match="nor a data set that the hub gives"):
        gsm8k("openai/none")
