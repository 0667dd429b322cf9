"""Fill-in-the-middle: documents rearranged so that a model learns to complete what lies between two texts.

    a document                text
    cut at two places         prefix | middle | suffix
    PSM                       <pre> prefix <suf> suffix <mid> middle
    SPM                       <pre> <suf> suffix <mid> prefix middle

A sample is read as GPTDataset reads it, then each document in it is rearranged with probability `fim_rate`. Cuts fall
between characters, so the three texts are tokenised anew and the sample becomes a little longer or shorter: it is cut,
or filled with the FIM pad token. What is drawn for a sample depends on the seed and the sample alone, not on which
process reads it, or when.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lite.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron_lite.errors import ConfigError

_EXTRA_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


@dataclass(kw_only=True)
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """Options of GPTFIMDataset."""

    fim_rate: float = 0.5
    """Share of the documents that are rearranged."""

    fim_spm_rate: float = 0.5
    """Share of these in the order SPM."""

    fim_extra_tokens: dict[str, str] | None = None
    """Texts of the tokens prefix, middle, suffix, pad and eod. Samples are cut into documents at eod."""

    fim_split_sample: str | None = None
    """A token that cuts documents into fragments (files of a repository, say), which are rearranged each by itself."""

    fim_fragment_rate: float | None = None
    """Share of the fragments that are rearranged, in the documents that `fim_rate` chooses."""

    fim_no_prefix: str | None = None
    """A text that begins so stays as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0.0 <= rate <= 1.0:
                raise ConfigError(f"--{name.replace('_', '-')} {rate}", why="it is a share", fix="0 to 1")
        if self.fim_split_sample is not None and self.fim_fragment_rate is None:
            raise ConfigError(
                f"--fim-split-sample {self.fim_split_sample} without --fim-fragment-rate",
                why="it cuts documents into fragments, and how many of these are rearranged is not said",
                fix="--fim-fragment-rate 0.5",
            )
        if self.inter_document_masking:
            raise ConfigError(
                "--fim-data with --dataloader-inter-document-masking",
                why="rearranged documents have other lengths than the corpus says",
                fix="--reset-attention-mask, which goes by end-of-document tokens",
            )
        missing = [name for name in _EXTRA_TOKENS if name not in (self.fim_extra_tokens or {})]
        if missing:
            raise ConfigError(f"fim_extra_tokens lacks {', '.join(missing)}", fix="give the text of each token")


class GPTFIMDataset(GPTDataset):
    """GPTDataset whose documents are rearranged for fill-in-the-middle."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = self.config
        assert isinstance(config, GPTFIMDatasetConfig) and config.fim_extra_tokens is not None
        self.config: GPTFIMDatasetConfig = config
        if not config.add_extra_token_to_sequence:
            raise ConfigError("fill-in-the-middle data without the extra token", fix="add_extra_token_to_sequence=True")
        if getattr(config.tokenizer, "adds_tokens", False) or config.tokenizer.tokenize(""):  # those of others: either
            raise ConfigError(
                "--fim-data with a tokenizer that adds special tokens to every text",
                why="the three parts of a document are tokenised apart: each would begin or end with them",
                fix="--tokenizer-hf-no-include-special-tokens, or another tokenizer",
            )
        words = dict(config.fim_extra_tokens)
        if config.fim_split_sample is not None:
            words["split"] = config.fim_split_sample
        vocabulary = config.tokenizer.vocab
        unknown = [f"--fim-{name}-token {word}" for name, word in words.items() if word not in vocabulary]
        if unknown:
            raise ConfigError(
                f"the tokenizer has no token for {', '.join(unknown)}".replace("fim-split-token", "fim-split-sample"),
                why="each of them is one token of the vocabulary",
                fix="name tokens that the tokenizer has, or add them to it before the corpus is made",
            )
        self._ids = {name: int(vocabulary[word]) for name, word in words.items()}

    def _text(self, idx: int) -> tuple[np.ndarray, list[int]]:
        text, lengths = super()._text(idx)
        count = sum(lengths)
        seed = (self.config.random_seed + int(self.shuffle_index[idx])) % 2**32
        rearranged = self._rearrange(text[:count], np.random.RandomState(seed))[:count]
        text[: len(rearranged)] = rearranged
        text[len(rearranged) : count] = self._ids["pad"]
        return text, lengths

    def _rearrange(self, tokens: np.ndarray, random_state: np.random.RandomState) -> np.ndarray:
        """Each document of a sample by itself; end-of-document tokens stay where documents end."""
        parts: list[np.ndarray] = []
        eod = self._ids["eod"]
        for number, document in enumerate(np.split(tokens, np.flatnonzero(tokens == eod))):
            if number > 0:
                parts.append(np.array([eod], np.int64))
                document = document[1:]
            if len(document):
                parts.append(self._document(document, random_state))
        return np.concatenate(parts) if parts else tokens

    def _document(self, tokens: np.ndarray, random_state: np.random.RandomState) -> np.ndarray:
        breaks = np.flatnonzero(tokens == self._ids["split"]) if "split" in self._ids else np.empty(0, np.int64)
        if not len(breaks):
            return self._segment(tokens, self.config.fim_rate, random_state)
        if not random_state.binomial(1, self.config.fim_rate):
            return tokens
        assert self.config.fim_fragment_rate is not None
        parts: list[np.ndarray] = []
        for number, fragment in enumerate(np.split(tokens, breaks)):
            if number > 0:
                parts.append(fragment[:1])
                fragment = fragment[1:]
            if len(fragment):
                parts.append(self._segment(fragment, self.config.fim_fragment_rate, random_state))
        return np.concatenate(parts)

    def _segment(self, tokens: np.ndarray, rate: float, random_state: np.random.RandomState) -> np.ndarray:
        if not random_state.binomial(1, rate):
            return tokens
        tokenizer, ids = self.config.tokenizer, self._ids
        text = tokenizer.detokenize(tokens.tolist())
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return tokens
        low, high = sorted(random_state.randint(0, len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (tokenizer.tokenize(part) for part in (text[:low], text[low:high], text[high:]))
        if random_state.binomial(1, self.config.fim_spm_rate):
            order = [ids["prefix"], ids["suffix"], *suffix, ids["middle"], *prefix, *middle]
        else:
            order = [ids["prefix"], *prefix, ids["suffix"], *suffix, ids["middle"], *middle]
        return np.array(order, np.int64)
