"""The choice of a search's next tokens in Triton. Specification: fastattn/generate/beams.py and sampling.py

Kernels and their launches are in tokens.py.
"""

from .tokens import choose, unsupported_reason

__all__ = ["choose", "unsupported_reason"]
