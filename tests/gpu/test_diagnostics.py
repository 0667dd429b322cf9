"""What looks at a run, on a real GPU: the driver's counter, nsys' range, the allocator's history, largest scores."""

import pickle

import pytest
import torch

from megatron_lite.fusions.largest_score import LargestScore
from megatron_lite.training.energy import counter_of
from tests.e2e.launch import TINY, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and a torch that is built for it"),
]


def test_the_boards_energy_grows_while_it_computes():
    device = torch.device("cuda", 0)
    counter = counter_of(device)
    before = counter.joules()
    x = torch.randn(4096, 4096, device=device)
    for _ in range(300):
        x = torch.nn.functional.normalize(x @ x)
    torch.cuda.synchronize()
    assert 1.0 < counter.joules() - before < 100_000.0


def test_largest_scores_equal_those_of_a_cpu():
    q, k = torch.randn(2, 8, 300, 64), torch.randn(2, 2, 300, 64)
    found = []
    for device in ("cpu", "cuda"):
        largest = LargestScore()
        largest.note(q.to(device), k.to(device), None, True, 0.125)
        found.append(largest.value.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=2e-3)  # the GPU may round inputs to TF32


def test_a_run_is_marked_for_nsys_and_leaves_snapshots_of_its_memory(tmp_path):
    """Without nsys the marks do nothing; the run must go through them all the same."""
    flags = """--train-iters 4 --profile --profile-step-start 2 --profile-step-end 4 --nvtx-ranges --record-shapes
        --record-memory-history --log-energy --log-device-memory-used --log-max-attention-logit""".split()
    done = run(*TINY, *flags, "--memory-snapshot-path", tmp_path / "snapshot.pickle").ok()
    assert all(float(line["power per GPU (W/GPU)"]) > 1.0 for line in done.lines)
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])
    assert "total device memory used: " in done.out
