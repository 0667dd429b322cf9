"""What srun, mpirun and torchrun say, as torchrun's variables."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.errors import ConfigError
from megatron_lite.training.launch import Launch, checked, first_host, translated

HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def slurm(rank: int, nodes: str = "gpu[07-09,12]", tasks: str = "4(x3),2", node: int = 1) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "14",
        "SLURM_LOCALID": str(rank % 4),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": str(node),
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
    }


def test_a_task_of_srun() -> None:
    found = translated(slurm(5))
    port = found.pop("MASTER_PORT")
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "14",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
    }
    assert 20000 <= int(port) < 30000
    assert translated(slurm(13))["MASTER_PORT"] == port  # the same for every rank
    assert translated({**slurm(5), "SLURM_JOB_ID": "4712"})["MASTER_PORT"] != port
    assert translated(slurm(13, node=3))["LOCAL_WORLD_SIZE"] == "2"


def test_what_is_set_wins() -> None:
    assert translated({**slurm(0), "RANK": "0", "WORLD_SIZE": "8"}) == {}  # torchrun inside srun
    assert "MASTER_ADDR" not in translated({**slurm(5), "MASTER_ADDR": "head"})


def test_a_script_of_sbatch_is_one_process() -> None:
    """It sees the job's variables, but no step's: nobody started its siblings."""
    assert translated({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) == {}


def open_mpi(rank: int, world: int, local: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
        "PMIX_NAMESPACE": "prterun-x-1",
    }


def test_a_process_of_mpirun() -> None:
    found = translated(open_mpi(3, 4, 4))
    assert checked({**found}) == Launch(3, 4, 3, 4)
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert translated({**open_mpi(3, 8, 4), **HERE}) == {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
    }


def test_mpirun_on_many_machines_asks_for_the_address() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        translated(open_mpi(3, 8, 4))


@pytest.mark.parametrize("variables", [{}, open_mpi(0, 1, 1), {**slurm(0), "SLURM_STEP_NUM_TASKS": "1"}])
def test_one_process_needs_no_launcher(variables: dict[str, str]) -> None:
    assert translated(variables) == {}
    assert checked(translated(variables)) == Launch()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"SLURM_PROCID": "zero"}, "SLURM_PROCID=zero"),
        ({"SLURM_STEP_NODELIST": "[1-4]"}, "SLURM_STEP_NODELIST"),
    ],
)
def test_nonsense_of_a_scheduler_is_named(changed: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        translated({**slurm(5), **changed})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"RANK": "abc"}, "RANK=abc"),
        ({"RANK": "5"}, "RANK=5"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=4"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        ({"MASTER_ADDR": "no such host"}, "MASTER_ADDR=no such host"),
        ({"MASTER_ADDR": "a" * 70}, "MASTER_ADDR=a"),
    ],
)
def test_C143_nonsense_is_named_at_once(changed: dict[str, str], named: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=named):
        checked({"RANK": "1", "WORLD_SIZE": "2", **HERE, **changed})
    assert time.monotonic() - began < 5


@given(st.from_regex(r"[a-z]+[0-9]{0,2}", fullmatch=True), st.integers(0, 9), st.integers(1, 9))
def test_the_first_machine_of_a_list(name: str, first: int, more: int) -> None:
    assert first_host(f"{name},other") == name
    assert first_host(f"{name}-[{first:02d}-{first + more:02d}],other[1-2]") == f"{name}-{first:02d}"
    assert first_host(f"{name}[{first},{first + more}].cluster") == f"{name}{first}.cluster"
