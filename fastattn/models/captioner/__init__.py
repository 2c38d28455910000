"""The video captioner ABDTransformer: the model, and the layers that only it has."""

from fastattn.models.captioner.model import ABDTransformer, src_trg_mask

__all__ = ["ABDTransformer", "src_trg_mask"]
