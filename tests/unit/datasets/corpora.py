"""Small corpora, a tokenizer and a build, for the tests of the datasets."""

from collections import OrderedDict

import numpy as np

from megatron_lite.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron_lite.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron_lite.datasets.indexed_dataset import IndexedDatasetBuilder

EOD = 0


class Words:
    """A tokenizer of which only the special tokens matter."""

    vocab_size = 1000
    eod = eos = EOD
    unique_identifiers = OrderedDict([("class", "Words")])

    def __init__(self, pad: int | None = -1):
        self.pad = pad


def write_corpus(prefix, documents) -> str:
    """A pair of one sequence a document."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for tokens in documents:
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def numbered(count: int, length: int = 9, first: int = 1) -> list[list[int]]:
    """Documents that all have other tokens, each with an end-of-document token."""
    return [[*range(first + i * (length - 1), first + (i + 1) * (length - 1)), EOD] for i in range(count)]


def config(blend, **options) -> GPTDatasetConfig:
    defaults = dict(
        random_seed=1234,
        sequence_length=8,
        split="1,0,0" if "blend_per_split" not in options else None,
        tokenizer=Words(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return GPTDatasetConfig(blend=blend, **{**defaults, **options})


def build(blend, sizes=(None, None, None), cls=GPTDataset, **options):
    return BlendedMegatronDatasetBuilder(cls, list(sizes), lambda: True, config(blend, **options)).build()
