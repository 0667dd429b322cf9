"""Why a checkpoint does not fit: one error that names the tensors and guesses the flag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megatron_lite.errors import CheckpointError

_SHOWN = 6


def describe_mismatch(
    folder: Path, missing: list[str], unexpected: list[str], shapes: Mapping[str, tuple[str, str]]
) -> CheckpointError:
    """The error for a checkpoint whose tensors are not those of the run.

    Args:
        missing: names that the run has and the checkpoint lacks.
        unexpected: the other way round.
        shapes: name -> (in the checkpoint, in the run), shapes or dtypes.
    """
    lines = []
    if missing:
        lines.append(f"    {len(missing)} missing in it: {_some(missing)}")
    if unexpected:
        lines.append(f"    {len(unexpected)} unknown to this run: {_some(unexpected)}")
    if shapes:
        names = [f"{name} {there} there, {here} here" for name, (there, here) in sorted(shapes.items())]
        lines.append(f"    {len(shapes)} of another shape or type: {_some(names)}")
    why, fix = _guess(missing, unexpected, shapes)
    return CheckpointError(f"the tensors of {folder} are not those of this run:\n" + "\n".join(lines), why=why, fix=fix)


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _guess(missing: list[str], unexpected: list[str], shapes: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """The likely cause and the flag to change. Optimizer state follows the weights, so weights are looked at first."""

    def weights(names: list[str]) -> list[str]:
        return [name for name in names if not name.startswith("optimizer.")]

    lacking, extra, reshaped = weights(missing), weights(unexpected), weights(list(shapes))
    if not (lacking or extra or reshaped):
        if not unexpected and not shapes:
            return (
                "it holds no such optimizer state: saved with --no-save-optim, or with another --optimizer",
                "--no-load-optim starts the optimizer afresh",
            )
        return "another --optimizer, or other flags of it", "the --optimizer of the checkpoint, or --no-load-optim"
    if not reshaped:
        for pattern, why, fix in _NAMES:
            if all(re.search(pattern, name) for name in lacking + extra):
                return why, fix
        one_sided = lacking or extra
        if not (lacking and extra) and all(_LAYER.search(name) for name in one_sided):
            which = "fewer" if lacking else "more"
            return f"the checkpoint has {which} layers", "--num-layers of the checkpoint, or --use-checkpoint-args"
    elif not (lacking or extra):
        for pattern, why, fix in _SHAPES:
            if all(re.search(pattern, name) for name in reshaped):
                return why, fix
    return "the model was built with other flags than the checkpoint's", "--use-checkpoint-args takes them from there"


_LAYER = re.compile(r"\blayers\.\d+\.")
_NAMES = [  # all names that are on one side only match -> why, fix
    (r"\.bias$", "one of the two has biases", "--disable-bias-linear and --add-qkv-bias as in the checkpoint"),
    (r"position_embeddings", "the kinds of positions differ", "--position-embedding-type of the checkpoint"),
    (
        r"^output_layer\.",
        "one of the two has an output layer of its own",
        "--untie-embeddings-and-output-weights as in the checkpoint",
    ),
    (r"\b[qk]_layernorm\.", "one of the two normalises queries and keys", "--qk-layernorm as in the checkpoint"),
]
_SHAPES = [  # all tensors of another shape match -> why, fix
    (
        r"word_embeddings|^output_layer\.",
        "the padded vocabularies differ: another tokenizer, or other padding",
        "the tokenizer, --make-vocab-size-divisible-by and tensor-parallel size of the checkpoint",
    ),
    (r"position_embeddings", "the position tables differ", "--max-position-embeddings of the checkpoint"),
]
