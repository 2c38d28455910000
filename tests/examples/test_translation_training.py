"""Schedule, loss, averaging and decoding."""

import dataclasses
import itertools

import pytest
import torch
from translation.checkpoint import average
from translation.data import Batch
from translation.decoding import beam_search, bleu, exact_match, translate
from translation.settings import Settings, parse_arguments
from translation.tokens import BOS, EOS, PAD, CharacterTokenizer
from translation.training import (
    Progress,
    build_model,
    build_optimizer,
    build_step,
    learning_rate,
    loss_of,
    training_step,
)

from fastattn import FusedTransformer

TINY = ["--layers", "1", "--d-model", "16", "--d-inner", "32", "--heads", "2", "--max-length", "16", "--device", "cpu"]


@pytest.fixture
def settings() -> Settings:
    return parse_arguments(TINY)[0]


@pytest.fixture
def batch() -> Batch:
    """Two sentences; the second is shorter on both sides."""
    return Batch(
        source=torch.tensor([[4, 5, 6, EOS], [7, EOS, PAD, PAD]]),
        target_in=torch.tensor([[BOS, 5, 6], [BOS, 7, PAD]]),
        target_out=torch.tensor([[5, 6, EOS], [7, EOS, PAD]]),
        tokens=11,
        target_tokens=5,
    )


def test_learning_rate() -> None:
    for step, rate in (
        (1, 512**-0.5 * 4000**-1.5),
        (2000, 512**-0.5 * 2000 * 4000**-1.5),
        (4000, (512 * 4000) ** -0.5),
        (16000, (512 * 16000) ** -0.5),
    ):
        assert learning_rate(step, d_model=512, warmup=4000) == pytest.approx(rate, rel=1e-12)
        assert learning_rate(step, d_model=512, warmup=4000, scale=2.0) == pytest.approx(2 * rate, rel=1e-12)
    assert max(range(1, 2000), key=lambda step: learning_rate(step, 128, 300)) == 300


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_mean_over_real_tokens(settings: Settings, batch: Batch, smoothing: float) -> None:
    """Against the definition, written out: -sum_v q(v) log p(v) with q = (1 - e) [v = target] + e / V."""
    model = build_model(settings, vocabulary=10).eval()
    log_p = model(batch.source, batch.target_in).double().log_softmax(-1).view(2, 3, 10)
    losses = [
        -(1 - smoothing) * log_p[b, t, token] - smoothing * log_p[b, t].mean()
        for b, t, token in [(0, 0, 5), (0, 1, 6), (0, 2, EOS), (1, 0, 7), (1, 1, EOS)]
    ]
    expected = sum(losses).item() / 5
    assert loss_of(model, batch, settings, smoothing).item() == pytest.approx(expected, rel=1e-5)


def test_step_sets_the_rate_and_learns(settings: Settings, batch: Batch) -> None:
    model = build_model(settings, vocabulary=10).train()
    optimizer = build_optimizer(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training_step(model, optimizer, batch, 0.0, settings)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    losses = [training_step(model, optimizer, batch, 0.01, settings).item() for _ in range(30)]
    assert losses[-1] < 0.1 * losses[0]


def test_graph_steps_learn_as_plain_steps_do(settings: Settings, batch: Batch) -> None:
    """The same losses at the same rates; on a CPU the graph's padded batches run eagerly."""
    losses = []
    for graph in (False, True):
        model = build_model(settings, vocabulary=10, dropout=0.0).train()
        step = build_step(model, build_optimizer(model), settings, graph)
        losses.append([step(batch, rate).item() for rate in (0.01, 0.005, 0.02, 0.0)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][3] < 0.9 * losses[0][0]


def test_mixed_precision_stays_near(settings: Settings, batch: Batch) -> None:
    model = build_model(settings, vocabulary=10).eval()
    full = loss_of(model, batch, settings, 0.1).item()
    mixed = loss_of(model, batch, dataclasses.replace(settings, amp=True), 0.1).item()
    assert mixed != full and mixed == pytest.approx(full, rel=2**-7)


def test_weights_depend_on_the_seed_alone(settings: Settings) -> None:
    first = build_model(settings, 10).state_dict()
    torch.rand(5)
    again, without = build_model(settings, 10).state_dict(), build_model(settings, 10, dropout=0.0).state_dict()
    other = build_model(dataclasses.replace(settings, seed=2), 10).state_dict()
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], without[name]) for name in first)
    assert not torch.equal(first["trg_word_prj.weight"], other["trg_word_prj.weight"])


def test_progress_of_an_epoch(batch: Batch) -> None:
    progress = Progress()
    progress.add(torch.tensor(3.0), batch)
    progress.add(torch.tensor(1.0), dataclasses.replace(batch, target_tokens=15, tokens=20))
    state = progress.state()
    assert (state["losses"], state["step"], state["position"], state["tokens"]) == ([3.0, 1.0], 2, 2, 31)
    assert Progress(**state).state()["losses"] == [3.0, 1.0]
    entry = progress.finish_epoch()
    assert entry["train_loss"] == pytest.approx((3 * 5 + 1 * 15) / 20)
    assert (progress.epoch, progress.position, progress.tokens, progress.step) == (1, 0, 0, 2)


