"""Requests over real HTTP to a server with a small random model: answers, and reasons for those that get none."""

import http.client
import json
import socket
import struct
import threading
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.cli import completions, serve
from megatron_lite.cli.generate import Generator
from megatron_lite.cli.sampling import Sampling
from megatron_lite.cli.text_requests import FIELDS, NOT_HERE, read_request
from megatron_lite.config import flags_of
from megatron_lite.errors import ConfigError
from megatron_lite.training.inference_config import InferenceConfig
from tests.unit.cli.test_text_engine import CONTEXT, TOKENIZER, build


def loaded(model, **more):
    args = {flag.dest: flag.default for flag in flags_of(InferenceConfig)}
    args |= {
        "max_position_embeddings": CONTEXT,
        "moe_expert_capacity_factor": None,
        "params_dtype": torch.float32,
        "device": torch.device("cpu"),
        **more,
    }
    return SimpleNamespace(model=model, tokenizer=TOKENIZER, args=Namespace(**args))


class Client:
    def __init__(self, model, *, seed="1", logs=False, **more):
        self.engine = serve.build_engine(loaded(model, **more))
        most = more.get("max_tokens_to_oom", 12000)
        self.server = serve.TextServer(("127.0.0.1", 0), self.engine, TOKENIZER, seed=seed, most_tokens=most, logs=logs)
        self.thread = threading.Thread(target=serve.serve, args=(self.server,))
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join(60)
        assert not self.thread.is_alive()

    def send(self, body, method="PUT", path="/api", headers=None):
        connection = http.client.HTTPConnection(*self.server.server_address[:2], timeout=60)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def ok(self, prompts, **fields):
        status, answer = self.send({"prompts": prompts, **fields})
        assert status == 200, answer
        return answer


@pytest.fixture(scope="module")
def model():
    return build("rope, grouped queries")


@pytest.fixture
def serving():
    """Starts servers that end with the test, however it ends."""
    with ExitStack() as stack:

        def start(model, **how):
            client = Client(model, **how)
            stack.callback(client.close)
            return client

        yield start


@pytest.fixture(scope="module")
def client(model):
    client = Client(model, inference_dynamic_batching=True, inference_max_requests=4)
    yield client
    client.close()


def generated(model, text, limit, sampling, seed):
    """What `megatron-lite generate` writes."""
    generator = Generator(model, TOKENIZER, CONTEXT, torch.device("cpu"))
    ids = generator.encode(text)
    return text + "".join(generator.text(ids, generator.tokens(ids, limit, sampling, seed)))


def test_a_request_is_answered_with_the_texts_that_generate_writes(client, model):
    answer = client.ok(["def f(", "x"], tokens_to_generate=8, temperature=0.8, top_k=30, random_seed=5)
    sampling = Sampling(temperature=0.8, top_k=30)
    assert answer["text"] == [generated(model, text, 8, sampling, 5) for text in ("def f(", "x")]
    assert set(answer) == {"text", "segments"}
    assert [len(segments) for segments in answer["segments"]] == [14, 9]


def test_clients_that_ask_at_the_same_time_get_what_each_gets_alone(client, model):
    """The model runs in one thread, and rows of its batches belong to different clients."""
    texts = ["a", "bc", "def", "hello", "x = 1", "while"] * 3

    def ask(number):
        return client.ok([texts[number]], tokens_to_generate=10 + number % 4, random_seed=number + 1)["text"][0]

    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(ask, range(len(texts))))
    expected = [generated(model, text, 10 + n % 4, Sampling(), n + 1) for n, text in enumerate(texts)]
    assert answers == expected


def test_many_clients_without_a_seed_are_all_answered(client):
    """Threads take their seeds from one sequence at the same time."""
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: client.ok(["seed"], tokens_to_generate=6)["text"][0], range(24)))
    assert len(set(answers)) > 12


