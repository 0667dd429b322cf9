"""Schedules as data, and what runs them.

actions    which micro-batch goes forward or backward next, as a list    (pure)
executor   runs such a list
schedules  Megatron's `get_forward_backward_func`
"""

from megatron_lite.pipeline_parallel.schedules import get_forward_backward_func

__all__ = ["get_forward_backward_func"]
