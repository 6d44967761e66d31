"""Log lines that say which rank they are of."""

import contextlib
import logging
import os
import sys


class _Stderr(logging.Handler):
    """Writes to whatever stderr is at the moment, so that a live view can put lines above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a log that goes to a full disk, or to a terminal that is gone, ends no training
            print(self.format(record), file=sys.stderr, flush=True)


def set_up_logging(level: int = logging.INFO) -> None:
    """Sends the library's log to stderr as `12:30:01 rank 0 | message`. Calling it again changes nothing but the level."""
    logger = logging.getLogger("rft")
    logger.setLevel(level)
    logger.propagate = False
    if not any(isinstance(handler, _Stderr) for handler in logger.handlers):
        handler = _Stderr()
        handler.setFormatter(logging.Formatter(f"%(asctime)s rank {os.environ.get('RANK', '0')} | %(message)s", datefmt="%H:%M:%S"))
        logger.addHandler(handler)
