"""What ABDTransformer does next to what test_contract.py sees: beam search in both directions."""

from __future__ import annotations

from typing import Any

import plain_search
import pytest
import torch
from model_checks import ENDS, VOCABULARY, WIDTHS, Twins, captioner, rows
from torch import Tensor

ALL = [(mode, positions) for mode in WIDTHS for positions in ("batch", "sequence")]


@torch.no_grad()
def plain_beams(models: Twins, beam_size: int, max_len: int) -> tuple[list[Any], list[Any]]:
    """(right-to-left, left-to-right) captions of each source, [(words, score)], one source at a time."""
    model, source, (masks, *_) = models.theirs, models.batch[0], models.batch[3]
    r2l_memory, memory, mask = model.encodings(source, masks)
    options = dict(beam_size=beam_size, n_best=beam_size, max_len=max_len + 1, length_penalty=0.0)
    options |= dict(bos_idx=ENDS, eos_idx=ENDS)
    results: tuple[list[Any], list[Any]] = ([], [])
    for i in range(memory.size(0)):
        one = slice(i, i + 1)

        def states(decoder: Any, memory: Tensor, prefix: list[int], *other: Any, one: slice = one) -> Tensor:
            """The whole batch is embedded, for the sake of positions that are counted in the batch."""
            embedded = model.words(torch.tensor([prefix], device=memory.device).expand(memory.size(0), -1))[one]
            causal = memory.new_ones(1, len(prefix), len(prefix), dtype=torch.bool).tril()
            return decoder(embedded, causal, memory[one], mask[one], *other)

        def words(found: Tensor) -> list[float]:
            return model.log_probs(found[0, -1]).tolist()

        r2l, l2r = model.r2l_decoder, model.l2r_decoder
        found = plain_search.beam_search(lambda prefix: words(states(r2l, r2l_memory, prefix)), **options)  # noqa: B023
        other = states(r2l, r2l_memory, [ENDS, *found[0][0]])
        results[0].append(found)
        results[1].append(plain_search.beam_search(lambda p: words(states(l2r, memory, p, other, None)), **options))  # noqa: B023
    return results


@pytest.mark.parametrize(("mode", "positions"), rows([("one", "sequence"), ("four", "batch")], ALL))
def test_beam_search_decode(mode: str, positions: str) -> None:
    models = captioner(mode, positions).train(False)
    models.each(lambda m: m.generator.linear.bias.data[ENDS].add_(1))  # some captions end before others
    found, names = models.ours.beam_search_decode(models.batch[0], 3, 6), VOCABULARY.idx2word
    for side, expected_side in zip(found, plain_beams(models, 3, 6), strict=True):
        for hypotheses, expected in zip(side, expected_side, strict=True):
            assert [h.value for h in hypotheses] == [[names[token] for token in tokens] for tokens, _ in expected]
            torch.testing.assert_close([h.score for h in hypotheses], [s for _, s in expected], rtol=0, atol=5e-5)
