"""What the launcher says of this process, and when it began. No torch: bad variables are reported at once."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from megatron_lite.errors import ConfigError

_PROGRAM_START = time.time()


def program_start() -> float:
    """When this process began, in seconds since the epoch; `--exit-duration-in-mins` counts from here."""
    return _PROGRAM_START


@dataclass(frozen=True)
class Launch:
    """What the launcher said: this process's rank, the number of processes, and its number on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def read_launch(environment: dict[str, str] | None = None) -> Launch:
    """The launcher's variables, checked.

    Raises: ConfigError naming the variable and its value.
    """
    environment = dict(os.environ) if environment is None else environment
    values = {}
    for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        text = environment.get(name, str(default))
        try:
            values[name] = int(text)
        except ValueError:
            raise ConfigError(
                f"the environment has {name}={text}",
                why="launchers put a whole number there",
                fix=f"unset {name} to run one process, or start with torchrun --nproc_per_node N pretrain_gpt.py ...",
            ) from None
    if values["WORLD_SIZE"] < 1 or not 0 <= values["RANK"] < values["WORLD_SIZE"]:
        raise ConfigError(
            f"the environment has RANK={values['RANK']} and WORLD_SIZE={values['WORLD_SIZE']}",
            why="ranks run from 0 to WORLD_SIZE - 1",
            fix="unset both to run one process, or start with torchrun",
        )
    if values["WORLD_SIZE"] > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={values['WORLD_SIZE']}, but the environment lacks {' and '.join(missing)}",
                why="ranks find each other there",
                fix="start with torchrun, or set both",
            )
    return Launch(values["RANK"], values["WORLD_SIZE"], values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"])
