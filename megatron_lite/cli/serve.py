"""`megatron-lite serve`: a checkpoint of GPT behind HTTP, with Megatron's requests and those of OpenAI's completions.

    curl -X PUT localhost:5000/api -d '{"prompts": ["def read("], "tokens_to_generate": 32}'

    a thread a connection: JSON -> TextRequest -> jobs --submit--> the one thread that runs the model (Engine)
                           JSON <- texts, segments, log-probabilities <- jobs that are done

Started by torchrun as several processes, each is a replica with a model and a port of its own, one above the other. An
error of the client's is answered with its reason, status 400 and its kin; the server goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from megatron_lite.cli.completions import completion_of, read_completion
from megatron_lite.cli.generate import prompt_ids
from megatron_lite.cli.loaded_model import LoadedModel, load_model
from megatron_lite.cli.text_engine import Bounds, Engine, Job, bytes_of_a_token
from megatron_lite.cli.text_requests import TextRequest, answer_of, read_request
from megatron_lite.errors import ConfigError, MegatronLiteError
from megatron_lite.log import say
from megatron_lite.training.families import FAMILIES, family_of
from megatron_lite.training.launch import read_launch
from megatron_lite.transformer.paged_cache import PagedCache

_MOST_BYTES = 16 * 2**20  # of a request


class Refused(Exception):
    """A request that is answered with a status and a reason."""

    def __init__(self, status: HTTPStatus, reason: str):
        super().__init__(reason)
        self.status = status


class TextServer(ThreadingHTTPServer):
    """Answers requests with the texts of an engine, which another thread runs.

    Args:
        seed: for requests that bring none: each of their prompts draws from a seed that follows from this text and
            from how many there were before.
        most_tokens: prompts times longest prompt plus answer of a request.
        logs: print a line for each request.
    """

    daemon_threads = False  # whoever has asked gets an answer before the server is closed
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], engine: Engine, tokenizer: Any, *, seed: str, most_tokens: int, logs: bool
    ):
        self.engine, self.tokenizer, self.most_tokens, self.logs = engine, tokenizer, most_tokens, logs
        self._seed, self._numbers = seed, itertools.count()  # of which threads may take the next without a lock
        super().__init__(address, _Handler)

    def jobs_of(self, request: TextRequest) -> list[Job]:
        """A job for each prompt. Raises: ConfigError for more tokens than the server takes."""
        jobs = [self._job(request, text) for text in request.prompts]
        longest = max(len(job.prompt) + job.limit for job in jobs)
        if len(jobs) * longest > self.most_tokens:
            raise ConfigError(
                f"{len(jobs)} prompts of up to {longest} tokens, answer included",
                why=f"the server takes {self.most_tokens} tokens in a request",
                fix="fewer prompts or tokens, or a server with --max-tokens-to-oom N",
            )
        return jobs

    def _job(self, request: TextRequest, prompt: str | list[int]) -> Job:
        tokenizer = self.tokenizer
        ids = prompt_ids(tokenizer, prompt) if isinstance(prompt, str) else prompt
        if request.add_BOS:
            ids = [tokenizer.special_tokens_dict.get("bos_token", tokenizer.eod), *ids]
        for name, token in (("stop_token", request.stop_token), ("a prompt's token", max(ids))):
            if token is not None and token >= tokenizer.vocab_size:
                raise ConfigError(f"{name}: {token}", why=f"there are {tokenizer.vocab_size} tokens")
        last = {tokenizer.eod, request.stop_token}
        tails = [(text, len(text.encode()) + 8) for text in request.ends_of_text]  # no more tokens than it has bytes

        def ends(answer: Sequence[int]) -> bool:
            return answer[-1] in last or any(text in tokenizer.detokenize(answer[-tail:]) for text, tail in tails)

        return Job(
            prompt=ids,
            limit=request.tokens_to_generate,
            sampling=request.sampling,
            seed=self._next_seed() if request.random_seed is None else request.random_seed,
            ends=ends,
            wants_logprobs=request.logprobs,
            num_top=request.top_n_logprobs,
        )

    def _next_seed(self) -> int:
        """32 bits: torch's generator on the CPU looks at no more of a seed."""
        text = f"{self._seed} {next(self._numbers)}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")

    def run(self, request: TextRequest) -> list[Job]:
        """Submits the request and waits until its jobs are done. Raises: ConfigError."""
        jobs = self.jobs_of(request)
        self.engine.submit(jobs)
        for job in jobs:
            job.done.wait()
            if job.error is not None:
                raise job.error
        return jobs


