"""The matrix of layouts: every row trains the same model as one process does.

    Layout (a row)  --flags-->  arguments  -->  record_rank on every rank of a gloo world  -->  joined
                                                                                                  |  compare
                                one process, once for each model and precision  ------------------+

A row is data. A new dimension is a field here with its flags, and rows in the list of its test; nothing else changes.
What runs is what the model's script runs: start-up, DDP, optimizer, schedule, data, `train_step`.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from megatron_lite.training.arguments import parse_args
from megatron_lite.training.families import FAMILIES, defaults_of
from megatron_lite.training.layout_check import EPSILON, TOLERANCE, Deviation, compare
from megatron_lite.training.local_world import World
from megatron_lite.training.record import RankRecord, Record, joined, record_rank

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parents[1] / "golden" / "data" / "corpus_a"  # small: made-up data take seconds to index
SENTENCES = CORPUS.with_name("sentences")
# Of this checkout: a Retro project names its corpus.
CACHE = Path(tempfile.gettempdir()) / f"megatron_lite_layouts_{os.getuid()}_{crc32(str(ROOT).encode()):08x}"
STEPS = 5

# Eight heads in four groups, 512 tokens of vocabulary: all divide by 4. Norms above the clipping bound, so that a wrong
# norm changes the weights.
_SHAPE = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 8
    --global-batch-size 8 --data-cache-path {CACHE} --split 1,0,0
    --num-workers 0 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --train-iters {STEPS} --weight-decay 0.1
    --clip-grad 0.5 --adam-eps {EPSILON} --seed 1234"""
_GPT = f"""{_SHAPE} --seq-length 16 --max-position-embeddings 16 --data-path {CORPUS}
    --tokenizer-type NullTokenizer --vocab-size 511"""


