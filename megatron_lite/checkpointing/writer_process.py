"""The process that writes checkpoints beside a run: a program of the standard library alone, so it starts at once.

    python -I writer_process.py FD NICE IO_CLASS     FD: memory shared with the run, which holds images of files

    in   one line of JSON a job    {"folder": ..., "files": [{"name": ..., "start": ..., "length": ...}]}
    out  one line of JSON a job    {"checksums": {name: crc32}}, or {"error": [errno, text, file name]}

It ends with its standard input: a run that is killed takes it along, wherever it is in a file. That is harmless, since
nothing here has the name of a checkpoint yet. Signals that the whole group of processes gets are the run's to answer.
"""

import ctypes
import json
import mmap
import os
import platform
import signal
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

_BLOCK = 8 << 20
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # numbers of the system call, which the C library has no name for
_WHOLE_PROCESS, _CLASS_SHIFT = 1, 13


def write_image(folder: str, memory: Any, image: dict[str, Any]) -> str:
    """Write one image to its file and flush it. Returns: its CRC-32, 8 hexadecimal digits. Raises: OSError."""
    total, place, end = 0, image["start"], image["start"] + image["length"]
    with open(os.path.join(folder, image["name"]), "wb", buffering=0) as file:
        while place < end:
            with memory[place : min(place + _BLOCK, end)] as block:
                total = zlib.crc32(block, total)
                done = 0
                while done < len(block):
                    with block[done:] as rest:
                        done += file.write(rest)
            place = min(place + _BLOCK, end)
        os.fsync(file.fileno())
    return f"{total:08x}"


def run_job(memory_fd: int, job: dict[str, Any]) -> dict[str, Any]:
    """The answer to a job, whatever happens: the run waits for it."""
    files = job["files"]
    end = max((image["start"] + image["length"] for image in files), default=0)
    if not end:
        return {"checksums": {}}
    try:
        with (
            mmap.mmap(memory_fd, end, prot=mmap.PROT_READ) as mapped,
            memoryview(mapped) as memory,
            ThreadPoolExecutor(len(files)) as threads,
        ):
            sums = list(threads.map(lambda image: write_image(job["folder"], memory, image), files))
    except OSError as error:
        return {"error": [error.errno, error.strerror or str(error), str(error.filename or "")]}
    except Exception as error:
        return {"error": [None, f"{type(error).__name__}: {error}", ""]}
    return {"checksums": {image["name"]: checksum for image, checksum in zip(files, sums)}}


def be_modest(nice: int, io_class: int) -> None:
    """Give way to others, as far as the system lets a process say so."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    call = _IOPRIO_SET.get(platform.machine()) if sys.platform == "linux" else None
    if call is not None:
        ctypes.CDLL(None).syscall(call, _WHOLE_PROCESS, 0, io_class << _CLASS_SHIFT)


def main() -> None:
    """Answer jobs until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    memory_fd, nice, io_class = map(int, sys.argv[1:])
    be_modest(nice, io_class)

    def answer(job: dict[str, Any]) -> None:
        reply = json.dumps(run_job(memory_fd, job))
        with suppress(BrokenPipeError):  # the run is gone
            print(reply, flush=True)

    for line in sys.stdin:
        threading.Thread(target=answer, args=(json.loads(line),)).start()
    os._exit(0)  # also out of a file that is being written


if __name__ == "__main__":
    main()
