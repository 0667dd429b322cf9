"""`--heartbeat-file`: a file that says how far a run is, and whose age says whether it lives.

    rank 0 of the run    {"doing": "iteration 12", "iteration": 11, "of": 200, "time": 1767225600.0, ...}    replaced
    whoever watches      megatron-lite heartbeat FILE --max-age 600    status 0: alive or done, 1: silent for longer

Rank 0 waits for every other rank in each step, so one file stands for all of them.
"""

from __future__ import annotations

import json
import os
import socket
import time
from argparse import Namespace

from megatron_lite.log import warn_rank_0

_AT_MOST_EVERY_S = 1.0
DONE = "done"


class Heartbeat:
    """Writes the file, at most once a second for steps; each time as a whole.

    Args:
        args: `iteration` and `train_iters` are read at each beat.
    """

    def __init__(self, path: str, args: Namespace):
        self._path, self._args = path, args
        self._written, self._failed = float("-inf"), False
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)

    def beat(self, doing: str) -> None:
        """The run lives, and does this now. A file that cannot be written is said once, and is no reason to stop."""
        now = time.monotonic()
        if doing.startswith("iteration") and now - self._written < _AT_MOST_EVERY_S:
            return
        self._written = now
        content = {
            "doing": doing,
            "iteration": self._args.iteration,
            "of": self._args.train_iters,
            "time": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        temporary = f"{self._path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(temporary, self._path)
            self._failed = False
        except OSError as error:
            if not self._failed:
                warn_rank_0(f"--heartbeat-file {self._path} cannot be written, training goes on: {error}")
            self._failed = True


def age(path: str) -> tuple[str, float]:
    """What the file says, in words, and the seconds since; 0 where the run is done.

    Raises: OSError, ValueError where there is no such file or it is another kind of file.
    """
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    try:
        doing, where = content["doing"], f"{content['iteration']} of {content['of']} iterations done"
        text = f"{doing}; {where}; process {content['pid']} on {content['host']}"
        return text, 0.0 if doing == DONE else max(0.0, time.time() - content["time"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no heartbeat: {error!r} is missing") from None
