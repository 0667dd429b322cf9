"""`--log-straggler`: which rank computes slower than the others. In a step everyone waits for it, so no timer tells.

    rank 0   |data| compute ........|  waits in collectives ...........|      a step lasts equally long everywhere;
    rank 1   |data| compute ...................................|  waits|      what differs is the time outside calls

    compute    CPU: the step without its collectives and without waiting for data
               CUDA: the forward passes between two events, since the host runs ahead of the device
    processor  CPU time of this process in a step. Long compute and short processor: other programs hold the core
    data       waiting for the next micro-batch

At each log interval ranks gather their numbers, and the last one prints the ends of each row. A GET of / on the port of
rank 0 switches the measurement; all ranks follow at the next log interval. Off, a step costs nothing.
"""

from __future__ import annotations

import statistics
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import torch

from megatron_lite import calls, collectives
from megatron_lite.log import once, print_rank_last, rank_and_world_size, say, warn_rank_0
from megatron_lite.pipeline_parallel.executor import ForwardStep
from megatron_lite.training.stage_data import NotNeeded

SLOW = 1.2  # times the median: named as slow


class Row(NamedTuple):
    """A measured quantity: its short name, its unit, digits, and whether the straggler is at the upper end."""

    name: str
    unit: str
    digits: int
    most_is_worst: bool = True


COMPUTE = Row("Rtt", "ms", 2)
ROWS = (COMPUTE, Row("Cpu", "ms", 2), Row("Dtl", "ms", 2), Row("Etpt", "TF", 2, most_is_worst=False))
SENSORS = (Row("Pwr", "W", 0), Row("Tmp", "C", 0), Row("Utl", "%", 0), Row("Clk", "MHz", 0, most_is_worst=False))


