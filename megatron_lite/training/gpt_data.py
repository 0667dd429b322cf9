"""From the flags to the GPT data sets: which class reads the data, and what it is told."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from megatron_lite.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron_lite.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron_lite.datasets.megatron_dataset import MegatronDataset
from megatron_lite.datasets.sft_dataset import SFTDataset
from megatron_lite.errors import DataError
from megatron_lite.training.data_loading import blended_options


def gpt_dataset_class(args: Namespace) -> type[MegatronDataset]:
    """The class of the data sets over one corpus, or one file of conversations."""
    if args.sft:
        return SFTDataset
    if args.mock_data:
        return MockGPTDataset
    return GPTFIMDataset if args.fim_data else GPTDataset


def gpt_dataset_config(args: Namespace, tokenizer: Any) -> GPTDatasetConfig:
    """Options of the GPT data sets, for `BlendedMegatronDatasetBuilder`.

    Raises: ConfigError for options that exclude each other; DataError for files of paths or counts that cannot be read.
    """
    options = dict(
        **blended_options(args, tokenizer),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # Without resets every mask is the causal one, which attention makes by itself: no sample carries it.
        create_attention_mask=args.reset_attention_mask and args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        sequences_per_dataset=_counts(args.per_dataset_sequences_path),
    )
    if not args.fim_data or args.mock_data:
        return GPTDatasetConfig(**options)
    return GPTFIMDatasetConfig(
        **options,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
        fim_extra_tokens={
            "prefix": args.fim_prefix_token,
            "middle": args.fim_middle_token,
            "suffix": args.fim_suffix_token,
            "pad": args.fim_pad_token,
            "eod": args.fim_eod_token,
        },
    )


def _counts(path: str | None) -> dict[str, list[int]] | None:
    """Prefix -> [sequences, document marks], from the file of --per-dataset-sequences-path."""
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            table = json.load(file)
        return {prefix: [int(sequences), int(marks)] for prefix, (sequences, marks) in table.items()}
    except OSError as error:
        raise DataError(f"--per-dataset-sequences-path {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"--per-dataset-sequences-path {path} is no table of counts: {error}",
            fix='JSON as {"prefix": [sequences, document marks]}, prefixes spelt as in --data-path',
        ) from None
