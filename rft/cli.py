"""The command `rft`."""

import dataclasses as dc
import sys
from pathlib import Path
from typing import Annotated

import tyro

from rft.errors import RftError


@dc.dataclass(frozen=True)
class Plan:
    """What a job takes of each device's memory, phase by phase, and whether it fits. No device is touched, and no weights are read."""

    config: Annotated[Path, tyro.conf.Positional]
    """A TOML file like examples/plan.toml."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; 0 where it went well, 1 where a plan does not fit, 2 for what cannot be planned."""
    command: Plan = tyro.extras.subcommand_cli_from_dict({"plan": Plan}, args=arguments, prog="rft")
    try:
        return _plan(command.config)
    except RftError as error:
        print(f"rft plan: {error}", file=sys.stderr)
        return 2


def _plan(config: Path) -> int:
    # Imported here: transformers takes seconds, and asking for help is to take none.
    from rft.memory import plan
    from rft.memory.config import read_setting
    from rft.memory.table import rendered

    made = plan(read_setting(config))
    print(rendered(made))
    return 0 if made.fits else 1


def script() -> None:
    """What the console script calls."""
    sys.exit(main())


if __name__ == "__main__":
    script()
