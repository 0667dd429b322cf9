"""Conversations to ids: the text of each format, and which tokens are answers."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_lite.errors import ConfigError, DataError
from megatron_lite.tokenizers.build_tokenizer import build_tokenizer
from megatron_lite.tokenizers.sft import IGNORE_INDEX, SFTTokenizer
from megatron_lite.tokenizers.tokenizer_config import TokenizerConfig

SPECIAL = ["<unk>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]
CHAT = [
    {"role": "system", "content": " be brief /think"},
    {"role": "user", "content": "2 + 2? /no_think "},
    {"role": "assistant", "content": " four "},
    {"role": "user", "content": "sicher? grün"},
    {"role": "assistant", "content": "ja, natürlich"},
]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_bpe(folder, special=SPECIAL, **settings) -> str:
    """A byte-level BPE that joins letters, with the special tokens of the formats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([message["content"] for message in CHAT] * 3 + ["User Assistant System"] * 9, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>", **settings}))
    return str(folder)


def trained(tokenizer, chat=CHAT) -> str:
    """The text of the trained tokens."""
    tokens, targets = tokenizer.tokenize_conversation(chat, return_target=True, add_generation_prompt=False)
    assert tokens.dtype == targets.dtype == np.int64
    kept = targets != IGNORE_INDEX
    np.testing.assert_array_equal(targets[kept], tokens[kept])
    return tokenizer.detokenize(tokens[kept].tolist())


def test_formats_write_the_texts_that_the_models_were_tuned_on(tmp_path):
    folder = write_bpe(tmp_path / "t")
    assert SFTTokenizer(folder, "nemotron-h-aligned").apply_chat_template(CHAT, tokenize=False) == (
        "<SPECIAL_10>System\nbe brief /think\n<SPECIAL_11>User\n2 + 2? /no_think\n<SPECIAL_11>Assistant\nfour\n"
        "<SPECIAL_11>User\nsicher? grün\n<SPECIAL_11>Assistant\nja, natürlich\n"
    )
    assert SFTTokenizer(folder, "nemotron-nano-v2").apply_chat_template(CHAT, tokenize=False) == (
        "<SPECIAL_10>System\nbe brief\n<SPECIAL_11>User\n2 + 2?\n<SPECIAL_11>Assistant\nfour\n<SPECIAL_12>\n"
        "<SPECIAL_11>User\nsicher? grün\n<SPECIAL_11>Assistant\nja, natürlich\n<SPECIAL_12>\n"
    )
    assert SFTTokenizer(folder, "identity").apply_chat_template(CHAT[1:3], tokenize=False) == "2 + 2? /no_think  four "


def test_answers_alone_are_trained(tmp_path):
    folder = write_bpe(tmp_path / "t", chat_template=CHATML)
    assert trained(SFTTokenizer(folder, "nemotron-h-aligned")) == "four\nja, natürlich\n"
    assert trained(SFTTokenizer(folder, "nemotron-nano-v2")) == "four\n<SPECIAL_12>\nja, natürlich\n<SPECIAL_12>\n"
    assert trained(SFTTokenizer(folder, "default")) == " four </s>ja, natürlich</s>"
    assert trained(SFTTokenizer(folder, "identity")) == "".join(message["content"] for message in CHAT)
    asked = SFTTokenizer(folder, "default").tokenize_conversation(
        CHAT[:2], return_target=False, add_generation_prompt=True
    )
    assert SFTTokenizer(folder, "default").detokenize(asked.tolist()).endswith("<|assistant|>")


def test_answers_are_those_that_transformers_finds_by_marks(tmp_path):
    """Its `{% generation %}` marks, which say where an answer is, against where the text grows."""
    transformers = pytest.importorskip("transformers")
    template = (
        "{%- for m in messages %}\n<|{{ m.role }}|>\n"
        "{% if m.role == 'assistant' %}{%- generation -%} {{ m.content }}</s>\n {%- endgeneration %}"
        "{% else %}{{ m.content }}</s>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}\n<|assistant|>\n{% endif %}"
    )
    folder = write_bpe(tmp_path / "t", chat_template=template)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", chat_template=template)
    found = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    tokens, targets = SFTTokenizer(folder, "default").tokenize_conversation(
        CHAT, return_target=True, add_generation_prompt=False
    )
    assert tokens.tolist() == list(found["input_ids"])
    mask = np.array(found["assistant_masks"], bool)
    assert mask.sum() > 5
    # Ours begins where the prompt for an answer ends, and goes on to the end of the message.
    trained = targets != IGNORE_INDEX
    assert (trained | ~mask).all()
    assert SFTTokenizer(folder, "default").detokenize(tokens[trained & ~mask].tolist()).strip("\n") == ""


def test_prompts_alone_train_nothing(tmp_path):
    assert trained(SFTTokenizer(write_bpe(tmp_path / "t"), "nemotron-h-aligned"), CHAT[:2]) == ""


def test_template_that_rewrites_its_beginning_is_refused(tmp_path):
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = SFTTokenizer(write_bpe(tmp_path / "t"), "default", chat_template=template)
    with pytest.raises(DataError, match="message 3 of a conversation cannot be found"):
        trained(tokenizer)


def test_padding_follows_the_format(tmp_path):
    folder = write_bpe(tmp_path / "t", chat_template=CHATML)
    ids = SFTTokenizer(folder, "default").vocab
    assert SFTTokenizer(folder, "nemotron-h-aligned").pad == ids["<SPECIAL_233>"]
    assert SFTTokenizer(folder, "nemotron-nano-v2").pad == SFTTokenizer(folder, "identity").pad == ids["<unk>"]
    assert SFTTokenizer(folder, "default").pad == ids["</s>"]
    named = write_bpe(tmp_path / "n", [*SPECIAL, "<pad>"], pad_token="<pad>", chat_template=CHATML)
    assert SFTTokenizer(named, "default").pad == SFTTokenizer(named, "default").vocab["<pad>"]


def test_what_does_not_fit_the_tokenizer_is_named(tmp_path):
    folder = write_bpe(tmp_path / "t", SPECIAL[:2])
    with pytest.raises(ConfigError, match="no token <SPECIAL_233>"):
        SFTTokenizer(folder)
    with pytest.raises(ConfigError, match="no chat template"):
        SFTTokenizer(folder, "default")
    with pytest.raises(ConfigError, match="--sft-tokenizer-prompt-format plain is not known"):
        SFTTokenizer(folder, "plain")


def test_flags_make_it(tmp_path):
    folder = write_bpe(tmp_path / "t")
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="SFTTokenizer", tokenizer_model=folder))
    assert isinstance(tokenizer, SFTTokenizer) and tokenizer.pad == tokenizer.vocab["<SPECIAL_233>"]
    assert tokenizer.unique_identifiers["prompt_format"] == "nemotron-h-aligned"
