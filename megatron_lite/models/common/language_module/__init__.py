"""The base class of language models."""
