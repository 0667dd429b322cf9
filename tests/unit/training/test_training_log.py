"""The names of timers, and the line on a terminal."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_lite.training.training_log import _TIMERS

PACKAGE = Path(__file__).parents[3] / "megatron_lite"


def test_every_timer_of_a_step_is_printed():
    """Times of messages between stages were taken, and stood nowhere."""
    text = "\n".join(path.read_text() for path in [*PACKAGE.rglob("*.py"), *PACKAGE.parent.glob("pretrain_*.py")])
    taken = set(re.findall(r'timers\("([a-z-]+)", log_level=[12]\)', text))
    taken |= set(re.findall(r'_timed\((?:config, )?"([a-z-]+)"', text))
    for call in re.findall(r"self\._timer\((.*?)\)[,:]", text):
        taken |= set(re.findall(r'"([a-z-]+)"', call))
    assert {"forward-recv", "backward-send", "optimizer", "all-grads-sync", "batch-generator"} <= taken
    assert taken == set(_TIMERS)
