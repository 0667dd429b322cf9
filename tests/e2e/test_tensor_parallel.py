"""Two processes that split every layer are one process, to rounding; a checkpoint of either resumes on the other."""

import pytest

from tests.e2e.launch import TINY, run, torchrun

pytestmark = pytest.mark.slow
FLAGS = [*TINY, *"--train-iters 8 --eval-interval 4 --eval-iters 2 --log-params-norm --save-interval 4".split()]
SPLIT = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("split")


@pytest.fixture(scope="module")
def alone(folders):
    """The reference: one process."""
    return run(*FLAGS, "--save", folders[0]).ok()


@pytest.fixture(scope="module")
def split(folders):
    return torchrun(2, *FLAGS, *SPLIT, "--save", folders[1]).ok()


def same(got, want, begin=0):
    for field in ("lm loss", "grad norm", "params norm"):
        assert got.values(field) == pytest.approx(want.values(field)[begin:], rel=1e-5), field


def validations(done):
    lines = [line for line in done.out.splitlines() if line.startswith(" validation loss at")]
    return [float(line.split("lm loss value: ")[1].split()[0]) for line in lines]


def test_two_ranks_that_split_layers_train_as_one(alone, split):
    """A norm whose gradient is not summed over the ranks, or counted twice, shows in the first grad norm."""
    same(split, alone)
    assert split.values("consumed samples") == alone.values("consumed samples") and len(split.lines) == 8
    assert validations(split) == pytest.approx(validations(alone), rel=1e-5) and len(validations(split)) >= 3
    assert split.values("lm loss")[-1] < split.values("lm loss")[0]


def test_parameters_of_each_rank_are_told(split):
    lines = [line for line in split.out.splitlines() if "number of parameters on (tensor, pipeline)" in line]
    assert sorted(line.split("rank ")[1].split(":")[0] for line in lines) == ["(0, 0)", "(1, 0)"]


def test_a_split_checkpoint_resumes_on_one_rank(alone, split, folders):
    same(run(*FLAGS, "--load", folders[1], "--ckpt-step", 4).ok(), alone, 4)


def test_the_checkpoint_of_one_rank_resumes_split(alone, folders):
    same(torchrun(2, *FLAGS, *SPLIT, "--load", folders[0], "--ckpt-step", 4).ok(), alone, 4)
