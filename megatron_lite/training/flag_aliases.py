"""Old spellings of Megatron's flags, and flags that other packages added to its scripts.

    translate(words)    "--batch-size 8"  ->  "--micro-batch-size 8", and one notice "--batch-size is now ..."

A table row says how many words the old flag takes and what it becomes. Some need a number that stands elsewhere on the
command line (the data-parallel size, the micro-batch size): `Context` finds it. Dropped flags leave nothing but, where
the row has a text, a notice; removed flags are errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron_lite.errors import ConfigError


@dataclass(frozen=True)
class Context:
    """The command line around an old flag."""

    words: list[str]

    def number(self, *spellings: str, default: int = 1) -> int:
        """The last whole number given for one of the spellings."""
        found = default
        for at, word in enumerate(self.words):
            name, _, value = word.partition("=")
            if name in spellings:
                value = value or (self.words[at + 1] if at + 1 < len(self.words) else "")
                found = int(value) if value.isdigit() else found
        return found

    @property
    def data_parallel_size(self) -> int:
        world = os.environ.get("WORLD_SIZE", "1")
        tp = self.number("--tensor-model-parallel-size", "--model-parallel-size", "--intra-layer-model-parallel-size")
        pp = self.number("--pipeline-model-parallel-size", "--inter-layer-model-parallel-size")
        cp = self.number("--context-parallel-size")
        return max(1, (int(world) if world.isdigit() else 1) // max(1, tp * pp * cp))


Words = list[str]
Translation = Callable[[Words, Context], Words]


@dataclass(frozen=True)
class Alias:
    """What an old flag becomes.

    Args:
        takes: number of words after the flag; -1: all up to the next flag.
        becomes: the new words. Raises ConfigError where it cannot be said in the new ones.
        notice: printed once; "" for none, None for "--old is now ...".
    """

    takes: int
    becomes: Translation
    notice: str | None = None


def _renamed(new: str, takes: int = 1) -> Alias:
    return Alias(takes, lambda words, context: [new, *words])


def _means(*new: str) -> Alias:
    """A switch that stands for other flags."""
    return Alias(0, lambda words, context: list(new))


def _dropped(notice: str, takes: int = 0, legal: tuple[str, ...] | None = None, otherwise: str = "") -> Alias:
    """No effect any more; with `legal`, other words are an error with the fix `otherwise`."""

    def becomes(words: Words, context: Context) -> Words:
        if legal is not None and words and words[0] not in legal:
            raise ConfigError(" ".join(words), why=f"only {', '.join(legal)} is left", fix=otherwise)
        return []

    return Alias(takes, becomes, notice)


def _removed(why: str, fix: str, takes: int = 0) -> Alias:
    def becomes(words: Words, context: Context) -> Words:
        raise ConfigError("", why=why, fix=fix)

    return Alias(takes, becomes)


def _percent(words: Words, context: Context) -> Words:
    return ["--lr-warmup-fraction", str(float(words[0]) / 100)]


def _microbatches(words: Words, context: Context) -> Words:
    micro = context.number("--micro-batch-size", "--batch-size", default=0)
    if not micro or not words[0].isdigit():
        raise ConfigError(
            " ".join(words), why="it counts micro-batches, whose size is not given", fix="--micro-batch-size N"
        )
    return ["--global-batch-size", str(int(words[0]) * micro * context.data_parallel_size)]


def _limited_devices(words: Words, context: Context) -> Words:
    groups = context.number("--expert-model-parallel-size")
    return ["--moe-router-group-topk", *words, "--moe-router-num-groups", str(groups)]


def _extended_tp(words: Words, context: Context) -> Words:
    return ["--expert-tensor-parallel-size", str(context.number("--tensor-model-parallel-size"))]


def _encoder_size(decoder: str) -> Alias:
    """Parallelism of the encoder alone is gone; 0, or the decoder's size, says the same as nothing."""

    def becomes(words: Words, context: Context) -> Words:
        if words[0] not in ("0", str(context.number(decoder))):
            raise ConfigError(
                " ".join(words), why="encoder and decoder share one layout", fix=f"leave it out, and set {decoder}"
            )
        return []

    return Alias(1, becomes, "")


