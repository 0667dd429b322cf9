"""Tokenised corpora, and the samples that are drawn from them. Everything is numpy; the loader makes tensors."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "indexed_dataset": ["IndexedDataset", "IndexedDatasetBuilder", "DType", "get_bin_path", "get_idx_path"],
        "index_building": ["build_blending_indices", "build_exhaustive_blending_indices", "build_sample_index"],
        "megatron_dataset": ["MegatronDataset"],
        "gpt_dataset": ["GPTDataset", "GPTDatasetConfig", "MockGPTDataset", "MockGPTLowLevelDataset"],
        "fim_dataset": ["GPTFIMDataset", "GPTFIMDatasetConfig"],
        "sft_dataset": ["SFTDataset", "SFTLowLevelDataset"],
        "masked_dataset": ["MaskedWordPieceDataset", "MaskedWordPieceDatasetConfig"],
        "t5_dataset": ["T5MaskedWordPieceDataset", "T5MaskedWordPieceDatasetConfig"],
        "bert_dataset": ["BERTMaskedWordPieceDataset", "BERTMaskedWordPieceDatasetConfig"],
        "blended_dataset": ["BlendedDataset"],
        "blended_megatron_dataset_config": [
            "BlendedMegatronDatasetConfig",
            "convert_split_vector_to_split_matrix",
            "parse_and_normalize_split",
        ],
        "blended_megatron_dataset_builder": ["BlendedMegatronDatasetBuilder"],
        "samplers": ["MegatronPretrainingSampler", "MegatronPretrainingRandomSampler"],
        "utils": ["Split", "get_blend_from_list", "normalize"],
    },
)
