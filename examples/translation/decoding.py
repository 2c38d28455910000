"""Translation by beam search, and the scores of translations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fastattn import AttentionMask, FusedTransformer
from translation.data import Pair, pad
from translation.settings import Settings
from translation.tokens import BOS, EOS, Tokenizer

HYPOTHESES = 128  # translated together: HYPOTHESES // beam sentences


@dataclass(frozen=True)
class Encoded:
    """What the decoder needs of B source sentences at every step."""

    model: FusedTransformer
    source: Tensor  # (B, Ls) int64, PAD on the right
    output: Tensor  # (B, Ls, d_model), the encoder's
    projected: dict[nn.Module, tuple[Tensor, Tensor]]  # keys and values of each decoder layer, computed once

    @classmethod
    def of(cls, model: FusedTransformer, source: Tensor) -> "Encoded":
        output, *_ = model.encoder(source, model.src_mask(source))
        return cls(model, source, output, model.decoder.project_encoder(output))

    def take(self, rows: Tensor) -> "Encoded":
        """These rows, which may be repeated."""
        projected = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self.projected.items()}
        return Encoded(self.model, self.source[rows], self.output[rows], projected)

    def next_token(self, prefix: Tensor) -> Tensor:
        """Logits (B, n_trg_vocab) of the token that follows each row of prefix (B, Lt)."""
        masks = AttentionMask(is_causal=True), self.model.src_mask(self.source)
        decoded, *_ = self.model.decoder(prefix, masks[0], self.output, masks[1], enc_projected=self.projected)
        return self.model.project(decoded[:, -1])


@torch.no_grad()
def beam_search(model: FusedTransformer, source: Tensor, max_new_tokens: int, beam: int) -> list[list[int]]:
    """The likeliest translations by beam search; with a beam of 1 that is greedy decoding.

    source: (B, Ls) int64, PAD on the right. Returns B lists of at most `max_new_tokens` token ids, without BOS and EOS.
    The model must be in eval mode. The `beam` likeliest beginnings are each continued by every token. A sentence is
    done and leaves the batch when `beam` of its hypotheses have ended; the best is that of the highest log-likelihood
    a token, EOS included. Source: Sutskever et al. 2014, arXiv:1409.3215, section 3.2, but for the division by length.
    """
    sentences = list(range(len(source)))  # each has `beam` rows of the batch
    encoded = Encoded.of(model, source).take(torch.arange(len(source), device=source.device).repeat_interleave(beam))
    prefix = source.new_full((len(source) * beam, 1), BOS)
    likelihood = encoded.output.new_full((len(source), beam), -torch.inf, dtype=torch.float32)
    likelihood[:, 0] = 0  # at first all hypotheses are equal, so only one counts
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in sentences]  # (log-likelihood a token, ids)
    for length in range(1, max_new_tokens + 1):
        of_token = encoded.next_token(prefix).float().log_softmax(-1).view(len(sentences), beam, -1)
        classes = of_token.shape[-1]
        # Twice as many as are kept: at most one continuation of each hypothesis ends it.
        likelihood, choice = (likelihood[:, :, None] + of_token).flatten(1).topk(2 * beam)  # (sentences, 2 * beam)
        token = choice % classes
        row = choice // classes + beam * torch.arange(len(sentences), device=choice.device)[:, None]
        ends = token == EOS
        for i, j in ends[:, :beam].nonzero().tolist():
            finished[sentences[i]].append((likelihood[i, j].item() / length, prefix[row[i, j], 1:].tolist()))

        kept = ends.int().argsort(dim=1, stable=True)[:, :beam]  # the best that go on, best first
        likelihood, token, row = (x.gather(1, kept) for x in (likelihood, token, row))
        prefix = torch.cat([prefix[row.flatten()], token.view(-1, 1)], dim=1)
        going_on = torch.tensor([len(finished[sentence]) < beam for sentence in sentences], device=prefix.device)
        if going_on.all():
            continue
        rows = going_on.repeat_interleave(beam)
        likelihood, prefix, encoded = likelihood[going_on], prefix[rows], encoded.take(rows)
        sentences = [sentence for sentence in sentences if len(finished[sentence]) < beam]
        if not sentences:
            break
    for i, sentence in enumerate(sentences):
        finished[sentence].append((likelihood[i, 0].item() / max_new_tokens, prefix[beam * i, 1:].tolist()))
    return [max(hypotheses)[1] for hypotheses in finished]


def translate(model: FusedTransformer, tokenizer: Tokenizer, texts: Sequence[str], settings: Settings) -> list[str]:
    """Translations of `texts`, in their order. A text of more than --max-length tokens is cut there."""
    model.eval()
    max_length = settings.max_length
    encoded = [np.array([*ids[: max_length - 1], EOS]) for ids in tokenizer.encode(texts)]
    by_length = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
    translations = [""] * len(texts)
    sentences = max(1, HYPOTHESES // settings.beam)
    for start in range(0, len(texts), sentences):
        chosen = by_length[start : start + sentences]
        source = pad([encoded[i] for i in chosen]).to(settings.device)
        # A translation more than twice as long as its source is a repetition that would never end.
        limits = [min(max_length - 1, 2 * len(encoded[i]) + 10) for i in chosen]
        found = beam_search(model, source, max(limits), settings.beam)
        for i, ids, limit in zip(chosen, found, limits, strict=True):
            translations[i] = tokenizer.decode(ids[:limit])
    return translations


@dataclass(frozen=True)
class Score:
    """A test set's translations and their score in percent. `signature` is sacreBLEU's; None for exact match."""

    test: str
    metric: str
    value: float
    signature: str | None
    pairs: list[Pair]
    translations: list[str]


def exact_match(pairs: Sequence[Pair], translations: Sequence[str]) -> float:
    """The share, in percent, of translations that equal their target."""
    equal = sum(translation == target for (_, target), translation in zip(pairs, translations, strict=True))
    return 100 * equal / len(pairs)


def bleu(pairs: Sequence[Pair], translations: Sequence[str], lowercase: bool = False) -> tuple[float, str]:
    """Corpus BLEU and sacreBLEU's signature of how it was computed. Source: Post 2018, arXiv:1804.08771."""
    from sacrebleu.metrics import BLEU

    metric = BLEU(lowercase=lowercase)
    score = metric.corpus_score(list(translations), [[target for _, target in pairs]])
    return score.score, str(metric.get_signature())
