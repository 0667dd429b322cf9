"""Many texts at once from one model: what is computed in the next forward passes, and for whom.

    submit(jobs of a request) --> waiting --admit--> running --step, step, ...--> done, each job's event is set
                                    |  a place among max_requests, and blocks for prompt and answer together
    step:   prompts that are new, each alone (in chunks, if so asked)      tokens of a step <= max_tokens
            one token of everyone else, together

A job has its blocks before it begins, so that nothing that runs ever waits for memory. With continuous batching a job
begins as soon as there is room; without, the jobs of one request begin together when all others are done. Each job
draws from a generator of its own: its tokens do not depend on who else is there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.cli.sampling import Sampling, next_token
from megatron_lite.errors import ConfigError
from megatron_lite.transformer.paged_cache import PagedCache

_MAX_TOKENS = 16384  # of a step, where nothing is said


@dataclass(kw_only=True)
class Job:
    """A prompt, and what becomes of it.

    Args:
        prompt: at least one id.
        limit: tokens to generate at most.
        seed: of its sampling.
        ends: whether the ids that are generated are the whole answer; asked after each token.
        wants_logprobs: keep the log-probability of every token but the first.
        num_top: and those of the likeliest tokens in each of these places.
    """

    prompt: Sequence[int]
    limit: int
    sampling: Sampling
    seed: int
    ends: Callable[[Sequence[int]], bool] = lambda answer: False
    wants_logprobs: bool = False
    num_top: int = 0

    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)
        self.stored = 0  # tokens whose keys are in the cache
        self.table: list[int] = []
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer whose keys are ever stored: all but the last one."""
        return len(self.prompt) + max(0, self.limit - 1)

    @property
    def pending(self) -> int:
        """Tokens that the model has not seen yet."""
        return len(self.ids) - self.stored


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much is done at once.

    Args:
        max_requests: jobs that run together.
        max_sequence_length: prompt and answer of a job.
        max_tokens: of a step.
        max_rows_times_length: a forward pass takes no more sequences than this divided by the longest; None: all.
        continuous: a job begins when there is room, not with its request.
        chunked: a prompt may be spread over steps.
    """

    max_requests: int
    max_sequence_length: int
    max_tokens: int = _MAX_TOKENS
    max_rows_times_length: int | None = None
    continuous: bool = False
    chunked: bool = False


class Engine:
    """Computes jobs until they are done. `submit` may be called by any thread, `step` by one.

    Args:
        model: ids and positions `[b, s]`, a mask and an InferenceContext -> logits `[b, s, v]`; in evaluation.
        vocab_size: tokens that there are; what is beyond is padding.
        log: receives a line every `log_interval` steps; 0: never.
    """

    def __init__(
        self,
        model: nn.Module,
        vocab_size: int,
        cache: PagedCache,
        bounds: Bounds,
        log_interval: int = 0,
        log: Callable[[str], None] = print,
    ):
        self.model, self.vocab_size, self.cache, self.bounds = model, vocab_size, cache, bounds
        self.running: list[Job] = []
        self.steps = self.tokens = 0
        self._waiting: deque[list[Job]] = deque()
        self._news = threading.Condition()
        self._log_interval, self._log, self._begin = log_interval, log, time.monotonic()
        self._stopping = False

    # -- requests ----------------------------------------------------------------------------------------------------

    def problem_of(self, jobs: Sequence[Job]) -> ConfigError | None:
        """Why these jobs of one request could never be done; None: they can."""
        bounds, cache = self.bounds, self.cache
        if not bounds.continuous and len(jobs) > bounds.max_requests:
            return ConfigError(
                f"{len(jobs)} prompts at once",
                why=f"{bounds.max_requests} are computed together",
                fix="fewer prompts, or a server with --inference-max-requests N or --inference-dynamic-batching",
            )
        for job in jobs:
            total = len(job.prompt) + job.limit
            if total > bounds.max_sequence_length:
                return ConfigError(
                    f"a prompt of {len(job.prompt)} tokens with {job.limit} to generate",
                    why=f"prompt and answer have at most {bounds.max_sequence_length} tokens together",
                    fix=f"at most {max(0, bounds.max_sequence_length - len(job.prompt))} tokens to generate, or a "
                    "shorter prompt",
                )
            if not bounds.chunked and len(job.prompt) > bounds.max_tokens:
                return ConfigError(
                    f"a prompt of {len(job.prompt)} tokens",
                    why=f"a step computes at most {bounds.max_tokens}",
                    fix="a shorter prompt, or a server with --enable-chunked-prefill",
                )
        needed = sum(cache.blocks_of(job.longest) for job in jobs)
        if bounds.continuous:
            needed = max(cache.blocks_of(job.longest) for job in jobs)
        if needed > cache.num_blocks:
            return ConfigError(
                f"{needed} blocks of {cache.block_size} tokens for keys and values",
                why=f"the memory given to them holds {cache.num_blocks}",
                fix="fewer or shorter prompts, or a server with more --inference-dynamic-batching-buffer-size-gb",
            )
        return None

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue the jobs of one request. Their `done` tells when.

        Raises: ConfigError as `problem_of` says; RuntimeError when the engine has stopped.
        """
        problem = self.problem_of(jobs)
        if problem is not None:
            raise problem
        with self._news:
            if self._stopping:
                raise RuntimeError("the engine has stopped")
            groups = [[job] for job in jobs] if self.bounds.continuous else [list(jobs)]
            self._waiting.extend(groups)
            self._news.notify()

    def stop(self) -> None:
        """Take no more jobs; `run` returns when those that are there are done."""
        with self._news:
            self._stopping = True
            self._news.notify()

    def run(self) -> None:
        """Steps until `stop`. A job that fails fails alone, unless the step was everyone's."""
        while True:
            with self._news:
                while not (self._waiting or self.running or self._stopping):
                    self._news.wait()
                if self._stopping and not (self._waiting or self.running):
                    return
            try:
                self.step()
            except Exception as error:  # the process lives on for other requests
                for job in self.running:
                    job.error = error
                for job in list(self.running):
                    self._finish(job)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        with self._news:
            while self._waiting:
                group = self._waiting[0]
                if not self.bounds.continuous and self.running and self.running[0] not in group:
                    return
                if len(self.running) + len(group) > self.bounds.max_requests:
                    return
                tables = [self.cache.allocate(job.longest) for job in group]
                if any(table is None for table in tables):
                    for table in tables:
                        self.cache.release(table or [])
                    return
                for job, table in zip(group, tables):
                    job.table = table or []
                self.running += group
                self._waiting.popleft()

    @torch.inference_mode()
    def step(self) -> None:
        """The next tokens of those that run, and as many tokens of new prompts as there is room for."""
        self._admit()
        going_on = [job for job in self.running if job.stored and job.pending == 1]
        beginning = [job for job in self.running if job not in going_on]
        for part in self._parts(going_on):
            self._forward(part, 1)
        budget = self.bounds.max_tokens - len(going_on)
        for number, job in enumerate(beginning):
            count = min(job.pending, max(1, budget)) if self.bounds.chunked else job.pending
            if count > budget and (number or going_on):
                break  # in a later step
            self._forward([job], count)
            budget -= count
        self.steps += 1
        if self._log_interval and self.steps % self._log_interval == 0:
            self._say()

    def _parts(self, jobs: list[Job]) -> list[list[Job]]:
        """Jobs that share a forward pass."""
        if not jobs:
            return []
        rows, bound = len(jobs), self.bounds.max_rows_times_length
        if bound is not None:
            rows = max(1, bound // max(len(job.ids) for job in jobs))
        return [jobs[at : at + rows] for at in range(0, len(jobs), rows)]

    def _forward(self, jobs: list[Job], new: int) -> None:
        """Show the model `new` further tokens of each; whoever has no more then gets the next one."""
        context = self.cache.step([(job.table, job.stored) for job in jobs], new)
        ids = torch.tensor([job.ids[job.stored : job.stored + new] for job in jobs], device=self.cache.device)
        logits = self.model(ids, context.positions, context.attention_mask, inference_context=context)
        self.tokens += ids.numel()
        for job, row in zip(jobs, logits):
            try:
                is_done = self._go_on(job, row[:, : self.vocab_size], new)
            except Exception as error:  # of this one: a draw, a text
                job.error, is_done = error, True
            if is_done:
                self._finish(job)

    def _go_on(self, job: Job, logits: Tensor, new: int) -> bool:
        """What the model said after its last `new` tokens, `[new, v]`, becomes the next one. Whether that was all."""
        job.stored += new
        if job.pending == 0 and job.limit > 0:
            token = next_token(logits[-1], job.sampling, job.generator)
            job.ids.append(token)
            job.answer.append(token)
        self._note(job, logits, new)
        return job.pending == 0 or len(job.answer) >= job.limit > 0 or bool(job.answer and job.ends(job.answer))

    def _note(self, job: Job, logits: Tensor, new: int) -> None:
        """Log-probabilities of the tokens after each of the last `new` ones that the model saw."""
        if not (job.wants_logprobs or job.num_top):
            return
        following = job.ids[job.stored - new + 1 : job.stored + 1]
        table = logits[: len(following)].float().log_softmax(-1)
        if job.wants_logprobs:
            wanted = torch.tensor(following, device=table.device, dtype=torch.long)
            job.logprobs += table.gather(1, wanted[:, None]).squeeze(1).tolist()
        if job.num_top:
            values, tokens = table.topk(min(job.num_top, table.shape[1]), dim=-1)
            job.top += [dict(zip(t, v)) for t, v in zip(tokens.tolist(), values.tolist())]

    def _finish(self, job: Job) -> None:
        self.cache.release(job.table)
        self.running.remove(job)
        job.done.set()

    def _say(self) -> None:
        now = time.monotonic()
        rate = self.tokens / max(now - self._begin, 1e-9)
        used = self.cache.num_blocks - self.cache.num_free
        self._log(
            f"step {self.steps}: {len(self.running)} running, {sum(map(len, self._waiting))} waiting, "
            f"{used}/{self.cache.num_blocks} blocks, {rate:.0f} tokens/s"
        )
        self.tokens, self._begin = 0, now


def bytes_of_a_token(config: Any, layers: int, element_size: int) -> int:
    """Memory of a token's keys and values in all layers of a model on one rank."""
    if getattr(config, "multi_latent_attention", False):
        channels = config.kv_lora_rank + config.qk_pos_emb_head_dim
    else:
        channels = 2 * config.num_query_groups * config.kv_channels
    return int(layers * channels * element_size)
