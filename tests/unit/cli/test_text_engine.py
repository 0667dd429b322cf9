"""Whoever else is there, and however prompts are cut and memory is parted: each gets the tokens that it gets alone."""

import dataclasses
import random

import pytest
import torch

from megatron_lite.cli.sampling import Sampling
from megatron_lite.cli.text_engine import Bounds, Engine, Job, bytes_of_a_token
from megatron_lite.errors import ConfigError
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.tokenizers.byte_level import ByteTokenizer
from megatron_lite.transformer.inference_context import InferenceContext
from megatron_lite.transformer.paged_cache import PagedCache
from megatron_lite.transformer.transformer_config import MLATransformerConfig, TransformerConfig

CONTEXT = 32
TOKENIZER = ByteTokenizer()
GREEDY = Sampling(temperature=0.0)

COMMON = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.5,  # large, so that the likeliest token stands out and depends on what came before
}
KINDS = {
    "rope, grouped queries": ({"num_query_groups": 2}, "rope"),
    "learned positions": ({}, "learned_absolute"),
    "a window": ({"window_size": (5, 0), "window_attn_skip_freq": 2}, "rope"),
    "sinks": ({"softmax_type": "off-by-one"}, "rope"),
    "a gate, norms of heads": ({"attention_output_gate": True, "qk_layernorm": True}, "rope"),
    "latent attention": (
        {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8},
        "rope",
    ),
    "experts": ({"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}, "rope"),
}


def build(kind):
    torch.manual_seed(1)
    more, positions = KINDS[kind]
    latent = "kv_lora_rank" in more
    config = (MLATransformerConfig if latent else TransformerConfig)(**COMMON, **more)
    spec = get_gpt_layer_local_spec(
        num_experts=more.get("num_moe_experts"),
        qk_layernorm=more.get("qk_layernorm", False),
        multi_latent_attention=latent,
    )
    model = GPTModel(config, spec, vocab_size=384, max_sequence_length=CONTEXT, position_embedding_type=positions)
    return model.eval()


@torch.inference_mode()
def alone(model, job):
    """The tokens of a job by the plain cache of one sequence: `megatron-lite generate`'s way."""
    from megatron_lite.cli.sampling import next_token

    generator = torch.Generator().manual_seed(job.seed)
    context = InferenceContext(1, len(job.prompt) + job.limit)
    new, answer = list(job.prompt), []
    while len(answer) < job.limit:
        begin = context.sequence_len_offset
        logits = model(
            torch.tensor([new]), torch.arange(begin, begin + len(new))[None], None, inference_context=context
        )
        context.increment_sequence_len_offset(len(new))
        new = [next_token(logits[0, -1, : TOKENIZER.vocab_size], job.sampling, generator)]
        answer += new
        if job.ends(answer):
            break
    return answer


def jobs(count, seed=1, **more):
    """Prompts of different lengths, half of them greedy."""
    dice = random.Random(seed)
    return [
        Job(
            prompt=[dice.randrange(256) for _ in range(dice.randint(1, 12))],
            limit=dice.randint(1, 16),
            sampling=GREEDY if number % 2 else Sampling(temperature=0.9, top_k=20),
            seed=number + 1,
            ends=lambda answer: answer[-1] in (TOKENIZER.eod, 65),
            **more,
        )
        for number in range(count)
    ]


def engine(model, blocks=64, block=4, **bounds):
    settings = {"max_requests": 8, "max_sequence_length": CONTEXT, **bounds}
    cache = PagedCache(blocks, block, CONTEXT, torch.device("cpu"))
    return Engine(model, TOKENIZER.vocab_size, cache, Bounds(**settings))


def finish(engine, most=500):
    while engine.running or engine._waiting:
        engine.step()
        assert engine.steps < most, "nothing goes on"


@pytest.mark.parametrize("kind", KINDS)
def test_with_others_each_gets_the_tokens_that_it_gets_alone(kind):
    """Fp32: sums of a batch may differ in the last bit, which no likeliest token and no draw here depends on."""
    model = build(kind)
    many = jobs(12)
    texts = engine(model, continuous=True, max_requests=5)
    texts.submit(many[:7])
    texts.step()
    texts.step()
    texts.submit(many[7:])  # who comes later joins those who are there
    finish(texts)
    expected = [alone(model, job) for job in many]
    assert [job.answer for job in many] == expected
    assert len({tuple(answer) for answer in expected}) > 8, "models that repeat themselves test nothing"
    assert texts.cache.num_free == texts.cache.num_blocks


@pytest.fixture(scope="module")
def model():
    return build("rope, grouped queries")


@pytest.mark.parametrize(
    "how",
    [
        {"block": 1},
        {"block": 7, "blocks": 10},
        {"blocks": 8},
        {"max_requests": 1},
        {"max_requests": 3, "max_tokens": 12},
        {"max_tokens": 3, "chunked": True},
        {"max_tokens": 1, "chunked": True},
        {"max_rows_times_length": 1},
        {"max_rows_times_length": 40},
        {"continuous": False, "max_requests": 9},
    ],
    ids=str,
)
def test_blocks_bounds_and_chunks_change_no_token(model, how):
    many = jobs(9, seed=2)
    texts = engine(model, **{"continuous": True, **how})
    texts.submit(many)
    finish(texts)
    assert [job.answer for job in many] == [alone(model, job) for job in many]
    assert all(job.done.is_set() for job in many) and texts.cache.num_free == texts.cache.num_blocks


def test_memory_bounds_who_runs_and_nobody_waits_for_ever(model):
    """Blocks for prompt and answer are there before a job begins: no job that runs ever waits for another's."""
    many = [Job(prompt=[1] * 8, limit=9, sampling=GREEDY, seed=1) for _ in range(6)]
    texts = engine(model, blocks=9, block=4, continuous=True)  # 4 blocks each
    texts.submit(many)
    most = 0
    while not all(job.done.is_set() for job in many):
        texts.step()
        most = max(most, len(texts.running))
    assert most <= 2 and texts.steps >= 27


def test_a_step_computes_no_more_tokens_than_it_may(model):
    texts = engine(model, continuous=True, chunked=True, max_tokens=5)
    texts.submit(jobs(6, seed=3))
    while texts.running or texts._waiting:
        before = texts.tokens
        texts.step()
        assert texts.tokens - before <= 5


def test_without_continuous_batching_requests_follow_each_other(model):
    texts = engine(model)
    first, second = jobs(3, seed=4), jobs(2, seed=5)
    texts.submit(first)
    texts.submit(second)
    while not all(job.done.is_set() for job in first):
        assert not any(job.answer for job in second)
        texts.step()
    finish(texts)
    assert all(job.answer for job in second)


def test_log_probabilities_are_those_of_the_whole_text(model):
    """Of the prompt as well, also where it was computed in chunks."""
    (job,) = jobs(1, seed=6, wants_logprobs=True, num_top=3)
    job = dataclasses.replace(job, prompt=[10, 20, 30, 40, 50, 60, 70])
    texts = engine(model, continuous=True, chunked=True, max_tokens=3)
    texts.submit([job])
    finish(texts)
    ids = torch.tensor([job.ids])
    with torch.no_grad():
        logits = model(ids, torch.arange(len(job.ids))[None], None)[0, :-1, : TOKENIZER.vocab_size]
    table = logits.log_softmax(-1)
    expected = table.gather(1, ids[0, 1:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(job.logprobs), expected, rtol=1e-4, atol=1e-4)
    assert [max(place, key=place.get) for place in job.top] == table.argmax(-1).tolist()
    assert all(len(place) == 3 for place in job.top)


def test_a_prompt_can_be_judged_without_an_answer(model):
    job = Job(prompt=[1, 2, 3, 4], limit=0, sampling=GREEDY, seed=1, wants_logprobs=True)
    texts = engine(model)
    texts.submit([job])
    finish(texts)
    assert job.answer == [] and len(job.logprobs) == 3 and job.error is None


def test_what_could_never_be_done_is_refused_at_once(model):
    def refuse(texts, count, words, **job):
        wanted = {"prompt": [1], "limit": 1, "sampling": GREEDY, "seed": 1, **job}
        with pytest.raises(ConfigError, match=words):
            texts.submit([Job(**wanted) for _ in range(count)])

    refuse(engine(model, max_requests=2), 3, "3 prompts at once")
    refuse(engine(model), 1, "at most 2 tokens to generate", prompt=[1] * 30, limit=3)
    refuse(engine(model, max_tokens=4), 1, "a prompt of 5 tokens", prompt=[1] * 5)
    refuse(engine(model, blocks=2), 1, "3 blocks of 4 tokens", prompt=[1] * 6, limit=4)
    refuse(engine(model, blocks=2), 3, "3 blocks of 4 tokens")
    texts = engine(model, blocks=2, continuous=True)
    texts.submit([Job(prompt=[1], limit=1, sampling=GREEDY, seed=1) for _ in range(3)])
    finish(texts)


def test_a_step_that_fails_fails_its_jobs_and_no_others(model):
    import threading

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    texts = engine(broken, continuous=True)
    thread = threading.Thread(target=texts.run)
    thread.start()
    (job,) = jobs(1)
    texts.submit([job])
    assert job.done.wait(20) and "out of memory" in str(job.error)
    texts.model = model
    (later,) = jobs(1)
    texts.submit([later])
    assert later.done.wait(20) and later.error is None and later.answer
    texts.stop()
    thread.join(20)
    assert not thread.is_alive() and texts.cache.num_free == texts.cache.num_blocks
    with pytest.raises(RuntimeError, match="stopped"):
        texts.submit(jobs(1))


def test_a_job_that_fails_in_a_step_of_many_fails_alone(model):
    def fails(answer):
        raise RuntimeError("no text of it")

    texts, others, (odd,) = engine(model, continuous=True), jobs(3), jobs(1, seed=5)
    odd.ends, odd.limit = fails, 16
    texts.submit([*others, odd])
    finish(texts)
    assert "no text of it" in str(odd.error) and odd.done.is_set()
    assert all(job.error is None and job.answer == alone(model, job) for job in others)
    assert texts.cache.num_free == texts.cache.num_blocks


def test_a_line_every_so_many_steps_says_what_runs(model):
    lines = []
    texts = engine(model, continuous=True)
    texts._log_interval, texts._log = 2, lines.append
    texts.submit([Job(prompt=[1] * 4, limit=4, sampling=GREEDY, seed=1)])
    finish(texts)
    assert len(lines) == 2 and lines[0].startswith("step 2: 1 running, 0 waiting, 2/64 blocks, ")


def test_the_bytes_of_a_token_are_those_that_layers_store():
    """The budget in GB is worth nothing if it is another number than what is allocated."""
    for kind in ("rope, grouped queries", "learned positions", "latent attention"):
        model = build(kind)
        texts = engine(model, blocks=8, block=4)
        texts.submit(jobs(1))
        finish(texts)
        stored = sum(t.numel() * t.element_size() for pair in texts.cache.layers.values() for t in pair)
        assert stored == 8 * 4 * bytes_of_a_token(model.config, 2, 4)
