"""Megatron's flags that do nothing here: read from two tables beside this file.

    noted_flags.tsv      what buys speed or memory on special hardware, or is obsolete: accepted, and a line says what
                         is done instead
    refused_flags.tsv    what is no part of this project (Megatron's reinforcement learning, vision, ...)

Every flag of both parses with Megatron's type, choices and default; given its default it passes in silence. Columns:
spellings; kind (`off:x`: a switch that sets x to false; `pair`: `--x` and `--no-x`); default (empty: None); choices;
a key of the dictionaries below, with `=v,w` when only these values are meant; help.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_lite.config import KINDS, Flag, destination

# key -> what is done instead: these buy speed or memory on special hardware and never change numbers
NOTICES = {
    "notice:exchange": "experts' tokens travel in the order of the micro-batches, which gives the same numbers; "
    "--moe-shared-expert-overlap hides a part of it",
    "notice:eager": "steps run without CUDA graphs",
    "notice:flex": "the dispatcher whose kernels it chooses needs a vendor's library",
    "notice:fp8 storage": "weights are kept and gathered in the model's own format, and cast where they are used",
    "notice:fsdp memory": "torch keeps the memory of what travels",
    "notice:fsdp outer": "each copy of the weights has its whole optimizer state, shared out over its ranks",
    "notice:fsdp units": "layers are gathered whole",
    "notice:host copies": "the optimizer's gradients and weights are copied to the host and back in one piece each",
    "notice:host torch": "what steps on the host is torch's optimizer",
    "notice:nccl": "NCCL keeps its defaults",
    "notice:no extra groups": "there are no extra CPU groups to leave out",
    "notice:offload": "everything stays on the device",
    "notice:overlap": "--tp-comm-overlap sends parts between ranks as it is; there are no user buffers to set up",
    "notice:padding": "casts to FP8 are simulated, and their products take any number of tokens",
    "notice:permute": "tokens and their weights are sorted in one pass as it is",
    "notice:router": "the router's steps are not fused into one kernel",
    "notice:broadcast": "parts that other ranks have read are sent by broadcast, which gives the same tensors",
    "notice:no gather": "the optimizer's state is written without gathering it",
    "notice:one writer": "--async-save has one way to write beside the training",
    "notice:reshardable": "the optimizer's state can always be loaded under any layout",
    "notice:shared memory": "--async-save always hands tensors over in shared memory",
    "notice:unfused": "there is no such kernel to turn off",
    "no effect": "",  # obsolete in Megatron as well: in silence
}

# Flags of configs that ask for what every run does, or that another one decides: name -> what is so. Told where typed.
AS_IT_IS = {
    "add_position_embedding": "rotary positions, or none, have no table",
    "cross_entropy_fusion_impl": "the loss is computed by the same lines in every run",
    "cross_entropy_loss_fusion": "the loss is computed in one piece in every run, with the same numbers",
    "local_rank": "the launcher's LOCAL_RANK says which process of its machine this is",
    "pipeline_model_parallel_comm_backend": "stages talk over the library that all ranks talk over",
    "retro_attention_gate": "there is no gate on the cross attention",
    "use_cpu_initialization": "initial weights are drawn on the CPU in every run",
}

# key -> (reason, alternative)
REASONS = {
    "adlr": ("it talks to one company's cluster", "--exit-duration-in-mins, --exit-signal-handler"),
    "biencoder": (
        "bi-encoder training was removed from Megatron as well",
        "BERT with --output-bert-embeddings, or Retro",
    ),
    "checkpoint internals": ("it tunes Megatron's own checkpoint format", "leave it out"),
    "derived": ("its value is derived", "--mup-base-hidden-size for the width; nothing for the other"),
    "distillation": ("distillation from stored logits is not part of this project", "plain training"),
    "experimental layers": ("the layer is experimental", "standard attention, --group-query-attention, --window-size"),
    "gpu kernels": ("it chooses among vendor kernels that are not used here", "leave it out"),
    "inference": ("inference here is small", "megatron-lite generate, or export to Hugging Face for a serving engine"),
    "largest scores": (
        "it needs the largest score of every head, which no fused attention gives",
        "--qk-layernorm or --qk-l2-norm, which bound the scores",
    ),
    "layer-wise": ("there is one parameter layout", "leave it out"),
    "local checkpoints": (
        "local checkpoints are each rank's own part, without copies on other machines",
        "--non-persistent-ckpt-type local alone, or global",
    ),
    "mamba": (
        "hybrid models with state-space (Mamba) layers come later, if at all",
        "attention layers; --group-query-attention, --multi-latent-attention and --window-size make them cheaper",
    ),
    "mtp hsm": ("it is experimental", "--mtp-num-layers alone"),
    "object storage": (
        "prefixes as s3://bucket/corpus are read through the package fsspec",
        "leave it out: the .idx of such a corpus is kept below --data-cache-path",
    ),
    "optimizers": (
        "it is an experiment of Megatron's, from a package of its own",
        "--optimizer adam, sgd, lion or muon",
    ),
    "onnx": ("there is no export to ONNX", "export to Hugging Face"),
    "outside manager": ("process groups are made at start-up", "the Python API takes your own process groups"),
    "per-sample cp": ("the context-parallel size is one for all samples", "--context-parallel-size"),
    "remote code": ("it would run code that was downloaded", "files of the tokenizer on disk"),
    "resiliency": (
        "it needs NVIDIA's resiliency package",
        "torchrun --max-restarts with --save-interval, and --rerun-mode",
    ),
    "retro preprocessing": (
        "it says how a project is prepared, and training reads the outcome from the project's config.json",
        "megatron-lite retro preprocess with this flag",
    ),
    "rl": ("reinforcement learning is out of scope", "train here, export to Hugging Face, use a framework for it"),
    "router experiments": ("it is for experiments with the router", "--moe-router-load-balancing-type"),
    "tokenizers": ("it is a third party's", "--tokenizer-type HuggingFaceTokenizer with local files"),
    "vendor communication": ("it needs vendor communication kernels", "--moe-token-dispatcher-type alltoall"),
    "vendor kernels": ("it needs vendor kernels", "--bf16"),
    "vendor services": ("it reports to a vendor's service", "TensorBoard, W&B"),
    "vision": ("text models only", "leave it out"),
    "torch format": (
        "one file a model-parallel rank fits no other layout",
        "--ckpt-format torch_dist, which any layout loads",
    ),
    "inference layers": ("those layers cannot be trained", "--transformer-impl local; megatron-lite serve"),
    "weight shards": ("there is no extra axis of weight shards", "--use-megatron-fsdp, or more tensor parallelism"),
}

# Values of flags that work, which are refused: destination -> value -> key of REASONS.
REFUSED_VALUES: dict[str, dict[str, str]] = {
    "optimizer": dict.fromkeys(("soap", "adaptive_muon"), "optimizers"),
    "ckpt_convert_format": {"torch": "torch format"},
    "ckpt_format": {"torch": "torch format"},
    "transformer_impl": {"inference_optimized": "inference layers"},
}


@dataclass(frozen=True)
class Row:
    """A flag of one of the tables, and the key that says why it does nothing."""

    flag: Flag
    key: str
    values: tuple[str, ...] = ()  # only these values are meant; empty: every value but the default

    def concerns(self, value: object) -> bool:
        if self.values:
            return str(value) in self.values
        return value not in (self.flag.default, [self.flag.default])


@cache
def noted() -> tuple[Row, ...]:
    return _read("noted_flags.tsv")


@cache
def refused() -> tuple[Row, ...]:
    return _read("refused_flags.tsv")


def _read(name: str) -> tuple[Row, ...]:
    lines = (Path(__file__).parent / name).read_text(encoding="ascii").splitlines()
    return tuple(_row(*line.split("\t")) for line in lines[1:])


def _row(spellings: str, kind: str, default: str, choices: str, key: str, help: str) -> Row:
    words = tuple(spellings.split())
    key, _, values = key.partition("=")
    flag = _flag(words, kind, default, tuple(choices.split()), help)
    return Row(flag, key, tuple(values.split(",")) if values else ())


def _flag(words: tuple[str, ...], kind: str, default: str, choices: tuple[str, ...], help: str) -> Flag:
    name = destination(words[0])
    if kind.startswith("off:"):
        return Flag(kind.removeprefix("off:"), words, "switch", True, help, stores=False)
    if kind == "pair":
        return Flag(name, words[:1], "switch", default == "on", help, stores=True, negations=words[1:])
    if kind == "switch":
        return Flag(name, words, "switch", False, help, stores=True)
    parse = KINDS[kind][0]
    assert parse is not None, words
    value: object
    if default == "":
        value = None
    elif default == '""':
        value = ""
    elif default.startswith("["):
        value = [parse(word) for word in default.strip("[]").split()]
    else:
        value = parse(default)
    return Flag(name, words, kind, value, help, choices=tuple(parse(word) for word in choices) or None)
