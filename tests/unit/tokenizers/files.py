"""Files of small tokenizers, made by the libraries themselves, and of full size where only the size counts."""

import base64
import io
import json
from pathlib import Path

from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = [
    "The cat sat on the mat, and the dog ran far.",
    "Playing and played: they don't play any more!",
    "Zo\u00eb's caf\u00e9 costs \u20ac12.50 (twelve and a half)  and  \u6f22\u5b57.",
    "def f(x):\n    return x + 1  # one more\n",
] * 3


def gpt2(folder: Path, vocab_size: int = 330) -> tuple[str, str]:
    """vocab.json and merges.txt of a byte-level BPE trained on `TEXTS`, `<|endoftext|>` last, as GPT-2 has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(tokenizer.to_str())["model"]
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    return write_gpt2(folder, vocab, [tuple(pair) for pair in model["merges"]])


def gpt2_of_full_size(folder: Path) -> tuple[str, str]:
    """256 bytes, 50,000 merges of two of them, and `<|endoftext|>`: 50,257 tokens as in GPT-2."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in bytes_ for b in bytes_][:50_000]
    vocab = {token: id for id, token in enumerate([*bytes_, *map("".join, pairs), "<|endoftext|>"])}
    return write_gpt2(folder, vocab, pairs)


def write_gpt2(folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> tuple[str, str]:
    (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    lines = "".join(f"{a} {b}\n" for a, b in merges)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{lines}", "utf-8")
    return str(folder / "vocab.json"), str(folder / "merges.txt")


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def wordpiece(folder: Path, tokens: list[str] | None = None) -> str:
    """A vocab.txt; by default with the words of `TEXTS` in pieces, large and small letters."""
    if tokens is None:
        letters = sorted({c for text in TEXTS for c in text + text.lower() if not c.isspace()} | set("eao"))
        tokens = [*letters, *(f"##{c}" for c in letters), "the", "The", "cat", "play", "##ing", "##ed", "and"]
    path = folder / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in (*SPECIAL, *tokens)), "utf-8")
    return str(path)


def wordpiece_of_full_size(folder: Path) -> str:
    """30,522 tokens, as in BERT's lower-case vocabulary."""
    return wordpiece(folder, ["the", "cat", *(f"word{i}" for i in range(30_520 - len(SPECIAL)))])


def sentencepiece(path: Path, **options: object) -> str:
    """A SentencePiece model of 340 pieces; by default with unk 0, bos 1, eos 2 and no pad, as Llama's."""
    model = io.BytesIO()
    settings: dict[str, object] = {"vocab_size": 340, "byte_fallback": True, "model_type": "bpe", "pad_id": -1}
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, hard_vocab_limit=False, minloglevel=2, num_threads=1,
        **{**settings, **options},
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return str(path)


def tiktoken(path: Path, words: tuple[bytes, ...] = (b"th", b"he", b"the", b" the", b"12", b"St", b"//")) -> str:
    """The 256 bytes and some words, as ranks in JSON."""
    tokens = [bytes([byte]) for byte in range(256)] + list(words)
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def hugging_face(folder: Path, settings: dict[str, object] | None = None, template: str | None = None) -> str:
    """A byte-level BPE in a tokenizer.json, with `<s>`, `</s>` and `<|user|>`, and what stands beside it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>", "<|user|>"]
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    if template:
        ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>") if token in template]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)
