"""Stand-ins for parts that a layer does without."""

from __future__ import annotations

from typing import Any

from torch import nn


class IdentityOp(nn.Module):
    """Returns its first argument. Takes any constructor arguments, so that a spec can name it for any part."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """x, untouched."""
        return x


class IdentityFuncOp(IdentityOp):
    """Returns `IdentityOp`'s forward: stands for functions that return functions, such as bias-dropout-add's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The identity function."""
        return super().forward
