"""Decoding with a trained model: greedy, by beam search, by sampling."""

from fastattn.generate.beams import Hypothesis, beam_search
from fastattn.generate.kept_graphs import drop_graphs
from fastattn.generate.sampling import greedy, sample
from fastattn.generate.translator import Translator

__all__ = ["Hypothesis", "Translator", "beam_search", "drop_graphs", "greedy", "sample"]
