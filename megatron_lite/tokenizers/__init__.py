"""Text to token ids and back."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "tokenizer_config": ["TokenizerConfig"],
        "base": ["MegatronTokenizer"],
        "sentencepiece": ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"],
        "huggingface": ["HuggingFaceTokenizer"],
        "sft": ["SFTTokenizer"],
        "gpt2_bpe": ["GPT2BPETokenizer"],
        "bert_wordpiece": ["BertWordPieceLowerCase", "BertWordPieceCase"],
        "tiktoken": ["TikTokenizer"],
        "null": ["NullTokenizer"],
        "byte_level": ["ByteTokenizer"],
        # Functions named as their files are imported from the file: the room's attribute is the file.
        "build_tokenizer": ["vocab_size_with_padding"],
        "train_sentencepiece": [],
        "train_wordpiece": [],
    },
)
