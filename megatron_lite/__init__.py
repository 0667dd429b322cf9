"""megatron_lite: LLM pretraining with Megatron's flags, files and parallelism, on a laptop and on a cluster.

`from megatron_lite import mpu` is `megatron_lite.parallel_state`, as Megatron's users write it.
"""

import importlib
import os
from typing import Any

# libgomp's default lets an idle thread spin through its partner's time slice: on a busy machine 74 small operations
# cost two seconds instead of ten milliseconds. It reads this when torch loads, so it must be set before.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "mpu":
        return importlib.import_module("megatron_lite.parallel_state")
    raise AttributeError(f"module 'megatron_lite' has no attribute {name!r}")
