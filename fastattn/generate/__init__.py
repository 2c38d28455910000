"""Decoding with a trained model: greedy, by beam search, by sampling."""

from fastattn.generate.beams import Hypothesis, beam_search
from fastattn.generate.steps import drop_graphs
from fastattn.generate.tokens import greedy, sample
from fastattn.generate.translator import Translator

__all__ = ["Hypothesis", "Translator", "beam_search", "drop_graphs", "greedy", "sample"]
