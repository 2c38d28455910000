"""The models and the sources that the tests of decoding share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import plain_search
import torch
from families import FAMILIES
from torch import Tensor, nn

from fastattn import FusedTransformer, accelerate, generate
from fastattn.models import Translator

PAD, BOS, EOS, VOCAB = 0, 1, 2, 11


def make_model(**variant: Any) -> FusedTransformer:
    """Random weights with which tokens depend on the source and on the tokens before, and beams differ and end."""
    torch.manual_seed(340)
    options = dict(d_word_vec=32, d_model=32, d_inner=48, n_layers=2, n_head=4, d_k=8, d_v=8, n_position=40)
    options |= dict(trg_emb_prj_weight_sharing=False, emb_src_trg_weight_sharing=False)
    model = FusedTransformer(VOCAB, VOCAB, PAD, PAD, **options | variant)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "layer_stack" in name and p.dim() == 2:
                p.mul_(0.6 if "enc_attn.fc" in name else 2)  # the source decides, but not alone
        model.encoder.src_word_emb.weight.normal_()
        embeddings = model.decoder.trg_word_emb.weight.normal_(std=0.7)
        head = model.trg_word_prj.weight.normal_(std=0.85 if model.scale_prj else 0.5)
        if head is not embeddings:
            head.sub_(0.4 * embeddings)  # or one token follows itself for ever
        head[EOS] *= 4
    return model.eval()


def make_source(batch: int = 5, length: int = 9, vocab: int = VOCAB, pad: int = PAD) -> Tensor:
    """Sentences of different lengths: padded at the end, one sentence also before and between."""
    src_seq = torch.randint(3, vocab, (batch, length))
    for i in range(1, batch):
        src_seq[i, length - i :] = pad
    src_seq[(src_seq == pad).all(1), 0] = 3
    src_seq[1:2, :2] = pad
    src_seq[1:2, 4] = pad
    return src_seq


# Models of transformers: the zoo's, with weights so large that tokens depend on the source and on the tokens before.
HUGGINGFACE = ("bart", "marian", "mbart", "m2m100", "pegasus", "blenderbot", "plbart", "gated t5", "umt5")
THEIR_PAD, THEIR_VOCAB = 1, 99


@functools.cache
def _untouched(name: str, seed: int) -> Any:
    model, generator = FAMILIES[name].build().cpu(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, p in model.named_parameters():
            is_table = any(part in path for part in ("embed", "shared", "relative"))
            scale = 0.1 if p.dim() == 1 else 1.0 if is_table else 1.5 * 32**-0.5
            if p.requires_grad:
                drawn = scale * torch.randn(p.shape, generator=generator) + ("norm" in path and "weight" in path)
                p.copy_(drawn)
        head = torch.randn(THEIR_VOCAB, 32, generator=generator) * (32**-0.5 if name == "mt5" else 1)
        head[THEIR_PAD] *= 1.5  # is chosen at times
        model.get_output_embeddings().weight = nn.Parameter(head)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn(1, THEIR_VOCAB, generator=generator))
    first, second = decoder_layers(model)
    if name.endswith("t5"):
        first.layer[0].SelfAttention.scaling = second.layer[1].EncDecAttention.scaling = 0.7
    else:
        first.self_attn.scaling = second.encoder_attn.scaling = 0.2
    return model


def decoder_layers(model: Any) -> Any:
    return model.get_decoder().block if hasattr(model.get_decoder(), "block") else model.get_decoder().layers


def untouched(name: str, seed: int = 0) -> Any:
    return copy.deepcopy(_untouched(name, seed))


def accelerated(model: Any, **options: Any) -> Any:
    model = copy.deepcopy(model)
    accelerate(model, **options)
    return model


class Subject(NamedTuple):
    """A kind of model. build: one, and a model with the same results that plain searches read.

    log_probabilities(plain model, sentence (1, Ls)): see plain_search.py.     bos, eos, pad: tokens.
    """

    build: Callable[[], tuple[Any, Any]]
    source: Callable[[int, int], Tensor]
    log_probabilities: Callable[[Any, Tensor], plain_search.LogProbabilities]
    bos: int = BOS
    eos: int = EOS
    pad: int = PAD

    def limits(self, max_len: int) -> dict[str, int]:
        return {"max_len": max_len, "bos_idx": self.bos, "eos_idx": self.eos}


def _own(**variant: Any) -> Subject:
    return Subject(lambda: (make_model(**variant),) * 2, make_source, plain_search.of_model)


def _huggingface(name: str) -> Subject:
    def build() -> tuple[Any, Any]:
        return accelerated(untouched(name)), untouched(name)

    def source(batch: int = 3, length: int = 9) -> Tensor:
        return make_source(batch, length, THEIR_VOCAB, THEIR_PAD)

    return Subject(build, source, plain_search.of_transformers, 3, 37, THEIR_PAD)


SUBJECTS = {
    "public": _own(),
    "beyond": _own(norm_first=True, n_head_kv=2, activation="swiglu"),
    "packed": _own(pack_padding=True, trg_emb_prj_weight_sharing=True, n_position=5),  # fewer than tokens
    **{name: _huggingface(name) for name in HUGGINGFACE},
}

# search(model, src_seq, subject, max_len, **options)
SEARCHES: dict[str, Callable[..., Any]] = {
    "greedy": lambda model, src, subject, max_len, **options: generate.greedy(
        model, src, **subject.limits(max_len), **options
    ),
    "sample": lambda model, src, subject, max_len: generate.sample(model, src, top_k=1, **subject.limits(max_len)),
    "beams": lambda model, src, subject, max_len: [
        [h.tokens for h in found]
        for found in generate.beam_search(model, src, beam_size=3, n_best=2, **subject.limits(max_len))
    ],
    "Translator": lambda model, src, subject, max_len: Translator(
        model, 3, max_len + 1, subject.pad, subject.pad, subject.bos, subject.eos
    ).translate(src),
}