def test_a_client_that_leaves_or_stalls_harms_nobody(model, serving, monkeypatch, capsys):
    client = serving(model)
    monkeypatch.setattr(serve._Handler, "timeout", 0.2)
    host, port = client.server.server_address[:2]
    stalled = socket.create_connection((host, port), timeout=30)
    stalled.sendall(b"PUT /api HTTP/1.0\r\nContent-Length: 99\r\n\r\n{")
    assert b" 408 " in stalled.recv(4096)
    stalled.close()
    for _ in range(3):
        gone = socket.create_connection((host, port), timeout=30)
        body = json.dumps({"prompts": ["a"], "tokens_to_generate": 20}).encode()
        gone.sendall(b"PUT /api HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves by a reset
        gone.close()
    client.ok(["a"], tokens_to_generate=3)
    client.close()  # after the last answer
    assert "Traceback" not in capsys.readouterr().err


def test_log_probabilities_come_with_the_tokens(client):
    answer = client.ok(["abc"], tokens_to_generate=4, top_k=1, logprobs=True, top_n_logprobs=2, random_seed=1)
    assert len(answer["logprobs"][0]) == len(answer["segments"][0]) - 1 == len(answer["top_n_logprobs"][0])
    assert all(value <= 0.0 for value in answer["logprobs"][0])
    assert answer["logprobs"][0][-1] == max(answer["top_n_logprobs"][0][-1].values()), "greedy takes the likeliest"
    judged = client.ok(["abc"], tokens_to_generate=0, logprobs=True)
    assert judged["text"] == ["abc"]
    assert judged["logprobs"][0] == pytest.approx(answer["logprobs"][0][:2], abs=1e-5)


def test_without_a_seed_texts_differ_and_with_one_they_do_not(client):
    def texts(**fields):
        return client.ok(["seed"] * 2, tokens_to_generate=12, **fields)["text"]

    assert len(set(texts() + texts())) > 1
    assert len(set(texts(random_seed=3) + texts(random_seed=3))) == 1


def test_replicas_draw_differently_unless_they_are_told_not_to(model, serving):
    """torch's generator looks at 32 bits of a seed, so that a replica's number must reach them."""

    def first(seed):
        return serving(model, seed=seed).ok(["seed"], tokens_to_generate=12)["text"][0]

    assert first("1 0") == first("1 0") != first("1 1")


def test_a_text_ends_where_it_is_told_to(client, model):
    whole = client.ok(["ab"], tokens_to_generate=20, random_seed=2)
    (segments,) = whole["segments"]
    stop = TOKENIZER.tokenize(segments[5])[0] if len(TOKENIZER.tokenize(segments[5])) == 1 else None
    if stop is None:  # half of a character
        stop = 0
    cut = client.ok(["ab"], tokens_to_generate=20, random_seed=2, stop_token=stop)["segments"][0]
    assert segments[: len(cut)] == cut and len(cut) <= len(segments)


def test_lines_end_texts(model):
    server = SimpleNamespace(tokenizer=TOKENIZER, _next_seed=lambda: 1)
    job = serve.TextServer._job(server, read_request({"prompts": ["a\n"], "stop_on_eol": True}), "a\n")
    assert job.ends([65, 10]) and not job.ends([65, 66])
    job = serve.TextServer._job(server, read_request({"prompts": ["a\n"], "stop_on_double_eol": True}), "a\n")
    assert not job.ends([10]) and job.ends([65, 10, 10]) and job.ends([TOKENIZER.eod])
    begun = serve.TextServer._job(server, read_request({"prompts": ["a"], "add_BOS": True}), "a")
    assert begun.prompt == [TOKENIZER.eod, 97]


# What is wrong with a request -> words of the reason.
WRONG = {
    "prompts missing": ({}, "prompts is missing"),
    "prompts a text": ({"prompts": "a"}, "a list of 1 to 128 texts"),
    "no prompts": ({"prompts": []}, "a list of 1 to 128 texts"),
    "too many prompts": ({"prompts": ["a"] * 129}, "a list of 1 to 128 texts"),
    "half a character": ({"prompts": ["\ud800"]}, "a list of 1 to 128 texts"),
    "tokens a text": ({"prompts": ["a"], "tokens_to_generate": "5"}, "tokens_to_generate: '5'"),
    "tokens true": ({"prompts": ["a"], "tokens_to_generate": True}, "tokens_to_generate: True"),
    "tokens negative": ({"prompts": ["a"], "tokens_to_generate": -1}, "tokens_to_generate: -1"),
    "nothing asked": ({"prompts": ["a"], "tokens_to_generate": 0}, "without logprobs"),
    "temperature": ({"prompts": ["a"], "temperature": -0.5}, "temperature: -0.5"),
    "temperature is no number": ({"prompts": ["a"], "temperature": float("nan")}, "temperature: nan"),
    "top_k": ({"prompts": ["a"], "top_k": 2000}, "top_k: 2000"),
    "top_p": ({"prompts": ["a"], "top_p": 1.5}, "top_p: 1.5"),
    "both": ({"prompts": ["a"], "top_p": 0.5, "top_k": 5}, "top_k: 5 with top_p: 0.5"),
    "seed": ({"prompts": ["a"], "random_seed": 0}, "random_seed: 0"),
    "no such token": ({"prompts": ["a"], "stop_token": 5000}, f"there are {TOKENIZER.vocab_size} tokens"),
    "unknown field": ({"prompts": ["a"], "temprature": 1}, "did you mean temperature"),
    "beam": ({"prompts": ["a"], "beam_width": 4}, "there is no beam search"),
    "an old name": ({"prompts": ["a"], "max_len": 4}, "fix: tokens_to_generate"),
    "a list": ([], "JSON list"),
    "no JSON": (b"{", "not JSON"),
    "deep": (b"[" * 100000, "not JSON"),
    "too long": ({"prompts": ["x" * 20], "tokens_to_generate": 13}, "at most 12 tokens to generate"),
    "far too long": ({"prompts": ["x" * 200], "tokens_to_generate": 1}, "or a shorter prompt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_answered_with_its_reason(client, name):
    body, words = WRONG[name]
    status, answer = client.send(body)
    assert status == 400 and words in answer["message"], answer


def test_other_mistakes_have_their_own_status(client):
    assert client.send({}, path="/other")[0] == 404
    assert client.send(b"", method="GET", path="/api")[0] == 404
    assert client.send(b"{}", headers={"Content-Length": str(2**30)})[0] == 413
    for length in ("\xb2", "-2", "9" * 5000):
        assert client.send(b"{}", headers={"Content-Length": length})[0] == 411
    status, answer = client.send(b"", method="GET", path="/health")
    assert status == 200 and answer["status"] == "ok"


def test_more_tokens_than_the_server_takes_are_refused(model, serving):
    client = serving(model, max_tokens_to_oom=40, inference_max_requests=2)
    assert client.send({"prompts": ["abcd"] * 3, "tokens_to_generate": 10})[1]["message"].startswith(
        "3 prompts of up to 14"
    )
    assert "3 prompts at once" in client.send({"prompts": ["a"] * 3, "tokens_to_generate": 2})[1]["message"]
    client.ok(["abcd", "b"], tokens_to_generate=10)


def test_the_server_outlives_a_step_that_fails(model, serving, capsys):
    client = serving(model)

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    client.engine.model = broken
    status, answer = client.send({"prompts": ["a"], "tokens_to_generate": 3})
    assert status == 500 and "out of memory" in answer["message"]
    client.engine.model = model
    client.ok(["a"], tokens_to_generate=3)
    assert "out of memory" in capsys.readouterr().err


def test_requests_are_logged_where_asked_but_not_those_that_do_not_want_it(model, serving, capsys):
    client = serving(model, logs=True)
    client.ok(["a"], tokens_to_generate=3)
    client.ok(["secret"], tokens_to_generate=3, no_log=True)
    client.send({"prompts": []})
    client.close()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("127.0.0.1")]
    assert [line.rpartition(",")[0] for line in lines] == [
        "127.0.0.1 PUT /api 200: 1 prompts, 3 tokens each",
        "127.0.0.1 PUT /api 400: nothing",
    ]


def test_the_budget_in_gigabytes_is_a_number_of_blocks(model):
    each = 2 * 2 * 2 * 8 * 4  # layers, key and value, groups, channels, bytes
    engine = serve.build_engine(
        loaded(
            model,
            inference_dynamic_batching=True,
            inference_dynamic_batching_block_size=4,
            inference_dynamic_batching_buffer_size_gb=10.5 * 4 * each / 2**30,
        )
    )
    assert engine.cache.num_blocks == 10 and engine.cache.block_size == 4
    small = {"inference_dynamic_batching": True, "inference_dynamic_batching_buffer_size_gb": 1e-9}
    with pytest.raises(ConfigError, match="a block of 32 tokens takes"):
        serve.build_engine(loaded(model, **small))


def test_settings_with_which_nothing_is_computed_are_refused(model):
    for more, words in (
        ({"inference_max_requests": 0}, "--inference-max-requests 0"),
        ({"moe_expert_capacity_factor": 1.0}, "--inference-max-requests 1"),
        ({"inference_dynamic_batching_max_tokens": 0}, "max-tokens 0"),
        (
            {
                "inference_dynamic_batching": True,
                "inference_max_requests": 8,
                "inference_dynamic_batching_max_tokens": 7,
            },
            "max-tokens 7 with 8 prompts",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            serve.build_engine(loaded(model, **more))
        assert words in str(error.value)
    engine = serve.build_engine(
        loaded(
            model,
            inference_dynamic_batching=True,
            inference_dynamic_batching_max_requests=3,
            inference_dynamic_batching_max_tokens=7,
            enable_chunked_prefill=True,
            inference_batch_times_seqlen_threshold=64,
        )
    )
    bounds = engine.bounds
    assert (bounds.max_requests, bounds.max_tokens, bounds.max_rows_times_length) == (3, 7, 64)
    assert bounds.continuous and bounds.chunked


def test_a_process_of_a_launcher_is_a_world_of_its_own(monkeypatch):
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert serve.take_replica() == 2 and serve.take_replica() == 0


# ------------------------------------------------------------------------------------------------- /v1/completions
def complete(client, **fields):
    status, answer = client.send(fields, method="POST", path="/v1/completions")
    assert status == 200, answer
    return answer


def test_completions_are_the_texts_of_api(client):
    ours = client.ok(["ab", "xyz"], tokens_to_generate=6, temperature=0.7, random_seed=4)["text"]
    theirs = complete(client, prompt=["ab", "xyz"], max_tokens=6, temperature=0.7, seed=4, model="any")
    assert [choice["text"] for choice in theirs["choices"]] == [ours[0][2:], ours[1][3:]]
    assert [choice["index"] for choice in theirs["choices"]] == [0, 1]
    assert theirs["object"] == "text_completion" and theirs["model"] == "any"
    assert theirs["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    assert {choice["finish_reason"] for choice in theirs["choices"]} == {"length"}
    of_tokens = complete(client, prompt=[97, 98], max_tokens=6, temperature=0.7, seed=4)
    assert of_tokens["choices"][0]["text"] == theirs["choices"][0]["text"]


def test_a_harness_learns_how_likely_a_text_is(client, model):
    """Evaluation harnesses ask with echo and logprobs, and sum the log-probabilities of the continuation's tokens."""
    ids = TOKENIZER.tokenize("hello")
    found = complete(client, prompt=[ids, ids[:3]], max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1)
    choice = found["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("hello") and logprobs["tokens"][:5] == list("hello")
    assert logprobs["text_offset"][:5] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    with torch.no_grad():
        logits = model(torch.tensor([ids]), torch.arange(5)[None], None)[0, :, : TOKENIZER.vocab_size]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids)[1:, None]).squeeze(1)
    assert logprobs["token_logprobs"][1:5] == pytest.approx(expected.tolist(), abs=1e-4)
    assert len(logprobs["token_logprobs"]) == 6 and len(found["choices"][1]["logprobs"]["tokens"]) == 4
    judged = complete(client, prompt="hello", max_tokens=0, echo=True, logprobs=0)["choices"][0]
    assert judged["text"] == "hello" and judged["logprobs"]["top_logprobs"] is None
    assert len(judged["logprobs"]["token_logprobs"]) == 5


def test_a_stop_ends_a_completion_and_is_no_part_of_it(client):
    whole = complete(client, prompt="ab", max_tokens=12, temperature=0)["choices"][0]["text"]
    stop = whole[3]
    choice = complete(client, prompt="ab", max_tokens=12, temperature=0, stop=[stop, "never"])["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)] and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "prompt is missing"),
        ({"prompt": []}, "a text, tokens, or a list of"),
        ({"prompt": ["a", [1]]}, "a text, tokens, or a list of"),
        ({"prompt": [[]]}, "a text, tokens, or a list of"),
        ({"prompt": [9999]}, "there are"),
        ({"prompt": "a", "n": 2}, "n: 2 cannot be done here"),
        ({"prompt": "a", "stream": True}, "stream: True cannot be done here"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: 0 without echo"),
        ({"prompt": "a", "stop": ["a"] * 5}, "up to 4 texts"),
        ({"prompt": "a", "messages": []}, "unknown field messages"),
    ],
    ids=str,
)
def test_a_wrong_completion_is_answered_with_its_reason(client, fields, words):
    status, answer = client.send(fields, method="POST", path="/v1/completions")
    assert status == 400 and words in answer["message"], answer


def test_every_field_is_read_or_refused():
    """A field that is taken and not done gives an answer to another question."""
    assert not set(FIELDS) & set(NOT_HERE) and not set(completions.FIELDS) & set(completions.NOT_HERE)
    for name, (nothing, _) in completions.NOT_HERE.items():
        for value in nothing:
            completions.read_completion({"prompt": "a", name: value})
    for name, (nothing, _) in NOT_HERE.items():
        for value in nothing:
            read_request({"prompts": ["a"], name: value})
        with pytest.raises(ConfigError, match=f"{name}: 7 cannot be done here"):
            read_request({"prompts": ["a"], name: 7})
