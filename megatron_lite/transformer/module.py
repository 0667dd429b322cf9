"""The base class of modules, and the wrapper that runs a model in half precision.

fp32 inputs -> half -> module (parameters in half) -> half -> fp32 outputs
(first stage only)                                    (last stage only)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.model_parallel_config import ModelParallelConfig


class MegatronModule(nn.Module):
    """An `nn.Module` that knows its config.

    Args:
        config: the transformer's (or any model-parallel) config.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """`state_dict`, under the name that scripts written for Megatron call."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def set_is_first_microbatch(self) -> None:
        """Tell the parts that cache something per step (Transformer Engine's fp8 weights) that a step begins."""
        for module in self.modules():
            if hasattr(module, "is_first_microbatch"):
                setattr(module, "is_first_microbatch", True)  # noqa: B010  (modules type their attributes as tensors)


def conversion_helper(value: Any, conversion: Any) -> Any:
    """Apply `conversion` to the leaves of nested tuples and lists."""
    if isinstance(value, (tuple, list)):
        return type(value)(conversion_helper(v, conversion) for v in value)
    return conversion(value)


def fp32_to_float16(value: Any, float16_convertor: Any) -> Any:
    """Convert the fp32 tensors among `value` (nested tuples, lists); others pass."""
    return conversion_helper(
        value, lambda x: float16_convertor(x) if isinstance(x, Tensor) and x.dtype == torch.float32 else x
    )


def float16_to_fp32(value: Any) -> Any:
    """Convert the fp16 and bf16 tensors among `value` to fp32; others pass."""
    return conversion_helper(
        value, lambda x: x.float() if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x
    )


class Float16Module(MegatronModule):
    """A model whose parameters are fp16 or bf16 (`config.fp16`, `config.bf16`), fp32 outside.

    The state dict is the module's own: no prefix. Attributes of parameters survive the conversion.
    """

    def __init__(self, config: ModelParallelConfig, module: nn.Module):
        super().__init__(config)
        assert config.fp16 or config.bf16, "Float16Module wants config.fp16 or config.bf16"
        self.module: Any
        self._dtype = torch.bfloat16 if config.bf16 else torch.float16
        self.fp16, self.bf16 = config.fp16, config.bf16
        self.module = module.to(self._dtype)
        self.pre_process = getattr(module, "pre_process", True)
        self.post_process = getattr(module, "post_process", True)
        self.vp_stage = getattr(module, "vp_stage", None)

    def float16_convertor(self, value: Tensor) -> Tensor:
        """To the half dtype."""
        return value.to(self._dtype)

    def set_input_tensor(self, input_tensor: Any) -> Any:
        """What the stage before sent."""
        return self.module.set_input_tensor(input_tensor)

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """The module's forward: fp32 inputs are narrowed on the first stage, outputs widened on the last."""
        if self.pre_process:
            inputs = fp32_to_float16(inputs, self.float16_convertor)
            kwargs = {name: fp32_to_float16(value, self.float16_convertor) for name, value in kwargs.items()}
        outputs = self.module(*inputs, **kwargs)
        return float16_to_fp32(outputs) if self.post_process and fp32_output else outputs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """The module's."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """The module's."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
