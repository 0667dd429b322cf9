"""`examples/mixtral`: its words are flags of pretrain_gpt.py, its YAML twin says the same, and made small it trains."""

import subprocess

import pytest

from megatron_lite.cli import verify
from megatron_lite.training.arguments import parse_args, validate_args
from megatron_lite.training.families import defaults_of
from tests.e2e.launch import ROOT, environment

SCRIPT = ROOT / "examples/mixtral/train_mixtral_8x7b_distributed.sh"


def started() -> tuple[list[str], list[str]]:
    """The launcher's words, and the flags of the run."""
    done = subprocess.run(
        ["bash", str(SCRIPT), "checkpoints", "tokenizer.model", "corpus"],
        env=environment(LAUNCHER="echo"),
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split()
    at = words.index("pretrain_gpt.py")
    return words[:at], words[at + 1 :]


def resolved(words: list[str]):
    return validate_args(parse_args(words, args_defaults=defaults_of("gpt")), 32)


def test_its_run_may_start_on_32_gpus_and_its_twin_says_the_same():
    launcher, flags = started()
    sizes = dict(zip(launcher[::2], launcher[1::2]))
    assert int(sizes["--nproc_per_node"]) * int(sizes["--nnodes"]) == 32
    script = vars(resolved(flags))
    machine = """--tokenizer-model tokenizer.model --data-path corpus --save checkpoints --load checkpoints
        --tensorboard-dir checkpoints/tensorboard""".split()
    twin = vars(resolved(["--config", str(ROOT / "configs/mixtral_8x7b.yaml"), *machine]))
    differing = {name for name in script.keys() | twin.keys() if script.get(name) != twin.get(name)}
    assert differing <= {"config", "typed"}
    hidden, expert = 4096, 3 * 4096 * 14336
    attention = hidden * (hidden + 2 * 1024) + hidden * hidden
    total = 32 * (8 * expert + 8 * hidden + attention + 2 * hidden) + 2 * 32000 * hidden + hidden
    assert total == 46_702_792_704 and (script["num_experts"], script["moe_router_topk"]) == (8, 2)


@pytest.mark.slow
def test_made_small_it_trains_as_one_process_does(capfd):
    """Two stages, experts on two ranks each, bf16 too."""
    _, flags = started()
    status = verify.main(["--script", str(ROOT / "pretrain_gpt.py"), "--ranks", "32", "--steps", "2", *flags])
    out = capfd.readouterr().out
    assert status == 0, out
    assert "on 2 rank(s)" in out and "bf16: largest deviation" in out
