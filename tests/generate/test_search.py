"""Searches find the tokens and scores of plain searches that decode every prefix again; and what a search promises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import plain_search
import pytest
import torch
from helpers import skip_without_triton
from model_checks import DEVICE, Doubled
from search_cases import BOS, EOS, PAD, SEARCHES, SUBJECTS, VOCAB, make_model, make_source
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from fastattn import generate, use_backend
from fastattn.models import Translator
from fastattn.nn import DecoderCache

LIMITS: dict[str, Any] = {"bos_idx": BOS, "eos_idx": EOS}
EVERYDAY = ("public", "beyond", "packed", "m2m100")
CASES = [
    pytest.param(subject, backend, marks=() if backend is None and subject in EVERYDAY else pytest.mark.full)
    for subject, backend in itertools.product(SUBJECTS, (None, "reference", "triton"))
]


def assert_equal(found: Any, expected: Any) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    torch.testing.assert_close([score for _, score in found], [score for _, score in expected], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("subject", "backend"), CASES)
def test_searches_find_what_plain_searches_find(subject: str, backend: Any) -> None:
    """A batch finds what its sentences find alone. backend None: on a CPU the straight steps."""
    if backend == "triton":
        skip_without_triton()
    this, device = SUBJECTS[subject], DEVICE if backend == "triton" else "cpu"
    (model, plain), src_seq = [m.to(device) for m in this.build()], this.source(3, 9).to(device)
    searches = [this.log_probabilities(plain, sentence[None]) for sentence in src_seq]
    with use_backend(backend):
        for max_len in (1, 9):
            limits = this.limits(max_len)
            found = generate.greedy(model, src_seq, **limits)
            assert found == [plain_search.greedy(search, **limits) for search in searches]
            assert found == generate.sample(model, src_seq, top_k=1, **limits)
        for length_penalty, max_len in ((0.7, 6), (2.0, 9), (-0.5, 6), (0.7, 1)):
            options = this.limits(max_len) | {"beam_size": 4, "length_penalty": length_penalty, "n_best": 3}
            together = generate.beam_search(model, src_seq, **options)
            for i, (search, found) in enumerate(zip(searches, together, strict=True)):
                assert_equal(found, plain_search.beam_search(search, **options))
                if max_len != 6:
                    assert_equal(generate.beam_search(model, src_seq[i : i + 1], **options)[0], found)


WIDE = dict(d_word_vec=256, d_model=256, d_inner=512, d_k=64, d_v=64)  # products of a row and of more differ


@pytest.mark.parametrize("batches", [1, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["narrow", "wide"])
@torch.no_grad()
def test_a_batch_changes_no_sentence(sizes: dict[str, int], batches: int) -> None:
    """64 sentences of random lengths, together and alone: logits are equal but for their rounding, and so are tokens
    but for one sentence of a batch in which two of them are equal but for this."""
    model, limits = make_model(**sizes), LIMITS | {"max_len": 12}

    def beams(src_seq: Tensor) -> list[list[int]]:
        return [found[0].tokens for found in generate.beam_search(model, src_seq, beam_size=5, **limits)]

    def logits(src_seq: Tensor, tokens: Tensor) -> Tensor:
        cache = model.start_decoding(src_seq, 1, 12)
        return torch.stack([model.next_logits(column[:, None], cache)[:, 0] for column in tokens.T], 1)

    for _ in range(batches):
        lengths, tokens = torch.randint(1, 25, (64, 1)), torch.randint(3, VOCAB, (64, 12))
        src_seq = torch.randint(3, VOCAB, (64, 24)).where(torch.arange(24) < lengths, PAD)
        sources = [src_seq[i : i + 1, :length] for i, length in enumerate(lengths)]
        found = [logits(alone, tokens[i : i + 1]) for i, alone in enumerate(sources)]
        torch.testing.assert_close(torch.cat(found), logits(src_seq, tokens), rtol=1e-4, atol=1e-4)
        for search in (lambda source: generate.greedy(model, source, **limits), beams):
            alone = [search(source)[0] for source in sources]
            assert sum(a != b for a, b in zip(alone, search(src_seq), strict=True)) <= 1


@pytest.mark.parametrize("max_seq_len", [2, 14])
@pytest.mark.parametrize("subject", ["public", "packed"])
def test_translator(subject: str, max_seq_len: int) -> None:
    """It finds what the public class finds with an equal model."""
    (model, plain), src_seq = SUBJECTS[subject].build(), make_source()
    translator = Translator(model, 4, max_seq_len, PAD, PAD, BOS, EOS)
    found = translator.translate(src_seq)
    assert found == [plain_search.translate(plain, one[None], 4, max_seq_len, PAD, BOS, EOS) for one in src_seq]
    assert found == [translator.translate_sentence(sentence[None]) for sentence in src_seq]


@pytest.mark.parametrize("search", SEARCHES)
def test_wrapped_and_broken_models(search: str) -> None:
    model, src_seq = make_model(), make_source()
    found = SEARCHES[search](model, src_seq, SUBJECTS["public"], 5)
    assert search == "Translator" or SEARCHES[search](AveragedModel(model), src_seq, SUBJECTS["public"], 5) == found
    models = [make_model(n_position=n, pack_padding=True) for n in (4, 40)]  # wrapped positions grow
    for stack in [stack for m in models for stack in (m.encoder, m.decoder)]:
        stack.position_enc = Doubled(stack.position_enc)
    few, many = (SEARCHES[search](m, src_seq, SUBJECTS["public"], 5) for m in models)
    assert few == many
    nn.init.constant_(model.decoder.layer_stack[1].pos_ffn.w_1.weight, math.nan)
    with pytest.raises(ValueError, match="the model gave NaN within 1 tokens"):
        SEARCHES[search](model, src_seq, SUBJECTS["public"], 5)


class Bigrams(nn.Module):
    """A model without a past: the logits depend on position and token. table: (positions, classes, classes)."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def start_decoding(self, source: Tensor, rows: int, capacity: int) -> DecoderCache:
        return DecoderCache(len(source), rows, capacity, source.device)

    def next_logits(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        cache.advance()
        return self.table[cache.length - 1][tokens]

    def log_probabilities(self, prefix: list[int]) -> list[float]:
        return self.table[len(prefix) - 1][prefix[-1]].log_softmax(-1).tolist()


def few_choices(classes: int, *weights: list[float]) -> Tensor:
    """Each token is followed by as many tokens as one of the `weights` has, and never by others: full of ties."""
    table = torch.full((8, classes, classes), -torch.inf)
    for row in table.view(-1, classes):
        chosen = weights[torch.randint(len(weights), ()).item()]
        row[torch.randperm(classes)[: len(chosen)]] = torch.tensor(chosen).log()
    return table


EQUAL = [[1.0] * n for n in (1, 2, 4)]
TABLES: dict[str, tuple[float, Callable[[], Tensor]]] = {  # name -> length_penalty, log probabilities
    "equal": (0.0, lambda: few_choices(7, *EQUAL)),
    "equal, penalty": (0.7, lambda: few_choices(7, *EQUAL)),
    "late_winners": (2.0, lambda: 4 * torch.randn(8, 7, 7)),
    "140": (0.7, lambda: few_choices(140, [2.0, 1.0, 1.0])),  # equal ones in chunks of which others have likelier ones
}


@pytest.mark.parametrize("beam_size, n_best", [(1, 1), (5, 3), (16, 16)])
@pytest.mark.parametrize("table", TABLES)
def test_ties_and_late_winners(beam_size: int, n_best: int, table: str) -> None:
    """Equal candidates: the better beam first, then the lower token. The beam is also wider than the vocabulary, which
    may be of several chunks. With a large penalty a long sentence overtakes others that ended early."""
    torch.manual_seed(0)
    length_penalty, make = TABLES[table]
    options = LIMITS | {"beam_size": beam_size, "max_len": 8, "length_penalty": length_penalty, "n_best": n_best}
    for _ in range(20 if table != "140" else 6):
        model = Bigrams(make())
        (found,) = generate.beam_search(model, torch.zeros(1, 1), **options)
        assert_equal(found, plain_search.beam_search(model.log_probabilities, **options))


def test_on_token() -> None:
    """It gets the tokens of each sentence until that ends, also when sentences that are done have left the batch."""
    (model, _), src_seq, seen = SUBJECTS["beyond"].build(), make_source(), [[] for _ in range(5)]

    def on_token(step: int, sentences: list[int], tokens: list[list[int]]) -> None:
        for sentence, (token,) in zip(sentences, tokens, strict=True):
            assert len(seen[sentence]) == step - 1
            seen[sentence].append(token)

    found = generate.greedy(model, src_seq, max_len=15, on_token=on_token, **LIMITS)
    assert [tokens[:-1] if tokens[-1] == EOS else tokens for tokens in seen] == found
    assert len({*map(len, found)}) > 1


def test_every_module_returns_to_its_mode() -> None:
    model = make_model().train()
    model.encoder.dropout.eval()
    generate.greedy(model, make_source(), max_len=3, **LIMITS)
    assert not model.encoder.dropout.training
    assert model.encoder.layer_stack[0].slf_attn.dropout.training


@pytest.mark.parametrize(
    "options, share",
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_k": 3, "top_p": 0.8}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"temperature": 0.5, "top_p": 0.8}, [0, 0, 9 / 25, 16 / 25]),
    ],
)
def test_sample_draws_by_probability(options: dict[str, Any], share: list[float]) -> None:
    """By the given generator."""
    n, model = 8000, Bigrams(torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(1, 1, 4))

    def draw(seed: int) -> Tensor:
        limits = {"max_len": 1, "bos_idx": 0, "eos_idx": -1, "generator": torch.Generator().manual_seed(seed)}
        return torch.tensor(generate.sample(model, torch.zeros(n, 1), **limits, **options))[:, 0]

    drawn = draw(1)
    assert torch.equal(draw(1), drawn) and not torch.equal(draw(2), drawn)
    found = drawn.bincount(minlength=4) / n
    assert (found[[p == 0 for p in share]] == 0).all()
    torch.testing.assert_close(found, torch.tensor(share).float(), rtol=0, atol=4 * 0.5 / n**0.5)