def _vocabulary() -> Path:
    """A WordPiece vocabulary of 480 tokens for the corpus of sentences, whose ids are 10 to 199."""
    path = CACHE / "vocab.txt"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"{'##' * (i >= 130)}p{i}" for i in range(5, 480)]
    CACHE.mkdir(exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")  # worlds of other sessions may read it
    temporary.write_text("\n".join(tokens) + "\n")
    return temporary.replace(path)


_WORDS = f"""{_SHAPE} --data-path {SENTENCES} --vocab-file {_vocabulary()}"""

_T5 = f"""{_WORDS} --seq-length 32 --decoder-seq-length 16 --max-position-embeddings 32 --vocab-extra-ids 20
    --mask-prob 0.3"""


@dataclass(frozen=True)
class Model:
    """What a row trains: a family, whose script runs, and the flags of the model and its data."""

    family: str
    flags: str

    @property
    def script(self) -> Path:
        return ROOT / FAMILIES[self.family].script


_LLAMA = f"""{_GPT} --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights --ffn-hidden-size 96"""
_LATENT = f"""{_GPT} --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --ffn-hidden-size 96 --multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4
    --v-head-dim 5 --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8 --mscale-all-dim 1"""
MODELS = {
    "gpt2": Model("gpt", _GPT),
    "llama": Model("gpt", _LLAMA),
    "bert": Model("bert", f"{_WORDS} --seq-length 32 --max-position-embeddings 32"),
    "bert-rope": Model(
        "bert",
        f"""{_WORDS} --seq-length 32 --max-position-embeddings 32 --bert-no-binary-head --position-embedding-type rope
        --untie-embeddings-and-output-weights --short-seq-prob 0""",
    ),
    # Dense layers and layers of experts in turn, as Mixtral; and as DeepSeek-V3 routes.
    "mixtral": Model(
        "gpt",
        f"""{_LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48
        --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 1e-3 --moe-layer-freq [0,1]""",
    ),
    "deepseek": Model(
        "gpt",
        f"""{_LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24
        --moe-shared-expert-intermediate-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-bias-update-rate 0.05 --moe-router-num-groups 4 --moe-router-group-topk 2
        --moe-router-topk-scaling-factor 1.5 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.02
        --moe-router-dtype fp32""",
    ),
    # Multi-latent attention of both kinds: queries with a latent vector and norms, and without.
    "latent": Model("gpt", f"{_LATENT} --q-lora-rank 20 --qk-layernorm --untie-embeddings-and-output-weights"),
    "latent-tied": Model("gpt", _LATENT),
    # Predictions of further tokens: two depths, or one of both kinds of attention.
    "further": Model("gpt", f"{_LLAMA} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"),
    "further-latent-tied": Model("gpt", f"{_LATENT} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"),
    "t5": Model("t5", f"{_T5} --position-embedding-type relative"),
    "t5-rope": Model(
        "t5",
        f"""{_T5} --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --ffn-hidden-size 96""",
    ),
    # Chunks of 4 tokens and two retrieving layers, on the project of `test_retro_layouts`.
    "retro": Model(
        "retro",
        f"""{_GPT} --retro-project-dir {CACHE / "retro"} --retro-add-retriever --retro-layers 1 2
        --retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0""",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is laid out and computed. The defaults are one process that does nothing special.

    exchange, levels: --cp-comm-type, --hierarchical-context-parallel-sizes. flags: more words of the command line, for
    what has no field. split: those that place layers on stages.
    """

    model: str = "gpt2"
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    exchange: tuple[str, ...] = ()
    levels: tuple[int, ...] = ()
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    distributed_optimizer: bool = False
    optimizer_instances: int = 1
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    gather_with_step: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    recompute: str = "none"
    fusion: bool = True
    per_token_loss: bool = False
    micro_batch_size: int = 2
    precision: str = "fp32"
    flags: tuple[str, ...] = ()
    split: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def reference(self) -> Layout:
        """The same training in one process, without anything that must not change it. A loss that is the mean over
        what is masked depends on how samples fall into micro-batches."""
        means = FAMILIES[MODELS[self.model].family].reads_sentences and not self.per_token_loss
        return Layout(
            model=self.model,
            micro_batch_size=self.micro_batch_size if means else Layout().micro_batch_size,
            precision=self.precision,
            per_token_loss=self.per_token_loss,
            fusion=False,
            flags=self.flags,
        )

    def words(self) -> list[str]:
        """The command line."""
        words = MODELS[self.model].flags.split() + ["--micro-batch-size", str(self.micro_batch_size)]
        words += ["--make-vocab-size-divisible-by", str(512 // self.tp)]  # padded to 512 under every layout
        sizes = {
            "tensor-model-parallel-size": self.tp,
            "pipeline-model-parallel-size": self.pp,
            "context-parallel-size": self.cp,
            "expert-model-parallel-size": self.ep,
            "num-distributed-optimizer-instances": self.optimizer_instances,
        }
        words += [word for flag, size in sizes.items() if size > 1 for word in (f"--{flag}", str(size))]
        if self.vpp is not None:
            words += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)]
        if self.etp is not None:
            words += ["--expert-tensor-parallel-size", str(self.etp)]
        if self.bucket_size is not None:
            words += ["--ddp-bucket-size", str(self.bucket_size)]
        for flag, values in (("cp-comm-type", self.exchange), ("hierarchical-context-parallel-sizes", self.levels)):
            words += [f"--{flag}", *map(str, values)] if values else []
        switches = {
            "sequence-parallel": self.sp,
            "use-distributed-optimizer": self.distributed_optimizer,
            "overlap-grad-reduce": self.overlap_grad_reduce,
            "overlap-param-gather": self.overlap_param_gather,
            "overlap-param-gather-with-optimizer-step": self.gather_with_step,
            "ddp-average-in-collective": self.average_in_collective,
            "calculate-per-token-loss": self.per_token_loss,
            "no-gradient-accumulation-fusion": not self.fusion,
            "bf16": self.precision == "bf16",
        }
        words += [f"--{flag}" for flag, on in switches.items() if on]
        words += {
            "none": [],
            "selective": ["--recompute-granularity", "selective"],
            "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split(),
        }[self.recompute]
        return words + list(self.flags) + list(self.split)

    def __str__(self) -> str:
        """For a test's id: what differs from the defaults."""
        parts = []
        for name, default in vars(Layout()).items():
            value = getattr(self, name)
            if value != default:
                short = name.replace("distributed_optimizer", "zero1").replace("overlap_", "")
                off = value is False
                parts.append(f"no-{short}" if off else short if value is True else f"{short}={value}")
        return "-".join(parts).replace("model=", "").replace("recompute=", "") or "plain"


def run(layout: Layout, steps: int = STEPS, record: Callable[..., RankRecord] = record_rank, *more: Any) -> RankRecord:
    """One rank's part, inside a world of `layout.world_size`.

    Args:
        record: `record_rank`, or a function of a test that calls it with a fault in place.
        more: its further arguments.
    """
    model = MODELS[layout.model]
    args = parse_args(layout.words(), args_defaults=defaults_of(model.family))
    return record(args, str(model.script), steps, *more)


class Matrix:
    """Runs rows on worlds, against references that are made once.

    Args:
        world: size -> World.
    """

    def __init__(self, world: Callable[[int], World]):
        self.world = world
        self._reference = functools.lru_cache(maxsize=None)(self.record)

    def record(self, layout: Layout, steps: int = STEPS, *more: Any) -> Record:
        """The run of a row."""
        return joined(self.world(layout.world_size).run(run, layout, steps, *more))

    def check(self, layout: Layout, steps: int = STEPS, *more: Any) -> list[Deviation]:
        """A row against one process. Further arguments as those of `run`."""
        reference = self._reference(layout.reference, steps)
        return compare(reference, self.record(layout, steps, *more), TOLERANCE[layout.precision])


def fit(rows: list[Layout], **choices: list[Any]) -> list[Layout]:
    """The rows, each with one value of every further dimension, so that every pair of values occurs.

    All values of the choices take turns; a pair (a value of one dimension, a value of another) that no row has yet
    makes the choice. Rows are added where a pair is still missing.
    """
    names = list(choices)
    dimensions = {name: {getattr(row, name) for row in rows} for name in vars(Layout()) if name not in choices}
    varied = [name for name, values in dimensions.items() if len(values) > 1]
    seen: set[tuple[str, Any, str, Any]] = set()

    def pairs(row: Layout) -> set[tuple[str, Any, str, Any]]:
        keys = [*varied, *names]
        return {
            (a, getattr(row, a), b, getattr(row, b)) for i, a in enumerate(keys) for b in keys[i + 1 :] if b in names
        }

    def candidates(row: Layout) -> list[Layout]:
        found = [row]
        for name in names:
            found = [replace(r, **{name: value}) for r in found for value in choices[name]]
        return found

    wanted = {pair for row in rows for candidate in candidates(row) for pair in pairs(candidate)}
    result = []
    for row in rows:
        best = max(candidates(row), key=lambda candidate: len(pairs(candidate) - seen))
        seen |= pairs(best)
        result.append(best)
    while wanted - seen:
        best = max(
            (candidate for row in rows for candidate in candidates(row)),
            key=lambda candidate: (len(pairs(candidate) - seen), -candidate.world_size),
        )
        seen |= pairs(best)
        result.append(best)
    return result
