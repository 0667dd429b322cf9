"""A script of `examples/` and the file of `configs/` with its settings make one configuration."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.training.arguments import parse_args, validate_args
from tests.e2e.launch import ROOT, environment

# script below examples/ -> file below configs/
TWINS = {
    "deepseek_v2_lite/train_deepseek_v2_lite_distributed.sh": "deepseek_v2_lite.yaml",
    "llama3_8b/train_llama3_8b_distributed.sh": "llama3_8b.yaml",
}
# What belongs to a machine: the file leaves it out.
OF_THE_MACHINE = "--tokenizer-model TOKENIZER --data-path DATA --save OUT --load OUT --tensorboard-dir OUT/tensorboard"
OF_THE_TEXT = {"config", "typed"}


def resolved(words: list[str], ranks: int) -> dict[str, Any]:
    values = vars(validate_args(parse_args(words), ranks))
    return {name: value for name, value in values.items() if name not in OF_THE_TEXT}


@pytest.mark.parametrize(("script", "config"), TWINS.items(), ids=lambda value: Path(value).stem)
def test_script_and_file_resolve_to_one_configuration(script: str, config: str) -> None:
    """A setting that one of the two lacks, or has otherwise, would train two models under one name."""
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / script), "OUT", "TOKENIZER", "DATA"],
        env=environment(LAUNCHER="echo"),
        capture_output=True,
        text=True,
        check=True,
    )
    launcher, _, flags = done.stdout.partition("pretrain_gpt.py")
    words = launcher.split()
    sizes = dict(zip(words[::2], words[1::2]))
    ranks = int(sizes["--nproc_per_node"]) * int(sizes["--nnodes"])
    file = ["--config", str(ROOT / "configs" / config), *OF_THE_MACHINE.split()]
    assert resolved(flags.split(), ranks) == resolved(file, ranks)
