"""`--flight-recorder-*`: NCCL's own record of its last collectives, which torch writes to files when one hangs.

torch reads the settings from the environment when the first group is made; a variable that is set already wins. gloo
keeps no such record: there, as `idle_flags` tells, the report of a hang (`hang_watch`) has to do.
"""

from __future__ import annotations

import os
from argparse import Namespace

from megatron_lite.log import once, warn_rank_0

_FILE = "nccl_trace_rank_"  # torch appends the rank
_DEFAULTS = {
    "flight_recorder_trace_buffer_size": 2000,
    "flight_recorder_dump_on_timeout": True,
    "flight_recorder_include_stack_trace": False,
    "flight_recorder_include_only_active": True,
    "flight_recorder_extra_dump_on_exec": True,
}


def environment(args: Namespace) -> dict[str, str]:
    """What the flags say, as torch's variables; nothing where no flag of them was given."""
    if args.flight_recorder_dump_path is None and all(getattr(args, name) == was for name, was in _DEFAULTS.items()):
        return {}
    found = {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(args.flight_recorder_trace_buffer_size),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(args.flight_recorder_dump_on_timeout)),
        "TORCH_INCLUDE_STACK_TRACE": str(int(args.flight_recorder_include_stack_trace)),
        "TORCH_INCLUDE_ONLY_ACTIVE": str(int(args.flight_recorder_include_only_active)),
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": str(int(args.flight_recorder_extra_dump_on_exec)),
    }
    if args.flight_recorder_dump_path is not None:
        prefix = os.path.join(args.flight_recorder_dump_path, _FILE)
        found["TORCH_FR_DUMP_TEMP_FILE"] = found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = prefix  # the old name too
    return found


def set_up(args: Namespace, backend: str) -> None:
    """Before the first process group is made: have NCCL record as the flags say."""
    wanted = environment(args) if backend == "nccl" else {}
    if not wanted:
        return
    for name, value in wanted.items():
        if os.environ.setdefault(name, value) != value:
            warn_rank_0(f"{name}={os.environ[name]} is set already and wins over the flag's {value}")
    if args.flight_recorder_dump_path is not None:
        os.makedirs(args.flight_recorder_dump_path, exist_ok=True)
    once("NCCL records its collectives: " + ", ".join(f"{name}={os.environ[name]}" for name in wanted))