_ALWAYS = "has no effect any more: it is always so"
ALIASES: dict[str, Alias] = {
    "--batch-size": _renamed("--micro-batch-size"),
    "--warmup": _renamed("--lr-warmup-fraction"),
    "--lr-warmup-percent": Alias(1, _percent),
    "--model-parallel-size": _renamed("--tensor-model-parallel-size"),
    "--intra-layer-model-parallel-size": _renamed("--tensor-model-parallel-size"),
    "--inter-layer-model-parallel-size": _renamed("--pipeline-model-parallel-size"),
    "--num-microbatches": Alias(1, _microbatches),
    "--num-microbatches-in-minibatch": Alias(1, _microbatches),
    "--min-scale": _renamed("--min-loss-scale"),
    "--fp32-allreduce": _means("--accumulate-allreduce-grads-in-fp32"),
    "--virtual-pipeline-model-parallel-size": _renamed("--num-virtual-stages-per-pipeline-rank"),
    "--empty-unused-memory-each-iter": _means("--empty-unused-memory-level", "1"),
    "--checkpoint-activations": _means(
        "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"
    ),
    "--activations-checkpoint-method": Alias(
        1, lambda words, context: ["--recompute-granularity", "full", "--recompute-method", *words]
    ),
    "--checkpoint-method": Alias(
        1, lambda words, context: ["--recompute-granularity", "full", "--recompute-method", *words]
    ),
    "--activations-checkpoint-num-layers": _renamed("--recompute-num-layers"),
    "--checkpoint-num-layers": _renamed("--recompute-num-layers"),
    "--checkpoint-granularity": _renamed("--recompute-granularity"),
    "--checkpoint-attention": _means("--recompute-granularity", "selective"),
    "--moe-layer-recompute": _means("--recompute-granularity", "selective", "--recompute-modules", "moe"),
    "--distribute-checkpointed-activations": _means("--distribute-saved-activations"),
    "--distribute-recomputed-activations": _means("--distribute-saved-activations"),
    "--model-parallel-memory-opt": _means("--sequence-parallel"),
    "--start-wd": _renamed("--start-weight-decay"),
    "--end-wd": _renamed("--end-weight-decay"),
    "--wd-incr-style": _renamed("--weight-decay-incr-style"),
    "--no-weight-decay-cond-type": Alias(1, lambda words, context: [f"--{words[0].replace('_', '-')}"]),
    "--override-lr-scheduler": _means("--override-opt_param-scheduler"),
    "--use-checkpoint-lr-scheduler": _means("--use-checkpoint-opt_param-scheduler"),
    "--use-rotary-position-embeddings": _means("--position-embedding-type", "rope"),
    "--use-flash-attn": _means("--attention-backend", "flash"),
    "--fp8-hybrid": _means("--fp8-format", "hybrid"),
    "--fp8-e4m3": _means("--fp8-format", "e4m3"),
    "--DDP-impl": _dropped(
        "has no effect any more: there is one data-parallel wrapper", 1, ("local",), "leave --DDP-impl out"
    ),
    "--no-contiguous-buffers-in-local-ddp": _dropped("has no effect any more: gradient buffers are contiguous"),
    "--use-contiguous-buffers-in-ddp": _dropped(_ALWAYS),
    "--data-impl": _dropped(
        "has no effect any more: there is one format of data", 1, ("mmap", "infer"), "megatron-lite preprocess again"
    ),
    "--mmap-warmup": _dropped("has no effect any more: pages are read when they are used"),
    "--layernorm-epsilon": _renamed("--norm-epsilon"),
    "--embedding-weights-in-fp32": _removed("embedding weights have the parameters' format", "leave it out"),
    "--expert-parallel": Alias(
        0, lambda words, context: ["--expert-model-parallel-size", str(context.data_parallel_size)]
    ),
    "--model-spec": _renamed("--spec", -1),
    "--no-query-key-layer-scaling": _dropped(
        "has no effect any more: the scaling is off unless --apply-query-key-layer-scaling"
    ),
    "--moe-loss-coeff": _renamed("--moe-aux-loss-coeff"),
    "--moe-router-type": _renamed("--moe-router-load-balancing-type"),
    "--moe-token-dropping": _removed(
        "tokens are dropped above a capacity, and it has to be said", "--moe-expert-capacity-factor X"
    ),
    "--retro-workdir": _renamed("--retro-project-dir"),
    "--retro-index-no-delete-training-embeddings": _means("--no-retro-index-delete-training-embeddings"),
    "--retro-index-no-delete-added-codes": _means("--no-retro-index-delete-added-codes"),
    "--retro-nprobe": _renamed("--retro-query-nprobe"),
    "--retro-ef-search": _renamed("--retro-query-ef-search"),
    "--retro-return-doc-ids": _dropped("has no effect any more"),
    "--retro-gpt-data-impl": _dropped("has no effect any more: there is one format of data", 1),
    "--retro-gpt-mmap-warmup": _dropped("has no effect any more: pages are read when they are used"),
    "--retro-index-nfeats": _dropped("has no effect any more: BERT's width says it", 1),
    "--retro-nchunks-sampled": _dropped("has no effect any more: --retro-index-ntrain says it", 1),
    "--use-gpu-initialization": _dropped(_ALWAYS),
    "--local_rank": _renamed("--local-rank"),
    "--log-batch-size-to-tensorboard": _dropped(_ALWAYS),
    "--no-log-learnig-rate-to-tensorboard": _dropped("has no effect any more: the learning rate is always logged"),
    "--no-delay-grad-reduce": _means("--no-align-grad-reduce"),
    "--delay-param-gather": _dropped("has no effect any more: --no-align-param-gather is its opposite"),
    "--align-param-gather": _dropped("", 0),
    "--standalone-embedding-stage": Alias(
        0,
        lambda words, context: ["--account-for-embedding-in-pipeline-split"],
        "is now --account-for-embedding-in-pipeline-split, which is not quite the same: the stage of the embedding "
        "gets layers as well",
    ),
    "--renormalize-blend-weights": _dropped(_ALWAYS),
    "--moe-router-topk-limited-devices": Alias(1, _limited_devices),
    "--s3-cache-path": _renamed("--object-storage-cache-path"),
    "--encoder-tensor-model-parallel-size": _encoder_size("--tensor-model-parallel-size"),
    "--encoder-pipeline-model-parallel-size": _encoder_size("--pipeline-model-parallel-size"),
    "--use-custom-fsdp": _means("--use-megatron-fsdp"),
    "--keep-fp8-transpose-cache-when-using-custom-fsdp": _means("--keep-fp8-transpose-cache"),
    "--load-model-opt-format": _removed("there is one format of checkpoints", "leave it out"),
    "--moe-extended-tp": Alias(0, _extended_tp),
    "--moe-use-legacy-grouped-gemm": _means("--moe-grouped-gemm"),
    "--no-async-tensor-model-parallel-allreduce": _dropped("has no effect any more"),
    "--disable-async-tensor-model-parallel-allreduce": _dropped("has no effect any more"),
    "--no-scatter-gather-tensors-in-pipeline": _dropped("has no effect any more"),
    "--muon-use-nesterov": _means("--muon-nesterov"),
    "--tiktoken-special-tokens": _renamed("--tokenizer-special-tokens", -1),
    "--tokenizer-hf-use-fast": _dropped("has no effect any more: it is the default"),
    "--tokenizer-hf-include-special-tokens": _dropped("has no effect any more: it is the default"),
    "--legacy-tokenizer": _dropped("has no effect any more: there is one family of tokenizers"),
    "--use-legacy-models": _removed("there is one family of models", "leave it out"),
    "--hybrid-override-pattern": _renamed("--hybrid-layer-pattern"),
    "--hybrid-attention-ratio": _removed("hybrid models come later", "attention layers alone", 1),
    "--hybrid-mlp-ratio": _removed("hybrid models come later", "attention layers alone", 1),
    "--inference-max-batch-size": _renamed("--inference-max-requests"),
    "--max-batch-size": _renamed("--inference-max-requests"),
    "--disable-chunked-prefill": _dropped("has no effect any more: it is off unless --enable-chunked-prefill"),
    "--enable-cuda-graph": _means("--cuda-graph-impl", "local"),
    "--external-cuda-graph": _means("--cuda-graph-impl", "transformer_engine"),
    "--cuda-graph-scope": _renamed("--cuda-graph-modules", -1),
    "--moe-enable-deepep": _means("--moe-flex-dispatcher-backend", "deepep"),
    "--moe-router-padding-for-fp8": _means("--moe-router-padding-for-quantization"),
}

