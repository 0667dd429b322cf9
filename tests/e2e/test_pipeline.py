"""Pipeline stages under torchrun: a run whose layout changes at every stop, a resume bit for bit, evaluation."""

import pytest
import torch

from megatron_lite.checkpointing import folders
from megatron_lite.checkpointing.checkpoint import read_common
from tests.e2e.launch import TINY, checkpoint_tensors, run, torchrun
from tests.e2e.test_tensor_parallel import validations

pytestmark = pytest.mark.slow
MODEL = [*TINY, "--num-layers", 4, "--log-params-norm"]
PP2 = ["--pipeline-model-parallel-size", 2]
INTERLEAVED = [*PP2, "--num-virtual-stages-per-pipeline-rank", 2]
ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000".split()
EVALUATED = [*MODEL, *"--train-iters 12 --eval-interval 4 --eval-iters 3".split()]
FIELDS = ("lm loss", "grad norm", "params norm")


@pytest.fixture(scope="module")
def alone():
    """The reference: one process."""
    return run(*EVALUATED).ok()


def joined(parts, field):
    return [value for part in parts for value in part.values(field)]


def test_c071_a_run_changes_its_pipeline_at_every_stop(alone, tmp_path):
    """C071: a tied table that counts twice. And one that is written twice or not at all, layers under the number that
    they have in their chunk, moments of another chunk: each is a jump in the loss or in a norm of the next part."""
    save = [*EVALUATED, "--save", tmp_path, "--load", tmp_path, "--save-interval", 100, "--exit-interval", 3]
    parts = [
        torchrun(2, *save, *PP2, "--delay-wgrad-compute").ok(),
        run(*save).ok(),
        torchrun(4, *save, *INTERLEAVED, "--tensor-model-parallel-size", 2, "--sequence-parallel", *ZERO1).ok(),
        torchrun(2, *save, *ZERO1).ok(),
    ]
    assert [part.values("iteration") for part in parts] == [[i, i + 1, i + 2] for i in range(1, 12, 3)]
    for field in FIELDS:
        assert joined(parts, field) == pytest.approx(alone.values(field), rel=1e-5), field
    assert alone.values("lm loss")[-1] < alone.values("lm loss")[0]


def test_an_interleaved_run_resumes_bit_for_bit(tmp_path):
    """With dropout: each stage's generators are in the checkpoint, and each chunk's moments."""
    flags = [*MODEL, *INTERLEAVED, "--train-iters", 6, "--attention-dropout", 0.1, "--hidden-dropout", 0.1]
    whole = torchrun(2, *flags, "--save", tmp_path / "whole", "--save-interval", 3).ok()
    again = ["--load", tmp_path / "whole", "--ckpt-step", 3, "--save", tmp_path / "again", "--save-interval", 100]
    rest = torchrun(2, *flags, *again).ok()
    for field in (*FIELDS, "learning rate", "consumed samples"):
        assert [line[field] for line in rest.lines] == [line[field] for line in whole.lines[3:]], field
    one, other = checkpoint_tensors(tmp_path / "whole"), checkpoint_tensors(tmp_path / "again")
    assert one.keys() == other.keys() and len(one) > 20
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def test_c062_evaluation_under_a_pipeline(alone, tmp_path):
    """C062: with 2 micro-batches each of the 3 iterations of an evaluation reads one global batch, not two. Stages and
    replicas together, an exit and a resume: losses and evaluations of one process."""
    save = [*EVALUATED, *PP2, *ZERO1, "--save", tmp_path, "--load", tmp_path, "--save-interval", 100]
    parts = [torchrun(4, *save, "--exit-interval", 6).ok(), torchrun(4, *save).ok()]
    assert [part.values("iteration") for part in parts] == [[*range(1, 7)], [*range(7, 13)]]
    assert read_common(folders.find(tmp_path, 6))["consumed_valid_samples"] == 3 * 8
    for field in FIELDS:
        assert joined(parts, field) == pytest.approx(alone.values(field), rel=1e-5), field
    seen = [loss for part in parts for loss in validations(part)]
    assert seen == pytest.approx(validations(alone), rel=1e-5) and len(seen) >= 3
    assert len(set(seen)) == len(seen)  # each evaluation goes on where the one before stopped
