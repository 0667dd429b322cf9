"""A sequence spread over ranks: who holds what, and the kinds of attention between them."""

from megatron_lite.faces import lazy_face

__getattr__, __dir__, __all__ = lazy_face(
    __name__,
    {
        "partition": ["join_sequence", "split_sequence"],
        "visibility": ["SegmentMask"],
        "attention": ["ContextParallelAttention"],
    },
)
