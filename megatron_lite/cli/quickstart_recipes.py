"""What the quickstart does differently from model to model: one row a model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.training.families import FAMILIES


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a kind of model is trained and used on a text.

    unit: what a sequence of the corpus is, as it ends the name of its files. train_tokenizer, preprocess: words of
    these verbs. samples: words of `generate` for the sample; more: for the user's next one. Pairs hold words for the
    standard library's source, and for a text of the user. neighbors: words of `retro preprocess`, of a model that
    retrieves.
    """

    family: str
    vocab_size: int
    tokenizer_type: str
    tokenizer_file: str
    tokenizer_flag: str
    unit: str
    train_tokenizer: tuple[str, ...] = ()
    preprocessing: tuple[tuple[str, ...], tuple[str, ...]]
    samples: tuple[tuple[str, ...], tuple[str, ...]]
    more: tuple[str, ...]
    neighbors: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        return FAMILIES[self.family].script

    def preprocess(self, own: bool) -> tuple[str, ...]:
        """Words of the verb `preprocess`."""
        return self.preprocessing[own]

    def sample(self, own: bool) -> tuple[str, ...]:
        """Words of the verb `generate`."""
        return self.samples[own]


_SAMPLING = ("--num-tokens-to-generate", "160", "--temperature", "0.7", "--top_k", "40")

_LINES = ("--split-sentences", "--sentence-splitter", "lines")
_CODE_WITH_GAPS = (
    "def __init__(self, <extra_id_0>): self. name = <extra_id_1>",
    "for <extra_id_0> in range ( len ( <extra_id_1> ) ) :",
)
_TEXT_WITH_GAPS = ("The <extra_id_0> of the <extra_id_1> .",)

# Name of the model (configs/NAME_small.yaml) -> its recipe.
RECIPES: dict[str, Recipe] = {
    "gpt": Recipe(
        family="gpt",
        vocab_size=8192,
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_file="tokenizer.model",
        tokenizer_flag="--tokenizer-model",
        unit="document",
        preprocessing=(("--append-eod",), ("--append-eod",)),
        samples=(("--prompt", "def main(", *_SAMPLING), ("--prompt", "", *_SAMPLING)),
        more=("--prompt", "def "),
    ),
    "bert": Recipe(
        family="bert",
        vocab_size=8000,
        tokenizer_type="BertWordPieceCase",
        tokenizer_file="vocab.txt",
        tokenizer_flag="--vocab-file",
        unit="sentence",
        train_tokenizer=("--model-type", "wordpiece", "--cased"),
        # Of source code a line is what a sentence is of a text.
        preprocessing=(_LINES, ("--split-sentences",)),
        samples=(
            (
                "--prompt",
                "def [MASK](self):",
                "import [MASK]",
                "for i in [MASK](10):",
                "return [MASK]",
                "if x is [MASK]:",
            ),
            ("--prompt", "The [MASK] of the [MASK]."),
        ),
        more=("--prompt", "import [MASK]"),
    ),
    "retro": Recipe(
        family="retro",
        vocab_size=8192,
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_file="tokenizer.model",
        tokenizer_flag="--tokenizer-model",
        unit="document",
        preprocessing=(("--append-eod",), ("--append-eod",)),
        samples=(("--prompt", "def main(", *_SAMPLING), ("--prompt", "", *_SAMPLING)),
        more=("--prompt", "def "),
        neighbors=("--retro-embedder-dim", "256", "--retro-index-ntrain", "100000"),
    ),
    "t5": Recipe(
        family="t5",
        vocab_size=8000,
        tokenizer_type="BertWordPieceCase",
        tokenizer_file="vocab.txt",
        tokenizer_flag="--vocab-file",
        unit="sentence",
        train_tokenizer=("--model-type", "wordpiece", "--cased"),
        preprocessing=(_LINES, ("--split-sentences",)),
        samples=(("--prompt", *_CODE_WITH_GAPS, "--greedy"), ("--prompt", *_TEXT_WITH_GAPS, "--greedy")),
        more=("--prompt", _CODE_WITH_GAPS[0]),
    ),
}
