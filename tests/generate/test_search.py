"""The search itself: ties, limits, what on_token gets, sampling, and errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import plain_search
import pytest
import torch
from search_cases import BOS, EOS, PAD, make_model, make_source
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from fastattn import generate
from fastattn.generate.beams import topk_of_sums
from fastattn.models import Translator
from fastattn.nn import DecoderCache

LIMITS: dict[str, Any] = {"bos_idx": BOS, "eos_idx": EOS}


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


def equal_choices(positions: int, classes: int) -> Tensor:
    """Each token is followed by 1, 2 or 4 tokens of equal probability, and never by others: full of ties."""
    table = torch.full((positions, classes, classes), -torch.inf)
    for row in table.view(-1, classes):
        row[torch.randperm(classes)[: 2 ** torch.randint(3, ()).item()]] = 0
    return table


@pytest.mark.parametrize("beam_size, n_best", [(1, 1), (2, 2), (5, 3), (16, 16)])
@pytest.mark.parametrize(
    "length_penalty, table",
    [(0.0, equal_choices), (0.7, equal_choices), (2.0, lambda *sizes: 4 * torch.randn(*sizes, 7))],
)
def test_ties_and_late_winners(beam_size: int, n_best: int, length_penalty: float, table: Any) -> None:
    """Equal candidates: the better beam first, then the lower token. The beam is also wider than the vocabulary. With a
    large penalty a long sentence overtakes others that ended early."""
    torch.manual_seed(0)
    for _ in range(20):
        model = Bigrams(table(8, 7))
        options = LIMITS | {"beam_size": beam_size, "max_len": 8, "length_penalty": length_penalty, "n_best": n_best}
        (found,) = generate.beam_search(model, torch.zeros(1, 1), **options)
        expected = plain_search.beam_search(model.log_probabilities, **options)
        assert [h.tokens for h in found] == [tokens for tokens, _ in expected]
        torch.testing.assert_close([h.score for h in found], [score for _, score in expected])


@pytest.mark.parametrize("classes", [3, 64, 65, 200, 1000])
@pytest.mark.parametrize("k", [1, 8, 40])
def test_topk_of_sums(classes: int, k: int) -> None:
    b = torch.randint(-3, 9, (4, 5, classes)).float()  # many are equal
    b[0, 2], b[1, :, 1:] = -torch.inf, -torch.inf
    a = torch.tensor([0.0, -1.0, 2.0, 0.0, -torch.inf]).expand(4, 5)
    best, place = topk_of_sums(a, b, k)
    all_sums = (a[..., None] + b).flatten(1)
    expected, order = all_sums.sort(dim=1, descending=True, stable=True)
    expected, order = expected[:, :k], order[:, :k]
    torch.testing.assert_close(best[:, : expected.shape[1]], expected, rtol=0, atol=0)
    assert (best[:, expected.shape[1] :] == -torch.inf).all()
    real = expected > -torch.inf
    assert torch.equal(place[:, : expected.shape[1]][real], order[real])


def test_sentences_that_are_done_leave_the_batch() -> None:
    """A model that repeats the source's token t, t times, and then ends: the batch that it gets shrinks."""

    class Repeating(Bigrams):
        sizes: list[int] = []

        def next_logits(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
            self.sizes.append(len(tokens))
            logits = super().next_logits(tokens, cache)
            return nn.functional.one_hot(source, 12) * 9.0 if cache.length == 1 else logits

    table = torch.eye(12).repeat(30, 1, 1)
    for token in range(3, 12):
        table[token:, token, EOS] = 9.0
    source = torch.arange(3, 12)[:, None]
    model = Repeating(table)
    assert generate.greedy(model, source, max_len=25, **LIMITS) == [[token] * token for token in range(3, 12)]
    assert model.sizes[0] == 9
    assert model.sizes[-1] < 4
    assert len(model.sizes) == 12


def test_on_token() -> None:
    model, src_seq, seen = make_model(), make_source(), [[] for _ in range(5)]

    def on_token(step: int, sentences: list[int], tokens: list[list[int]]) -> None:
        for sentence, (token,) in zip(sentences, tokens, strict=True):
            assert len(seen[sentence]) == step - 1
            seen[sentence].append(token)

    found = generate.greedy(model, src_seq, max_len=15, on_token=on_token, **LIMITS)
    assert [tokens[:-1] if tokens[-1] == EOS else tokens for tokens in seen] == found
    steps: list[tuple[int, list[int], int]] = []
    generate.beam_search(
        model, src_seq, beam_size=3, max_len=15, on_token=lambda n, s, t: steps.append((n, s, len(t[0]))), **LIMITS
    )
    assert steps[0] == (1, [0, 1, 2, 3, 4], 3)


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
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.65}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 1e-6}, [0, 0, 0, 1]),
        ({"top_k": 3, "top_p": 0.8}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"temperature": 0.5, "top_p": 0.8}, [0, 0, 9 / 25, 16 / 25]),
    ],
)
def test_sample_draws_by_probability(options: dict[str, Any], share: list[float]) -> None:
    n = 20000
    model = Bigrams(torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(1, 1, 4))
    found = generate.sample(model, torch.zeros(n, 1), max_len=1, bos_idx=0, eos_idx=-1, **options)
    drawn = torch.tensor(found)[:, 0].bincount(minlength=4) / n
    assert (drawn[[p == 0 for p in share]] == 0).all()
    torch.testing.assert_close(drawn, torch.tensor(share).float(), rtol=0, atol=4 * 0.5 / n**0.5)


