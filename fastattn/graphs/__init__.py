"""CUDA graphs of training: one launch of the host for a whole forward, backward or step."""

from fastattn.graphs.graphed_call import Stats, stats

__all__ = ["Stats", "stats"]
