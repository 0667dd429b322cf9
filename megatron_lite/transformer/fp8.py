"""The fields of TransformerConfig that concern FP8, and which layers cast. No torch at import.

What is cast and how: `fusions/fp8`; scales over ranks and steps: `tensor_parallel/fp8`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_lite.config import flag
from megatron_lite.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lite.fusions.fp8 import Recipe

RECIPES = ("tensorwise", "delayed", "mxfp8", "blockwise", "custom")


@dataclass(kw_only=True)
class Fp8Config:
    """Linear layers of the transformer's layers in FP8: the numbers of it, by casts; not its speed."""

    num_layers: int

    fp8: str | None = flag(
        None,
        "Cast what linear layers multiply to FP8: all to e4m3, or gradients of outputs to e5m2 (hybrid). "
        "Products stay the model's own.",
        name="--fp8-format",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = flag("delayed", "FP8: where scales come from.", choices=RECIPES)
    fp8_amax_history_len: int = flag(1, "FP8, delayed: steps that scales look back on.")
    fp8_amax_compute_algo: str = flag(
        "most_recent", "FP8, delayed: the last of them counts, or the largest.", choices=("most_recent", "max")
    )
    fp8_margin: int = flag(0, "FP8, delayed: powers of two that scales leave free.")
    fp8_wgrad: bool = flag(
        True, "FP8: weight gradients from operands that are not cast.", off=("--no-fp8-wgrad", "--disable-fp8-wgrad")
    )
    first_last_layers_bf16: bool = flag(False, "FP8: the first and last layers do not cast.")
    num_layers_at_start_in_bf16: int = flag(1, "FP8, --first-last-layers-bf16: how many at the start.")
    num_layers_at_end_in_bf16: int = flag(1, "FP8, --first-last-layers-bf16: how many at the end.")

    def fp8_recipe_of(self, layer_number: int) -> Recipe | None:
        """How a layer, counted from 1, casts; None: not at all."""
        if self.fp8 is None:
            return None
        if self.first_last_layers_bf16 and not (
            self.num_layers_at_start_in_bf16 < layer_number <= self.num_layers - self.num_layers_at_end_in_bf16
        ):
            return None
        import torch

        from megatron_lite.fusions.fp8 import Recipe

        return Recipe(
            self.fp8_recipe,
            backward=torch.float8_e5m2 if self.fp8 == "hybrid" else torch.float8_e4m3fn,
            margin=self.fp8_margin,
            wgrad=self.fp8_wgrad,
            history=self.fp8_amax_history_len,
            largest_of_history=self.fp8_amax_compute_algo == "max",
        )


def fp8_problems(config: Any) -> Iterator[ConfigError]:
    """What cannot be, of anything with the fields of Fp8Config, `fp8` perhaps under its flag's name."""
    if getattr(config, "fp8_format", None) is None and getattr(config, "fp8", None) is None:
        return
    if config.fp8_recipe not in RECIPES or config.fp8_recipe == "custom":
        yield ConfigError(
            f"--fp8-recipe {config.fp8_recipe}",
            why="a recipe of one's own is a class of Transformer Engine's, and its casts are not used here",
            fix="tensorwise, delayed, blockwise or mxfp8",
        )
    if config.fp8_amax_history_len < 1:
        yield ConfigError(
            f"--fp8-amax-history-len {config.fp8_amax_history_len}",
            why="delayed scales look back on a step at least",
            fix="1, or 1024 with --fp8-amax-compute-algo max",
        )
    if not config.first_last_layers_bf16:
        return
    if config.fp8_recipe == "delayed":
        yield ConfigError(
            "--first-last-layers-bf16 with --fp8-recipe delayed",
            why="Megatron has it with other recipes only, and runs should mean the same there and here",
            fix="--fp8-recipe tensorwise, blockwise or mxfp8",
        )
    first, last, layers = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16, config.num_layers or 0
    if first + last >= layers > 0:
        yield ConfigError(
            f"--first-last-layers-bf16 with {first} layers at the start and {last} at the end, of {layers}",
            why="no layer is left to cast, and the run would not be one in FP8",
            fix="smaller --num-layers-at-start-in-bf16 and --num-layers-at-end-in-bf16, or leave --fp8-format out",
        )
    most = layers // max(config.pipeline_model_parallel_size, 1)
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if not 0 <= getattr(config, name) <= most:
            yield ConfigError(
                f"--{name.replace('_', '-')} {getattr(config, name)}",
                why=f"a pipeline stage has {most} layers",
                fix=f"0 to {most}",
            )