# Path -> (JSON -> request, what is answered when it is done).
Reader = Callable[[Any], TextRequest]
Writer = Callable[[TextRequest, Sequence[Job], Any], dict[str, Any]]
APIS: dict[str, tuple[Reader, Writer]] = {
    "/api": (read_request, answer_of),
    "/v1/completions": (read_completion, completion_of),
    "/completions": (read_completion, completion_of),
}


class _Handler(BaseHTTPRequestHandler):
    server: TextServer
    timeout = 60  # of a client that sends nothing

    def do_GET(self) -> None:
        if self.path != "/health":
            return self._send(
                HTTPStatus.NOT_FOUND, {"message": f"there are PUT and POST {', '.join(APIS)}; GET /health"}
            )
        engine = self.server.engine
        self._send(HTTPStatus.OK, {"status": "ok", "running": len(engine.running), "steps": engine.steps})

    def do_POST(self) -> None:
        begin, request = time.monotonic(), None
        try:
            if self.path not in APIS:
                raise Refused(HTTPStatus.NOT_FOUND, f"nothing answers at {self.path}; there are {', '.join(APIS)}")
            read, write = APIS[self.path]
            request = read(self._body())
            status, answer = HTTPStatus.OK, write(request, self.server.run(request), self.server.tokenizer)
        except Refused as refused:
            status, answer = refused.status, {"message": str(refused)}
        except MegatronLiteError as error:
            status, answer = HTTPStatus.BAD_REQUEST, {"message": str(error)}
        except Exception as error:  # ours to mend; the server goes on
            traceback.print_exception(error)
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"message": f"{type(error).__name__}: {error}"}
        self._send(status, answer)
        if self.server.logs and not (request and request.no_log):
            seconds = time.monotonic() - begin
            what = f"{len(request.prompts)} prompts, {request.tokens_to_generate} tokens each" if request else "nothing"
            say(f"{self.client_address[0]} {self.command} {self.path} {status.value}: {what}, {seconds:.2f} s")

    do_PUT = do_POST

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) <= 20):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "the header Content-Length says how long the JSON is")
        if int(length) > _MOST_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes; a request has at most {_MOST_BYTES}")
        try:
            return json.loads(self.rfile.read(int(length)))
        except TimeoutError:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"{length} bytes were announced and did not come") from None
        except (ValueError, RecursionError) as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None

    def _send(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        with suppress(ConnectionError):  # the client has left
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """What http.server would print for each request."""


# --------------------------------------------------------------------------------------------------------------- start
def build_engine(loaded: LoadedModel) -> Engine:
    """The engine of a model, as the arguments say.

    Raises: ConfigError for numbers with which nothing could be computed.
    """
    args: Any = loaded.args
    config: Any = loaded.model.config
    dynamic = args.inference_dynamic_batching
    for name in ("inference_max_requests", "inference_max_seq_length", "inference_dynamic_batching_block_size"):
        _at_least_one(name, getattr(args, name))
    requests, most = args.inference_max_requests, args.inference_dynamic_batching_max_tokens
    if dynamic and args.inference_dynamic_batching_max_requests is not None:
        requests = args.inference_dynamic_batching_max_requests
        _at_least_one("inference_dynamic_batching_max_requests", requests)
    if most is not None:
        _at_least_one("inference_dynamic_batching_max_tokens", most)
    if dynamic and most is not None and most < requests:
        raise ConfigError(
            f"--inference-dynamic-batching-max-tokens {most} with {requests} prompts at once",
            why="a step computes a token of each prompt that runs",
            fix=f"--inference-dynamic-batching-max-tokens {requests} or more, or --inference-max-requests {most}",
        )
    if args.moe_expert_capacity_factor is not None and requests > 1:
        raise ConfigError(
            f"--moe-expert-capacity-factor {args.moe_expert_capacity_factor} and {requests} prompts at once",
            why="which tokens an expert drops depends on the others that are there, and so would an answer",
            fix="--inference-max-requests 1",
        )
    length = min(args.inference_max_seq_length, args.max_position_embeddings)
    block = min(args.inference_dynamic_batching_block_size, length)
    blocks = requests * -(-length // block)
    if dynamic:
        each = bytes_of_a_token(config, config.num_layers, args.params_dtype.itemsize) * block
        blocks = min(blocks, int(args.inference_dynamic_batching_buffer_size_gb * 2**30 // each))
        if blocks < 1:
            raise ConfigError(
                f"--inference-dynamic-batching-buffer-size-gb {args.inference_dynamic_batching_buffer_size_gb}",
                why=f"a block of {block} tokens takes {each / 2**30:.3g} GiB",
                fix="more memory, or a smaller --inference-dynamic-batching-block-size",
            )
    threshold = args.inference_batch_times_seqlen_threshold
    bounds = Bounds(
        max_requests=requests,
        max_sequence_length=length,
        **({"max_tokens": most} if dynamic and most is not None else {}),
        max_rows_times_length=threshold if threshold > 0 else None,
        continuous=dynamic,
        chunked=dynamic and args.enable_chunked_prefill,
    )
    cache = PagedCache(blocks, block, length, torch.device(args.device))
    return Engine(loaded.model, loaded.tokenizer.vocab_size, cache, bounds, args.inference_logging_step_interval, say)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"--{name.replace('_', '-')} {value}", why="nothing could be computed", fix="1 or more")


def take_replica() -> int:
    """This process's number among those that the launcher started. Each of them is a world of its own from now on."""
    launch = read_launch()
    os.environ.update(RANK="0", WORLD_SIZE="1")
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    return launch.rank


def build_parser() -> argparse.ArgumentParser:
    """The verb's own flags; all others are those of training."""
    parser = argparse.ArgumentParser(
        "megatron-lite serve",
        description="Answer prompts over HTTP, from a checkpoint of GPT: PUT or POST /api, GET /health. Training's "
        "flags work too: --inference-dynamic-batching, --ckpt-step, --bf16, --seed ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="the folder that --save named")
    add("--port", type=int, default=5000, metavar="N", help="0: a free one (default: %(default)s)")
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="0.0.0.0: for all that reach this machine (default: %(default)s)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """The verb."""
    own, flags = build_parser().parse_known_args(list(argv))
    replica = take_replica()
    loaded = load_model(own.load, flags, defaults={"serves": True})
    args = loaded.args
    if family_of(args) != "gpt":
        raise ConfigError(
            f"{own.load} holds a model of {FAMILIES[family_of(args)].title}",
            why="the server goes on with texts, as GPT does",
            fix="megatron-lite generate",
        )
    engine = build_engine(loaded)
    try:
        server = TextServer(
            (own.host, own.port + replica if own.port else 0),
            engine,
            loaded.tokenizer,
            seed=f"{args.seed} {replica if args.offset_sampling_seed_by_dp_rank else 0}",
            most_tokens=args.max_tokens_to_oom,
            logs=args.inference_text_gen_server_logging,
        )
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host {own.host} --port {own.port + replica} cannot be listened on: {error}", fix="another --port, or 0"
        ) from None
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    serve(server)
    return 0


def serve(server: TextServer) -> None:
    """Answers until SIGINT or SIGTERM, and what has been asked by then."""
    steps = threading.Thread(target=server.engine.run, name="engine")
    steps.start()
    cache, (host, port) = server.engine.cache, server.socket.getsockname()[:2]
    say(
        f"serving on http://{host}:{port}/api, up to "
        f"{server.engine.bounds.max_requests} prompts at once, {cache.num_blocks} blocks of {cache.block_size} tokens"
    )
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        server.engine.stop()
        steps.join()