def test_average() -> None:
    states = [{"weight": torch.tensor([1.0, 2**24])}, {"weight": torch.tensor([2.0, 2**24 + 2])}]
    mean = average(states)["weight"]
    assert mean.dtype == torch.float32 and mean[0] == 1.5
    assert average([states[0]] * 3)["weight"].tolist() == [1.0, 2**24]


@torch.no_grad()
def scrambled_model(settings: Settings, vocabulary: int) -> FusedTransformer:
    """Untrained, but its likelihoods differ and depend on all that went before."""
    model = build_model(settings, vocabulary).eval()
    for weight in (w for w in model.parameters() if w.dim() > 1):
        weight.normal_()
    return model


def greedy(model: FusedTransformer, source: torch.Tensor, limit: int) -> list[int]:
    """The likeliest next token of one sentence, by the whole model from scratch, until EOS or the limit."""
    ids = [BOS]
    while len(ids) <= limit and ids[-1] != EOS:
        ids.append(model(source[None], torch.tensor([ids]))[-1].argmax().item())
    return [token for token in ids[1:] if token != EOS]


@torch.no_grad()
def test_one_hypothesis_is_greedy_decoding(settings: Settings) -> None:
    """For a batch of sentences that end at different times, and some not within the limit."""
    model = scrambled_model(dataclasses.replace(settings, seed=2), vocabulary=6)
    sources = torch.randint(4, 6, (30, 7))
    for row, source in enumerate(sources):
        source[row % 6 + 1 :] = PAD
        source[row % 6] = EOS
    found = beam_search(model, sources, 8, beam=1)
    assert found == [greedy(model, source[source != PAD], 8) for source in sources]
    assert len(set(map(len, found))) > 2 and 8 in map(len, found)


@torch.no_grad()
def test_beam_search_that_keeps_everything_finds_the_likeliest(settings: Settings) -> None:
    """An untrained model of 6 tokens and at most 3 of them: every translation is tried here, one by one."""
    model = scrambled_model(settings, vocabulary=6)
    sources = torch.tensor([[a, b, c, EOS] for a, b, c in itertools.product((4, 5), repeat=3)])

    others = [token for token in range(6) if token != EOS]
    ended = [torch.tensor([(*ids, EOS) for ids in itertools.product(others, repeat=n)]) for n in range(3)]
    best = []
    for source in sources:
        likelihoods = {}
        for ids in (*ended, torch.tensor(list(itertools.product(others, repeat=3)))):  # (translations, length)
            logits = model(source.expand(len(ids), -1), torch.nn.functional.pad(ids[:, :-1], (1, 0), value=BOS))
            of_token = logits.view(*ids.shape, -1).log_softmax(-1).gather(-1, ids[..., None])
            likelihoods |= zip(map(tuple, ids.tolist()), of_token.mean((1, 2)).tolist(), strict=True)
        best.append(max(likelihoods, key=likelihoods.get))
    found = beam_search(model, sources, 3, beam=6**3)
    assert found == [[token for token in ids if token != EOS] for ids in best]
    assert found != beam_search(model, sources, 3, beam=1)


def test_beam_search_of_a_batch_equals_one_by_one(settings: Settings) -> None:
    tokenizer = CharacterTokenizer("abcdef")
    model = scrambled_model(settings, tokenizer.size)
    texts = ["abcabc", "fed", "", "a"]
    wide = dataclasses.replace(settings, beam=3)
    long = "f" * 15  # in every batch, as a batch's longest text limits its translations
    together = translate(model, tokenizer, [*texts, long], wide)
    assert together == [*(translate(model, tokenizer, [text, long], wide)[0] for text in texts), together[-1]]
    assert len(set(together)) > 2


def test_translations_come_in_order_and_long_texts_are_cut(settings: Settings) -> None:
    tokenizer = CharacterTokenizer("abcdef")
    model = build_model(settings, tokenizer.size)
    texts = ["abc", "f" * 100, "", "a"]
    together = translate(model, tokenizer, texts, settings)
    assert together == [translate(model, tokenizer, [text], settings)[0] for text in texts]
    assert together[1] == translate(model, tokenizer, ["f" * 15], settings)[0]


def test_scores() -> None:
    pairs = [("a", "The cat sat on the mat."), ("b", "A dog ran over the grass.")]
    assert exact_match(pairs, ["The cat sat on the mat.", "A dog"]) == 50.0
    value, signature = bleu(pairs, [target for _, target in pairs])
    assert value == pytest.approx(100.0) and "tok:13a" in signature and "version:" in signature
    assert bleu(pairs, ["No.", "Not at all."])[0] < 5
    shouted = [target.upper() for _, target in pairs]
    assert bleu(pairs, shouted)[0] < 50
    value, signature = bleu(pairs, shouted, lowercase=True)
    assert value == pytest.approx(100.0) and "case:lc" in signature
