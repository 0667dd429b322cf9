"""Schedules as data, and what runs them.

stage_layout       which stage holds which layers                        (pure)
actions            which pass comes next on which stage, as lists        (pure)
schedule_check     proves such lists and times them                      (pure)
p2p_communication  messages between stages
executor           runs a list
schedules          Megatron's `get_forward_backward_func`
"""

from typing import TYPE_CHECKING

from megatron_lite.faces import lazy_face

if TYPE_CHECKING:
    from megatron_lite.pipeline_parallel.schedules import get_forward_backward_func as get_forward_backward_func

__getattr__, __dir__, __all__ = lazy_face(__name__, {"schedules": ["get_forward_backward_func"]})
