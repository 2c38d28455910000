"""Greedy translation with the whole encoder-decoder: the default path against the reference path, and plain PyTorch.

    pytest benchmarks/bench_decoding.py --benchmark-only            the quick cases
    python benchmarks/report.py --out DIR --only decoding

There is no incremental decoding yet: the source is encoded once, and each step decodes the whole prefix. What was
encoded FusedTransformer projects to keys and values once, which plain PyTorch's decoder does at every step; "projected
at every step" is without that. Every sentence gets the same number of tokens, whatever is predicted. Compared are the
logits of the next token at every step of a prefix that is given; timed is the loop that takes the most likely token.
tokens/s counts those of all sentences.
"""

from __future__ import annotations

from typing import Any

import harness
import models
import torch
from cases import DecodingCase
from harness import Inputs, Provider, Run
from tables import cases_of
from torch import Tensor, nn

from fastattn import AttentionMask, get_pad_mask, get_subsequent_mask, use_backend


def make_inputs(case: DecodingCase, device: torch.device) -> Inputs:
    longest = max(case.length, case.new_tokens + 1)
    inputs = models.make_inputs(case, device, longest)
    generator = torch.Generator().manual_seed(harness.SEED)
    prefix = torch.randint(1, case.n_vocab, (case.batch, case.new_tokens), generator=generator).to(device)
    leaves = {name: weight.to(case.dtype) for name, weight in inputs.leaves.items()}
    return Inputs(leaves, {"src_seq": inputs.fixed["src_seq"], "prefix": prefix})


def fused_masks(model: nn.Module, src_seq: Tensor) -> tuple[Any, Any]:
    """(of the source, of a prefix by its tokens); no prefix is padded."""
    mask = model.src_mask(src_seq)
    return mask, lambda tokens: AttentionMask(is_causal=True)


def plain_masks(model: nn.Module, src_seq: Tensor) -> tuple[Any, Any]:
    return get_pad_mask(src_seq, models.PAD), get_subsequent_mask


def provider(
    name: str, build: models.Build, masks: Any, backend: str | None = None, *, project: bool = False, **notes: Any
) -> Provider:
    """project: the encoder's output once, ahead of the steps."""

    def make(case: DecodingCase, inputs: Inputs, dropout_p: float) -> Run:
        weights, src_seq, prefix = inputs.leaves, inputs.fixed["src_seq"], inputs.fixed["prefix"]
        model = build(case, 0.0, max(case.length, case.new_tokens + 1))
        model = model.to(src_seq.device, next(iter(weights.values())).dtype).eval()
        model.load_state_dict(weights)
        src_mask, trg_mask = masks(model, src_seq)

        def decode(given: Tensor | None) -> list[Tensor]:
            """The logits (batch, n_vocab) of each step. given: (batch, new_tokens) tokens to follow, or None."""
            logits = []
            with torch.no_grad(), use_backend(backend):
                encoded, *_ = model.encoder(src_seq, src_mask)
                known = {"enc_projected": model.decoder.project_encoder(encoded)} if project else {}
                tokens = prefix[:, :1]
                for step in range(case.new_tokens):
                    decoded, *_ = model.decoder(tokens, trg_mask(tokens), encoded, src_mask, **known)
                    logits.append(_project(model, decoded[:, -1]))
                    best = logits[-1].argmax(-1, keepdim=True)
                    tokens = torch.cat([tokens, best], 1) if given is None else given[:, : step + 2]
            return logits

        def results() -> dict[str, Tensor]:
            return {"logits": torch.stack(decode(prefix))}

        return Run(results, {"decode": lambda: decode(None)}, notes)

    return Provider(name, make, ours=build is models.fused)


def _project(model: nn.Module, decoded: Tensor) -> Tensor:
    """The models' last layer; both share it with the embedding, and scale it."""
    return model.trg_word_prj(decoded) * decoded.shape[-1] ** -0.5


def providers(device: torch.device) -> list[Provider]:
    return [
        provider("reference", models.fused, fused_masks, "reference"),
        provider("default", models.fused, fused_masks, project=True, default=True),
        provider("default, projected at every step", models.fused, fused_masks, without="project_encoder"),
        provider("plain PyTorch", models.plain, plain_masks),
    ]


BENCHMARK = harness.Benchmark(
    name="decoding",
    cases=cases_of(DecodingCase),
    directions=("decode",),
    rates=("token",),
    inputs=make_inputs,
    providers=providers,
)


def test_decoding(benchmark: Any, timed: Any) -> None:
    benchmark(timed)