# Flags of packages around Megatron, and of its scripts for other purposes: pattern, reason, alternative.
FOREIGN: tuple[tuple[str, str, str], ...] = (
    (
        r"--(export-|finetune-hf-dataset|pretrained-model-path|prune-|target-|calib-)",
        "quantisation, pruning and export are no part of pretraining",
        "train here, then export to Hugging Face",
    ),
    (
        r"--(freeze-LM|freeze-ViT|vision-model-type|dataloader-save|pixel-shuffle|use-tiling|packing-buffer-size)$",
        "text models only",
        "leave it out",
    ),
    (
        r"--(task|epochs|keep-last|overlapping-eval|strict-lambada)$",
        "the training script trains; tasks are no part of it",
        "export to Hugging Face and use an evaluation harness",
    ),
    (
        r"--(qa-data-|faiss-|train-with-neg|train-hard-neg|val-av-rank-)",
        "bi-encoder training was removed from Megatron as well",
        "Retro",
    ),
    (
        r"--(genfile|num-samples|out-seq-length|sample-input-file|sample-output-file|greedy|top_[kp]|temperature)$",
        "the training script does not generate",
        "megatron-lite generate",
    ),
)


def foreign(spelling: str) -> tuple[str, str] | None:
    """(reason, alternative) for a flag that Megatron's training script never had, but its users may paste."""
    return next(((why, fix) for pattern, why, fix in FOREIGN if re.match(pattern, spelling)), None)


