"""`examples/bert`: its words are flags of pretrain_bert.py, and its run trains when it is made small."""

import subprocess

import pytest

from megatron_lite.cli import verify
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.families import defaults_of
from tests.e2e.launch import ROOT, environment

SCRIPT = ROOT / "examples/bert/train_bert_340m_distributed.sh"


def started() -> tuple[list[str], list[str]]:
    """The launcher's words, and the flags of the run."""
    done = subprocess.run(
        ["bash", str(SCRIPT), "checkpoints", "tensorboard", "vocab.txt", "corpus"],
        env=environment(LAUNCHER="echo"),
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split()
    at = words.index("pretrain_bert.py")
    return words[:at], words[at + 1 :]


def test_its_run_may_start_on_eight_gpus_and_is_berts_larger_size():
    launcher, flags = started()
    assert launcher[launcher.index("--nproc_per_node") + 1] == "8"
    args = validate_args(parse_args(flags, args_defaults=defaults_of("bert")), 8)
    assert (args.num_layers, args.hidden_size, args.num_attention_heads, args.seq_length) == (24, 1024, 16, 512)
    layer = 12 * args.hidden_size**2 + 13 * args.hidden_size
    assert 330e6 < args.num_layers * layer + (30592 + 512 + 2) * args.hidden_size < 350e6


@pytest.mark.slow
def test_made_small_it_trains_as_one_process_does(capfd):
    """Its flags, half precision too, on four tensor-parallel ranks."""
    _, flags = started()
    status = verify.main(["--script", str(ROOT / "pretrain_bert.py"), "--ranks", "8", "--steps", "2", *flags])
    out = capfd.readouterr().out
    assert status == 0, out
    assert "fp32: largest deviation" in out and "fp16: largest deviation" in out
