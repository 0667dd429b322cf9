"""The server as a user starts it: a checkpoint behind HTTP."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests.e2e.launch import ROOT, TINY, environment, run

pytestmark = pytest.mark.slow


def ask(address, **fields):
    request = urllib.request.Request(address, json.dumps(fields).encode(), method="PUT")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_a_trained_model_answers_as_generate_does_and_leaves_in_order(tmp_path):
    run(*TINY, "--train-iters", 3, "--save", tmp_path, "--save-interval", 3).ok()
    verb = [sys.executable, "-m", "megatron_lite"]
    flags = ["--load", tmp_path, "--inference-dynamic-batching", "--inference-dynamic-batching-block-size", 8]
    server = subprocess.Popen(
        [*verb, "serve", *map(str, flags), "--port", "0", "--inference-text-gen-server-logging"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    first = server.stdout.readline()
    found = re.match(r"serving on (http://127.0.0.1:\d+/api), up to 8 prompts at once, 32 blocks of 8 tokens", first)
    assert found, first + server.communicate()[1]
    answer = ask(found[1], prompts=["7 9", "8"], tokens_to_generate=5, temperature=0)
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(found[1], prompts=["7"], tokens_to_generate=100)
    assert refused.value.code == 400 and "32 tokens together" in refused.value.read().decode()
    server.send_signal(signal.SIGTERM)
    out, err = server.communicate(timeout=60)
    assert server.returncode == 0 and "Traceback" not in err and "no effect" not in err, err
    assert re.fullmatch(r"127\.0\.0\.1 PUT /api 200: .*\n127\.0\.0\.1 PUT /api 400: .*\n", out)

    words = ["--load", tmp_path, "--prompt", "7 9", "8", "--num-tokens-to-generate", 5, "--temperature", 0]
    texts = subprocess.run(
        [*verb, "generate", *map(str, words)], capture_output=True, text=True, cwd=ROOT, env=environment(), check=True
    ).stdout
    assert answer["text"] == [text.strip() for text in texts.split("-" * 40)]