def translate(words: list[str]) -> tuple[list[str], list[str], list[ConfigError]]:
    """A command line in today's spellings.

    Args:
        words: the command line, quotes already stripped.
    Returns: the new command line, notices to print, and what is wrong with the old flags.
    """
    context, result, notices, problems = Context(words), [], [], []
    at = 0
    while at < len(words):
        old, joined, value = words[at].partition("=")
        at += 1
        alias = ALIASES.get(old)
        if alias is None:
            result.append(words[at - 1])
            continue
        given = [value] if joined else []
        while not joined and at < len(words) and (alias.takes < 0 or len(given) < alias.takes):
            if words[at].startswith("--"):
                break
            given.append(words[at])
            at += 1
        if len(given) < alias.takes:
            problems.append(ConfigError(f"{old} needs a value", why="nothing follows it", fix=f"{old} X"))
            continue
        try:
            new = alias.becomes(given, context)
        except ConfigError as error:
            problems.append(ConfigError(f"{old} {error.what}".rstrip(), why=error.why, fix=error.fix))
            continue
        except ValueError:
            problems.append(ConfigError(f"{old} {' '.join(given)}", why="it is not a number", fix=f"{old} X"))
            continue
        result += new
        notice = f"is now {' '.join(new)}" if alias.notice is None else alias.notice
        if notice:
            notices.append(f"{old} {notice}")
    return result, notices, problems
