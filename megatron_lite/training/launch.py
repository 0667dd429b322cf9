"""What the launcher says of this process, and when it began. No torch: bad variables are reported at once.

    torchrun    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    srun        SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, ...    } translated into torchrun's names, which
    mpirun      OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, ...           } torch and users' scripts read

A variable of torchrun's that is set wins: torchrun may itself have been started by srun.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_lite.errors import ConfigError

_PROGRAM_START = time.time()
_FIRST_PORT, _PORTS = 20000, 10000  # below the range from which systems hand ports to clients


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


def read_launch(alone: bool = False) -> Launch:
    """This process's place, checked; a scheduler's variables are put into `os.environ` under torchrun's names.

    Args:
        alone: the other ranks do not exist (`--fake-process-group`): there is nobody to meet.
    Raises: ConfigError naming the variable and its value.
    """
    os.environ.update(translated(os.environ))
    return checked(os.environ, alone)


def checked(environment: Mapping[str, str], alone: bool = False) -> Launch:
    """What torchrun's variables say; see `read_launch`.

    Raises: ConfigError naming the variable and its value.
    """
    rank, world, local_rank, local_world = (
        _number(environment, name, default)
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(
            f"the environment has RANK={rank} and WORLD_SIZE={world}",
            why="ranks run from 0 to WORLD_SIZE - 1",
            fix="unset both to run one process, or start with torchrun",
        )
    # Some launchers give the local rank alone.
    if "LOCAL_WORLD_SIZE" in environment and not 0 <= local_rank < local_world <= world:
        raise ConfigError(
            f"the environment has LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world} and WORLD_SIZE={world}",
            why="local ranks run from 0 to LOCAL_WORLD_SIZE - 1, and a machine has no more ranks than the world",
            fix="unset them to run one process, or start with torchrun",
        )
    if world > 1 and not alone:
        _check_meeting_point(environment, world)
    return Launch(rank, world, local_rank, local_world)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"the environment has {name}={text}",
            why="launchers put a whole number there",
            fix=f"unset {name} to run one process, or start with torchrun --nproc_per_node N pretrain_gpt.py ...",
        ) from None


def _check_meeting_point(environment: Mapping[str, str], world: int) -> None:
    """An address that no name server knows would keep ranks waiting until their timeout."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={world}, but the environment lacks {' and '.join(missing)}",
            why="ranks find each other there",
            fix="start with torchrun, or set both",
        )
    port, host = _number(environment, "MASTER_PORT", 0), environment["MASTER_ADDR"]
    if not 0 < port < 65536:
        raise ConfigError(f"the environment has MASTER_PORT={port}", why="ports run from 1 to 65535", fix="29500")
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"the environment has MASTER_ADDR={host}, which is no address",
            why=str(error),
            fix="the name or number of the machine of rank 0, as the others reach it",
        ) from None


# -- schedulers --------------------------------------------------------------------------------------------------


def translated(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun that are to be set because srun or mpirun started this process; {} if none did.

    Raises: ConfigError where ranks could not find each other.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return {}
    if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:  # only srun sets the first
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        found = _of_slurm(environment)
    elif "OMPI_COMM_WORLD_SIZE" in environment:
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
        found = _of_open_mpi(environment)
    else:
        return {}
    rank, world, local = (str(_number(environment, name, 0)) for name in names)
    if int(world) == 1:
        return {}
    found |= {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local}
    return {name: value for name, value in found.items() if name not in environment}


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    found = {"MASTER_PORT": _port("slurm", environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", ""))}
    if hosts:
        found["MASTER_ADDR"] = first_host(hosts)
    tasks = _tasks_by_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environment.get("SLURM_NODEID", "0")
    if tasks and node.isdigit() and int(node) < len(tasks):
        found["LOCAL_WORLD_SIZE"] = str(tasks[int(node)])
    return found


def _of_open_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """Its variables do not say where rank 0 runs; on one machine that needs no saying."""
    world, local = environment["OMPI_COMM_WORLD_SIZE"], environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
    found = {"MASTER_PORT": _port("mpi", job)} | ({"LOCAL_WORLD_SIZE": local} if local else {})
    if "MASTER_ADDR" in environment:
        return found
    if local != world:
        raise ConfigError(
            f"mpirun started {world} processes on several machines without MASTER_ADDR",
            why=f"ranks need the address of rank 0's machine; {local or 'an unknown number'} of them are on this one",
            fix="mpirun -x MASTER_ADDR=$(hostname) ...",
        )
    return found | {"MASTER_ADDR": "127.0.0.1"}


def _port(*job: str) -> str:
    """The same on every rank of a job, another one for most other jobs."""
    digest = hashlib.sha256("/".join(job).encode()).digest()
    return str(_FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS)


def first_host(hosts: str) -> str:
    """`node[07-09,12],other` -> `node07`: the first machine of SLURM's compressed list."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", hosts)
    if not match:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={hosts} begins with no name of a machine", fix="set MASTER_ADDR yourself"
        )
    return "".join(part or "" for part in match.groups())


def _tasks_by_node(text: str) -> list[int]:
    """`4(x2),3` -> [4, 4, 3]; [] for what is not of this form."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
