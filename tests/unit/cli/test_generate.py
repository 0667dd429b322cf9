"""Generation on a small random model: the cache changes nothing, the ends are told apart."""

import dataclasses

import pytest
import torch

from megatron_lite.cli import generate
from megatron_lite.cli.sampling import Sampling
from megatron_lite.errors import ConfigError
from megatron_lite.models.gpt import GPTModel, get_gpt_layer_local_spec
from megatron_lite.tokenizers.byte_level import ByteTokenizer
from megatron_lite.transformer.transformer_config import TransformerConfig

CONTEXT = 24
GREEDY = Sampling(temperature=0.0)


def build(positions, bias=None):
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.5,  # large, so that the likeliest token stands out and depends on what came before
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=384,
        max_sequence_length=CONTEXT,
        share_embeddings_and_output_weights=True,
        position_embedding_type=positions,
    )
    model.eval()
    return generate.Generator(model, ByteTokenizer(), CONTEXT, torch.device("cpu"))


@pytest.fixture(params=["rope", "learned_absolute"])
def generator(request):
    return build(request.param)


@torch.no_grad()
def without_cache(generator, prompt, limit):
    """The likeliest token of the whole sequence, again and again from its beginning."""
    ids = list(prompt)
    for _ in range(limit):
        logits = generator.model(torch.tensor([ids]), torch.arange(len(ids))[None], None)
        ids.append(int(logits[0, -1, : generator.tokenizer.vocab_size].argmax()))
        if ids[-1] == generator.tokenizer.eod:
            break
    return ids[len(prompt) :]


def test_greedy_text_with_the_cache_equals_the_argmax_without(generator):
    for text in ("a", "hello", "def f("):
        prompt = generator.encode(text)
        expected = without_cache(generator, prompt, 12)
        assert list(generator.tokens(prompt, 12, GREEDY, seed=1)) == expected
        assert len(set(expected)) > 2, "a model that repeats one token tests nothing"


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(generator):
    prompt = generator.encode("seed")
    sampling = Sampling(temperature=1.5)
    texts = [list(generator.tokens(prompt, 16, sampling, seed)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_padding_of_the_vocabulary_is_never_generated(generator):
    """Rows of the embedding that no token has are as likely as any before training."""
    tokens = list(generator.tokens(generator.encode("x"), CONTEXT, Sampling(temperature=50.0), seed=2))
    assert max(tokens) < generator.tokenizer.vocab_size


def test_generation_ends_where_the_context_is_full(generator):
    prompt = generator.encode("four")
    never = dataclasses.replace(generator, tokenizer=_NoEnd())
    assert len(list(never.tokens(prompt, 1000, Sampling(), seed=1))) == CONTEXT - 4


class _NoEnd(ByteTokenizer):
    eod = -5  # no id at all


def test_the_end_of_document_is_the_last_token_and_no_text(generator):
    eod = generator.tokenizer.eod
    given = iter([104, 105, eod, 106])
    assert "".join(generator.text([97], given)) == "hi"


def test_a_character_of_several_bytes_is_written_whole(generator):
    pieces = list(generator.text([97], iter("\u00fc\u20ac!".encode())))
    assert pieces == ["\u00fc", "\u20ac", "!"]
    assert "".join(generator.text([97], iter("\u20ac".encode()[:2]))) == "\ufffd"  # torn for good: shown at the end


def test_an_empty_prompt_starts_a_document(generator):
    assert generator.encode("") == [generator.tokenizer.eod]


def test_a_prompt_that_fills_the_context_is_refused(generator):
    assert len(generator.encode("x" * (CONTEXT - 1))) == CONTEXT - 1
    with pytest.raises(ConfigError, match=f"{CONTEXT} tokens"):
        generator.encode("x" * CONTEXT)


def test_the_note_says_why_the_text_ended(generator, capsys):
    generate.write(generator, "note", 3, GREEDY, 1)
    printed = capsys.readouterr()
    assert printed.out.startswith("note") and printed.err.startswith("[3 tokens: as many as asked for")
    generate.write(dataclasses.replace(generator, tokenizer=_NoEnd()), "note", 500, GREEDY, 1)
    assert f"context of {CONTEXT} tokens is full" in capsys.readouterr().err


def test_prompts_come_one_a_line_from_a_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo words\n")
    parse = generate.build_parser().parse_args
    assert generate.prompts_of(parse(["--load", "x", "--prompts-file", str(file)])) == ["one", "", "two words"]
    assert generate.prompts_of(parse(["--load", "x", "--prompt", "a b", "c"])) == ["a b", "c"]
    assert generate.prompts_of(parse(["--load", "x"])) == [""]