def test_sample_is_repeatable() -> None:
    model, src_seq = make_model(), make_source()

    def draw(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return generate.sample(model, src_seq, max_len=15, generator=generator, temperature=2.0, top_p=0.9, **LIMITS)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_no_sentence() -> None:
    nothing = torch.zeros(0, 4, dtype=torch.long)
    assert generate.greedy(make_model(), nothing, max_len=3, **LIMITS) == []
    assert generate.beam_search(make_model(), nothing, beam_size=2, max_len=3, **LIMITS) == []


def test_the_first_sentences_are_the_same_for_every_n_best() -> None:
    """So those that ended come before beams that did not, even before better ones."""
    model, src_seq, options = make_model(), make_source(), LIMITS | {"beam_size": 8, "max_len": 3}
    best = generate.beam_search(model, src_seq, n_best=8, **options)
    assert any(a.score < b.score for found in best for a, b in itertools.pairwise(found))
    for n_best in (1, 3):
        assert generate.beam_search(model, src_seq, n_best=n_best, **options) == [found[:n_best] for found in best]


def test_eos_that_no_sentence_has() -> None:
    found = generate.greedy(make_model(), make_source(), max_len=9, bos_idx=BOS, eos_idx=-1)
    assert [len(tokens) for tokens in found] == [9] * 5 and any(EOS in tokens for tokens in found)


def test_numbers_of_numpy() -> None:
    model, src_seq = make_model(), make_source()
    numbers = {"bos_idx": np.int64(BOS), "eos_idx": np.int32(EOS), "max_len": np.int64(5)}
    assert generate.greedy(model, src_seq, **numbers) == generate.greedy(model, src_seq, max_len=5, **LIMITS)
    options = {"beam_size": np.int64(2), "n_best": np.int64(2), "length_penalty": np.float32(0.5)}
    found = generate.beam_search(model, src_seq, **numbers, **options)
    assert found == _beams(model, src_seq, n_best=2, length_penalty=0.5)
    assert generate.sample(model, src_seq, temperature=np.float32(0.5), top_p=np.float64(0.5), **numbers)


class Unregistered:
    """A model that is no nn.Module."""

    def __init__(self, model: Any) -> None:
        self.start_decoding, self.next_logits = model.start_decoding, model.next_logits


@pytest.mark.parametrize(
    "wrap",
    [AveragedModel, nn.DataParallel, torch.compile, lambda model: torch.compile(AveragedModel(model)), Unregistered],
    ids=["AveragedModel", "DataParallel", "compile", "compile of AveragedModel", "no module"],
)
def test_a_wrapped_model(wrap: Any, device: torch.device) -> None:
    model, src_seq = make_model().to(device), make_source().to(device)  # DataParallel moves a model to the first GPU
    wrapped = wrap(model)
    assert _greedy(wrapped, src_seq) == _greedy(model, src_seq)
    assert _beams(wrapped, src_seq) == _beams(model, src_seq)
    if wrap is not Unregistered:
        options = (3, 9, PAD, PAD, BOS, EOS)
        assert Translator(wrapped, *options).translate(src_seq) == Translator(model, *options).translate(src_seq)


def _greedy(model: nn.Module, src_seq: Any, **options: Any) -> Any:
    return generate.greedy(model, src_seq, **LIMITS | {"max_len": 5} | options)


def _beams(model: nn.Module, src_seq: Any, **options: Any) -> Any:
    return generate.beam_search(model, src_seq, **LIMITS | {"max_len": 5, "beam_size": 2} | options)


def _sample(model: nn.Module, src_seq: Any, **options: Any) -> Any:
    return generate.sample(model, src_seq, **LIMITS | {"max_len": 5} | options)


def _translator(model: nn.Module, src_seq: Any) -> Any:
    return Translator(model, 2, 9, PAD, PAD, BOS, EOS).translate(src_seq)


@pytest.mark.parametrize("decode", [_greedy, _beams, _sample, _translator])
def test_source_without_tokens(decode: Any) -> None:
    for src_seq in (torch.tensor([[5, 6], [PAD, PAD]]), torch.zeros(2, 0, dtype=torch.long)):
        with pytest.raises(ValueError, match="src_seq has a sentence without tokens"):
            decode(make_model(), src_seq)


@pytest.mark.parametrize("decode", [_greedy, _beams, _sample])
def test_nan_is_an_error(decode: Any) -> None:
    model = make_model()
    nn.init.constant_(model.decoder.layer_stack[1].pos_ffn.w_1.weight, math.nan)
    with pytest.raises(ValueError, match="the model gave NaN within 1 tokens"):
        decode(model, make_source())


@pytest.mark.parametrize("decode", [_greedy, _beams, _sample])
def test_eos_beyond_the_logits_of_another_model(decode: Any) -> None:
    with pytest.raises(ValueError, match="eos_idx must be below 7, the size of the model's vocabulary, got 7"):
        decode(Bigrams(torch.zeros(5, 7, 7)), torch.zeros(2, 1), eos_idx=7)


def test_models_that_cannot_be_decoded() -> None:
    message = "model must be a FusedTransformer or have its start_decoding and .*, got Transformer, which has no start"
    model = nn.Transformer(8, 1, 1, 1, 8, batch_first=True)
    for decode in (_greedy, _beams, _sample, _translator):
        with pytest.raises(TypeError, match=message):
            decode(model, make_source())
    with pytest.raises(TypeError, match="got AveragedModel, which has no start_decoding"):
        _greedy(AveragedModel(model), make_source())
    with pytest.raises(TypeError, match="got Bigrams, which has no src_pad_idx"):
        Translator(Bigrams(torch.zeros(5, 7, 7)), 2, 9, PAD, PAD, BOS, EOS)


def test_bad_steps() -> None:
    model, tokens = make_model(), torch.full((5, 1), BOS)
    with torch.no_grad():
        cache = model.start_decoding(make_source(), 1, 2)
        with pytest.raises(ValueError, match=r"tokens has shape \(5, 2\), expected \(B, W\) = \(5, 1\)"):
            model.decoder.step(tokens.expand(-1, 2), cache)
        model.train()
        with pytest.raises(ValueError, match="call eval"):
            model.decoder.step(tokens, cache)
        model.eval()
        for _ in range(2):
            model.decoder.step(tokens, cache)
        with pytest.raises(ValueError, match="it holds 2 tokens"):
            model.decoder.step(tokens, cache)
