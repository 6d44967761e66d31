"""Makes the virtual environments, one per engine, from the exact lists in this folder: `python make.py transformers|vllm|sglang|deepspeed`.

It needs Python 3.11 with pip and nothing else, and prints the path of the environment's Python. An environment is `.venv-<name>` in
the checkout. A stamp in it, the hash of its lists, is written last: where it is right, nothing is installed; where it is missing,
an install was interrupted, and the environment is made anew.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LISTS = Path(__file__).resolve().parent
CHECKOUT = LISTS.parents[1]
OPERATORS = LISTS / "torchvision_operators.py"
"""What every Python of an environment with torchvision loads at its start."""


def make(name: str, checkout: Path = CHECKOUT) -> Path:
    """The Python of the environment `name`, which is complete and up to date. Only one process makes it; others wait."""
    home = checkout / f".venv-{name}"
    wanted = fingerprint(name)
    with only_one(checkout / ".cache" / f"{name}.lock"):
        if stamp(home) != wanted:
            install(name, home, checkout)
            (home / "stamp").write_text(wanted)
    return home / "bin" / "python"


def install(name: str, home: Path, checkout: Path) -> None:
    """Brings an environment up to date in place where it was once complete, and makes it anew where it was not."""
    began, python = time.monotonic(), home / "bin" / "python"
    tell(f"{name}: {len(packages(name))} packages into {home.name} (only this once)")
    if stamp(home) is None:
        shutil.rmtree(home, ignore_errors=True)
        run(sys.executable, "-m", "venv", str(home))
    (home / "stamp").unlink(missing_ok=True)
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile")
    # torch brings what it needs on this machine (with CUDA or without); everything else is exact, and must not bring another torch.
    torch = next(line for line in packages(name) if line.startswith("torch=="))
    constraints = home / "constraints.txt"
    constraints.write_text("\n".join(packages(name)))
    run(*pip, torch, "--constraint", str(constraints))
    for each in (*included(name), name):
        # What an included list has may be needed to build what the list itself has: DeepSpeed is sources, and imports torch.
        isolation = ("--no-build-isolation",) if each == "deepspeed" else ()
        run(*pip, "--no-deps", *isolation, "--requirement", str(LISTS / f"{each}.txt"))
    run(*pip, "--no-deps", "--no-build-isolation", "--editable", str(checkout))
    if any(line.startswith("torchvision==") for line in packages(name)):
        packages_of = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        packages_of.mkdir(parents=True, exist_ok=True)
        _ = shutil.copy(OPERATORS, packages_of)
        _ = (packages_of / OPERATORS.with_suffix(".pth").name).write_text(f"import {OPERATORS.stem}\n")
    tell(f"{name}: ready after {time.monotonic() - began:.0f} s")


def packages(name: str) -> list[str]:
    """The lines `package==version` of a list and of those that it includes."""
    own = [line for line in lines_of(name) if re.match(r"\w", line)]
    return [*(line for other in included(name) for line in packages(other)), *own]


def included(name: str) -> list[str]:
    """The lists that a list includes."""
    return [line.removeprefix("-r ").removesuffix(".txt") for line in lines_of(name) if line.startswith("-r ")]


def lines_of(name: str) -> list[str]:
    """A list without its comments."""
    return [line.partition("#")[0].strip() for line in (LISTS / f"{name}.txt").read_text().splitlines()]


def fingerprint(name: str) -> str:
    """Hash of what an environment is made from: its lists, this Python, what the library declares, and this script."""
    parts = [*packages(name), sys.version, (CHECKOUT / "pyproject.toml").read_text(), Path(__file__).read_text(), OPERATORS.read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def stamp(home: Path) -> str | None:
    """What a complete environment was made from; None where there is none, or where its Python is gone."""
    found = home / "stamp"
    return found.read_text() if found.is_file() and (home / "bin" / "python").exists() else None


@contextlib.contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Holds a lock file; the lock goes with the process, however it ends."""
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def run(*command: str) -> None:
    """Runs a command with its output on stderr, and ends with its exit status where that is not 0."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment["DS_BUILD_OPS"] = "0"  # DeepSpeed builds none of its operators; the tests need none
    status = subprocess.run(command, stdout=sys.stderr, env=environment).returncode
    if status:
        tell(f"failed: {' '.join(command)}; starting again makes the environment anew")
        sys.exit(status)


def tell(message: str) -> None:
    """One line on stderr: stdout is for the result."""
    print(f"[environment] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    names = sorted(path.stem for path in LISTS.glob("*.txt"))
    if sys.version_info < (3, 11) or sys.argv[1:] not in [[name] for name in names]:
        sys.exit(f"usage: python make.py {'|'.join(names)}, with Python 3.11 or newer (this is {sys.version.split()[0]})")
    print(make(sys.argv[1]))