class Straggler:
    """Measures this rank's steps, and compares the ranks.

    Args:
        clock, processor: seconds that have passed, and that this process has computed.
        outside: seconds so far in collectives.
    """

    def __init__(
        self,
        args: Namespace,
        clock: Callable[[], float] = time.perf_counter,
        processor: Callable[[], float] = time.process_time,
        outside: Callable[[], float] = calls.seconds,
    ):
        self.args = args
        self._clock, self._processor, self._outside = clock, processor, outside
        self.on = self.wanted = not args.disable_straggler_on_startup
        self._steps, self._compute, self._cpu, self._data = 0, 0.0, 0.0, 0.0
        self._events: list[tuple[Any, Any]] = []
        self._server = _listen(self, args.straggler_ctrlr_port) if rank_and_world_size()[0] == 0 else None

    # -- measuring -------------------------------------------------------------------------------------------------
    def step(self) -> AbstractContextManager[None]:
        """Around a training step."""
        return self._step() if self.on else nullcontext()

    @contextmanager
    def _step(self) -> Iterator[None]:
        begun, cpu, outside, data = self._clock(), self._processor(), self._outside(), self._data
        yield
        self._steps += 1
        self._cpu += self._processor() - cpu
        elsewhere = self._outside() - outside + self._data - data
        if self.args.device.type != "cuda":
            self._compute += self._clock() - begun - elsewhere

    def timed(self, iterator: Iterator[Any] | None) -> Iterator[Any] | None:
        """The data, whose delays count."""
        return iterator if iterator is None or isinstance(iterator, NotNeeded) else _Timed(iterator, self)

    def around(self, forward_step: ForwardStep) -> ForwardStep:
        """The forward step, timed where the device runs behind the host."""
        if self.args.device.type != "cuda":
            return forward_step

        def timed(*inputs: Any) -> Any:
            if not self.on:
                return forward_step(*inputs)
            ends = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            ends[0].record()
            result = forward_step(*inputs)
            ends[1].record()
            self._events.append(ends)
            return result

        return timed

    # -- comparing -------------------------------------------------------------------------------------------------
    def report(self, operations: float) -> None:
        """Print what the ranks measured since the last report, and follow the switch. Collective over all ranks.

        Args:
            operations: floating point operations of a step, all ranks together.
        """
        if self._events:
            torch.cuda.synchronize(self.args.device)
            self._compute += sum(begin.elapsed_time(end) for begin, end in self._events) / 1000.0
        steps = max(self._steps, 1)
        compute = self._compute / steps
        rate = operations / rank_and_world_size()[1] / compute / 1e12 if compute > 0.0 else 0.0
        sensors = _sensors(self.args.device) if self.on and self._steps else None
        mine = [float(self.wanted), float(self._steps), float(sensors is not None)]
        mine += [
            1000.0 * compute,
            1000.0 * self._cpu / steps,
            1000.0 * self._data / steps,
            rate,
            *(sensors or [0.0] * 4),
        ]
        row = torch.tensor(mine, dtype=torch.float64, device=self.args.device)
        everyone = row.new_zeros(rank_and_world_size()[1], len(row))
        collectives.all_gather(everyone.view(-1), row, collectives.world(), purpose="straggler report")
        table = everyone.tolist()
        if self.on and all(line[1] for line in table):
            rows = (*ROWS, *SENSORS) if all(line[2] for line in table) else ROWS
            print_rank_last(straggler_line(rows, [line[3:] for line in table], self.args.straggler_minmax_count))
        self._steps, self._compute, self._cpu, self._data = 0, 0.0, 0.0, 0.0
        self._events.clear()
        self.on = bool(table[0][0])

    def close(self) -> None:
        """Give the port back."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


class _Timed:
    """An iterator that notes how long its answers take."""

    def __init__(self, iterator: Iterator[Any], straggler: Straggler):
        self._iterator, self._straggler = iterator, straggler

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        begun = self._straggler._clock()
        item = next(self._iterator)
        self._straggler._data += self._straggler._clock() - begun
        return item


def straggler_line(rows: tuple[Row, ...], table: list[list[float]], count: int) -> str:
    """` straggler report | MnRtt/Rnk: 10.12ms/3 | MxRtt/Rnk: 19.80ms/1 | ... | slow: rank 1 (1.9 x the median)`.

    Args:
        table: a line for each rank, a column for each of `rows`.
        count: ranks at both ends.
    """
    parts = [" straggler report"]
    for column, row in enumerate(rows):
        order = sorted(range(len(table)), key=lambda rank: table[rank][column])
        for end, ranks in (("Mn", order[:count]), ("Mx", order[::-1][:count])):
            values = ", ".join(f"{table[rank][column]:.{row.digits}f}{row.unit}/{rank}" for rank in ranks)
            parts.append(f"{end}{row.name}/Rnk: {values}")
    slow = []
    times = [line[rows.index(COMPUTE)] for line in table]
    median = statistics.median_low(times)
    for rank in sorted(range(len(times)), key=lambda rank: -times[rank]):
        if times[rank] > SLOW * median > 0.0:
            slow.append(f"rank {rank} ({times[rank] / median:.1f} x the median)")
    if slow:
        parts.append(f"slow: {', '.join(slow[:count])}")
    return " | ".join(parts)


def _sensors(device: torch.device) -> list[float] | None:
    """Watts, degrees, percent, MHz of a GPU; None where there is none, or nothing reads them."""
    if device.type != "cuda":
        return None
    try:
        return [
            torch.cuda.power_draw(device) / 1000.0,
            float(torch.cuda.temperature(device)),
            float(torch.cuda.utilization(device)),
            float(torch.cuda.clock_rate(device)),
        ]
    except Exception as error:  # the package that reads them is missing, or the driver does not tell
        once(f"--log-straggler without power, temperature, utilisation and clock of the GPUs: {error}")
        return None


def _listen(straggler: Straggler, port: int) -> ThreadingHTTPServer | None:
    """Serve the switch; None, with a warning, where the port cannot be had."""

    class Switch(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/":
                self.send_error(404)
                return
            straggler.wanted = not straggler.wanted
            text = f"straggler reports: {'on' if straggler.wanted else 'off'} from the next log interval on\n".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *about: Any) -> None:
            """No line for each request."""

    try:
        server = ThreadingHTTPServer(("", port), Switch)
    except OSError as error:
        warn_rank_0(f"--straggler-ctrlr-port {port} cannot be had, the reports cannot be switched: {error}")
        return None
    threading.Thread(target=server.serve_forever, name="straggler switch", daemon=True).start()
    say(f"> straggler reports are switched on and off by a GET of / on port {server.server_address[1]}")
    return server
