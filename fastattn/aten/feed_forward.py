"""The position-wise feed-forward network: the formula is made of PyTorch's own operators already."""

from fastattn.reference.feed_forward import feed_forward, why_not

__all__ = ["feed_forward", "why_not"]
