"""How many micro-batches the next step has, as a function of the samples seen.

    global batch = micro-batch size * data-parallel size * number of micro-batches

    constant   |GGGGGGGGGGGGGGGG        every step the full global batch
    ramp-up    |S ... +I ... +I ... G   from START by INCREMENT to the full size, over SAMPLES samples
    steps      |A.....B.......C.....    sizes by thresholds, given in tokens

Two sizes are told apart. The *current* global batch is what the plan says; the *running* one is what is really run,
which is smaller when the plan's is no multiple of micro-batch * ranks and `--decrease-batch-size-if-needed` allows it.
Consumed samples grow by the running size.

The module's functions hold one calculator for the run, as Megatron's do; the classes can be used alone.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from megatron_lite.errors import ConfigError
from megatron_lite.log import print_rank_0


class NumMicroBatchesCalculator(ABC):
    """What all calculators share: the plan's size -> the running size and the number of micro-batches."""

    def __init__(
        self, micro_batch_size: int, data_parallel_size: int, decrease_batch_size_if_needed: bool, rank: int
    ) -> None:
        for name, value in (("--micro-batch-size", micro_batch_size), ("the data-parallel size", data_parallel_size)):
            if value is None or value <= 0:
                raise ConfigError(f"{name} {value}", why="a batch holds at least one sample", fix="a positive number")
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.rank = rank
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.num_micro_batches = 0
        self.current_global_batch_size = 0
        self.current_running_global_batch_size = 0

    def get(self) -> int:
        """Micro-batches per step and data-parallel rank."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """The plan's global batch size."""
        return self.current_global_batch_size

    def get_micro_batch_size(self) -> int:
        """Samples a rank computes at once."""
        return self.micro_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """The size that is really run, at most the plan's."""
        return self.current_running_global_batch_size

    @abstractmethod
    def planned_global_batch_size(self, consumed_samples: int) -> int:
        """The plan: the global batch size after `consumed_samples`."""

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Move to the position `consumed_samples`.

        Args:
            consistency_check: refuse a size that is no multiple of micro-batch * ranks (with `decrease` there is none).
            verbose: tell, on rank 0, when the size changes.
        Raises: ConfigError.
        """
        size = self.planned_global_batch_size(consumed_samples)
        unit = self.micro_batch_times_data_parallel_size
        running = size // unit * unit if self.decrease_batch_size_if_needed else size
        if consistency_check and not self.decrease_batch_size_if_needed and size % unit:
            raise ConfigError(
                f"current global batch size {size} is no multiple of --micro-batch-size {self.micro_batch_size} "
                f"* data-parallel size {self.data_parallel_size}",
                why=f"every data-parallel rank runs the same number of micro-batches, so {unit} must divide it",
                fix=f"sizes that are multiples of {unit}, or --decrease-batch-size-if-needed",
            )
        if verbose and running != self.current_running_global_batch_size and self.current_running_global_batch_size:
            print_rank_0(
                f"global batch size {self.current_running_global_batch_size} -> {running} "
                f"after {consumed_samples} samples"
            )
        self.current_global_batch_size = size
        self.current_running_global_batch_size = running
        self.num_micro_batches = size // unit

    def _refuse_less_than_one_micro_batch(self, size: int, what: str) -> None:
        """A size below one micro-batch per rank would never train."""
        unit = self.micro_batch_times_data_parallel_size
        if size < unit:
            raise ConfigError(
                f"{what} {size} is less than --micro-batch-size {self.micro_batch_size} "
                f"* data-parallel size {self.data_parallel_size}",
                why="no rank would get a micro-batch",
                fix=f"at least {unit}",
            )


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """One size for the whole run."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
        rank: int = 0,
    ) -> None:
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
        if global_batch_size is None or global_batch_size <= 0:
            raise ConfigError(
                f"--global-batch-size {global_batch_size}",
                why="a step trains on at least one sample",
                fix=f"--global-batch-size {self.micro_batch_times_data_parallel_size}",
            )
        self._refuse_less_than_one_micro_batch(global_batch_size, "--global-batch-size")
        self.global_batch_size = global_batch_size
        self.update(0, consistency_check=True)

    def planned_global_batch_size(self, consumed_samples: int) -> int:
        return self.global_batch_size


class RampupBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """Grows by equal increments, each after the same number of samples.

    Args:
        start_global_batch_size, batch_size_increment, ramup_samples: the three numbers of `--rampup-batch-size`
            (the last one spelled as in Megatron).
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
        start_global_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
    ) -> None:
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
        start, increment, samples = start_global_batch_size, batch_size_increment, ramup_samples
        given = f"--rampup-batch-size {start} {increment} {samples} with --global-batch-size {global_batch_size}"
        if start <= 0 or increment <= 0 or samples <= 0:
            raise ConfigError(given, why="a ramp has a start, steps and a length", fix="three positive numbers")
        if start >= global_batch_size:
            raise ConfigError(
                given,
                why="the batch grows from the first number to the global batch size",
                fix="a smaller start, or leave --rampup-batch-size out",
            )
        if (global_batch_size - start) % increment:
            raise ConfigError(
                given,
                why=f"steps of {increment} from {start} do not meet {global_batch_size}",
                fix=f"an increment that divides {global_batch_size - start}",
            )
        self._refuse_less_than_one_micro_batch(start, f"{given}: the start")
        self.global_batch_size = global_batch_size
        self.start_global_batch_size = start
        self.batch_size_increment = increment
        self.ramup_samples = samples
        self.rampup_samples_per_increment = samples / ((global_batch_size - start) // increment)
        self.update(0, consistency_check=False)

    def planned_global_batch_size(self, consumed_samples: int) -> int:
        if consumed_samples >= self.ramup_samples:  # not left to the division below, which may round to just under
            return self.global_batch_size
        steps = int(consumed_samples / self.rampup_samples_per_increment)
        return self.start_global_batch_size + steps * self.batch_size_increment


class StepBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """Sizes by thresholds: `"0:384 3B:768 12B:1536"` runs 768 from 3e9 tokens on.

    Args:
        schedule: see `parse_step_batch_size_schedule`.
        seq_length: tokens per sample; thresholds become samples, rounded down.
        global_batch_size: must be the last size when it is given.
    """

    def __init__(
        self,
        schedule: str,
        seq_length: int,
        micro_batch_size: int,
        data_parallel_size: int,
        global_batch_size: int | None = None,
        rank: int = 0,
    ) -> None:
        super().__init__(micro_batch_size, data_parallel_size, False, rank)
        if seq_length is None or seq_length <= 0:
            raise ConfigError(
                f"--step-batch-size-schedule with --seq-length {seq_length}",
                why="thresholds are in tokens",
                fix="--seq-length",
            )
        steps = parse_step_batch_size_schedule(schedule)
        if global_batch_size is not None and global_batch_size != steps[-1][1]:
            raise ConfigError(
                f"--global-batch-size {global_batch_size} with --step-batch-size-schedule {schedule!r}",
                why=f"the schedule ends with {steps[-1][1]}",
                fix=f"--global-batch-size {steps[-1][1]}, or leave it out",
            )
        for _, size in steps:
            self._refuse_less_than_one_micro_batch(size, f"--step-batch-size-schedule {schedule!r}: the size")
        self.steps = [(tokens // seq_length, size) for tokens, size in steps]  # (samples, size)
        self.update(0, consistency_check=False)

    def planned_global_batch_size(self, consumed_samples: int) -> int:
        return [size for threshold, size in self.steps if threshold <= consumed_samples][-1]


_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_step_batch_size_schedule(schedule: str) -> list[tuple[int, int]]:
    """`"0:384 3B:768"` -> [(0, 384), (3000000000, 768)]: (threshold in tokens, global batch size).

    Entries are split by blanks or commas; thresholds may end in K, M, B or T and have decimals (1.5B).

    Raises: ConfigError unless thresholds start at 0 and rise strictly, and sizes are positive.
    """
    steps = []
    for entry in re.split(r"[\s,]+", schedule.strip()):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):(\d+)", entry, re.IGNORECASE)
        if not match or int(match[3]) == 0:
            raise ConfigError(
                f"--step-batch-size-schedule {schedule!r}: {entry!r}",
                why="an entry is THRESHOLD:SIZE, in tokens (suffix K, M, B or T) and samples",
                fix='for example "0:384 3B:768 12B:1536"',
            )
        steps.append((round(float(match[1]) * _SUFFIXES[match[2].upper()]), int(match[3])))
    thresholds = [threshold for threshold, _ in steps]
    if thresholds[0] != 0 or any(a >= b for a, b in zip(thresholds, thresholds[1:])):
        raise ConfigError(
            f"--step-batch-size-schedule {schedule!r} has thresholds {thresholds}",
            why="they start at 0 and rise",
            fix='for example "0:384 3B:768 12B:1536"',
        )
    return steps


def build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> NumMicroBatchesCalculator:
    """The calculator that the flags ask for.

    Raises: ConfigError for numbers that cannot be run, or two plans at once.
    """
    if step_batch_size_schedule is not None:
        clashing = "--rampup-batch-size" if rampup_batch_size else "--decrease-batch-size-if-needed"
        if rampup_batch_size or decrease_batch_size_if_needed:
            raise ConfigError(
                f"--step-batch-size-schedule with {clashing}",
                why="the schedule states every size itself",
                fix=f"leave {clashing} out",
            )
        assert seq_length is not None, "a schedule in tokens needs the sequence length"
        return StepBatchsizeNumMicroBatchesCalculator(
            step_batch_size_schedule, seq_length, micro_batch_size, data_parallel_size, global_batch_size, rank
        )
    assert global_batch_size is not None, "derived from micro-batch size and ranks before"
    if rampup_batch_size is None:
        return ConstantNumMicroBatchesCalculator(
            global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank
        )
    if len(rampup_batch_size) != 3:
        raise ConfigError(
            f"--rampup-batch-size {' '.join(map(str, rampup_batch_size))}",
            why="it takes three numbers: start, increment, samples",
            fix="--rampup-batch-size START INCREMENT SAMPLES",
        )
    start, increment, samples = map(int, rampup_batch_size)
    return RampupBatchsizeNumMicroBatchesCalculator(
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
        rank,
        start,
        increment,
        samples,
    )


# -- the run's calculator ----------------------------------------------------------------------------------------

_calculator: NumMicroBatchesCalculator | None = None


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Make the run's calculator; once, else see `reconfigure_num_microbatches_calculator`."""
    assert _calculator is None, "the calculator is there already: reconfigure_num_microbatches_calculator"
    reconfigure_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
        step_batch_size_schedule,
        seq_length,
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> None:
    """Replace the run's calculator."""
    global _calculator
    _calculator = build_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
        step_batch_size_schedule,
        seq_length,
    )


def unset_num_microbatches_calculator() -> None:
    """Forget the run's calculator."""
    global _calculator
    _calculator = None


destroy_num_microbatches_calculator = unset_num_microbatches_calculator


def _the_calculator() -> NumMicroBatchesCalculator:
    assert _calculator is not None, "init_num_microbatches_calculator has not been called"
    return _calculator


def get_num_microbatches() -> int:
    """Micro-batches of the next step on each data-parallel rank."""
    return _the_calculator().get()


def get_current_global_batch_size() -> int:
    """The plan's global batch size now."""
    return _the_calculator().get_current_global_batch_size()


def get_micro_batch_size() -> int:
    """Samples a rank computes at once."""
    return _the_calculator().get_micro_batch_size()


def get_current_running_global_batch_size() -> int:
    """The global batch size that is really run now."""
    return _the_calculator().get_current_running_global_batch_size()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Move to the position `consumed_samples`; see `NumMicroBatchesCalculator.update`."""
    _the_calculator().update(consumed_samples, consistency_check, verbose)
