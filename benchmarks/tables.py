"""All benchmarks, and the tables of cases: what is measured on which device, the most valuable first.

quick: seconds on one core, for tests. cpu: some two hours on two cores, the last of them for torch.compile and kinds of
mask. cuda: a data-centre GPU. The first OVERVIEW cases of cpu and cuda are one of every op and kind of model, on a CPU
small enough for three minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import bench_accelerate
import bench_attention
import bench_decoding
import bench_ops
import bench_transformer
import torch
from bench_accelerate import FAMILIES, GENERATING
from cases import (
    BEAMS,
    GREEDY,
    LONG_TAIL,
    MASKS,
    STATIC,
    AccelerateCase,
    AttentionCase,
    Case,
    CrossEntropyCase,
    DecodeAttentionCase,
    DecodingCase,
    FeedForwardCase,
    ModelCase,
    NormCase,
)
from harness import Benchmark

F32, BF16 = torch.float32, torch.bfloat16
BASE = (6, 512, 2048, 8, 32000)  # the paper's models: n_layers, d_model, d_inner, n_head; and n_vocab
BIG = (6, 1024, 4096, 16, 32000)
TINY = (1, 32, 64, 2, 50)
OVERVIEW = 8


def attention(length: int, head_dim: int, mask: str, tokens: int = 16384, **options: Any) -> AttentionCase:
    """Self-attention in bfloat16 on `tokens` tokens with d_model 2048, as in FlashAttention's papers."""
    return AttentionCase(tokens // length, 2048 // head_dim, length, length, head_dim, mask, BF16, **options)


def call(*sizes: Any, **options: Any) -> AccelerateCase:
    return AccelerateCase(*sizes, dropout_p=0.0, op="accelerate_inference", **options)


# (sentences in a batch, new tokens of each): enough steps to time one, few enough for beam search.
_BATCHES = ((1, 64), (32, 32), (256, 16))


def _decoding(*model: Any, batches: tuple[tuple[int, int], ...] = _BATCHES) -> list[DecodingCase]:
    """Greedy and with five beams, for each size of batch."""
    return [DecodingCase(batch, 32, *model, new_tokens=new, beam=beam) for batch, new in batches for beam in (1, 5)]


def _decode_attention(dtype: torch.dtype) -> list[DecodeAttentionCase]:
    """The base model's: beams to their past and to the encoder's output, then greedy, a batch and one sequence."""
    return [
        DecodeAttentionCase(32, 5, 64, 8, 64, "of beams", dtype),
        DecodeAttentionCase(32, 5, 64, 8, 64, "shared", dtype),
        DecodeAttentionCase(32, 1, 64, 8, 64, "own", dtype),
        DecodeAttentionCase(1, 1, 512, 8, 64, "own", dtype),
    ]


# (layers, d_model, batch, length): a CPU computes a step in some 5 to 60 ms, so Python's part shows.
_SMALL = ((2, 64, 16, 10), (2, 128, 16, 16), (2, 96, 48, 20), (3, 128, 64, 20))

QUICK: list[Case] = [
    ModelCase(6, 12, *TINY),  # enough padding for the default to drop it
    ModelCase(2, 12, *TINY, BF16),
    AttentionCase(2, 2, 40, 72, 16),
    AttentionCase(2, 2, 72, 72, 16, "padding", BF16),
    NormCase(40, 96),
    NormCase(40, 96, dropout_p=0.1),
    FeedForwardCase(40, 48, 96),
    FeedForwardCase(40, 48, 96, "swiglu"),
    CrossEntropyCase(40, 32, 60),
    DecodingCase(2, 12, *TINY, new_tokens=4),
    DecodingCase(2, 12, *TINY, new_tokens=4, beam=3),
    DecodeAttentionCase(2, 3, 20, 2, 16, "of beams"),
    DecodeAttentionCase(2, 3, 20, 2, 16, "shared", BF16),
    AccelerateCase(4, 12, *TINY, BF16, model="nn.Transformer"),
    call(4, 12, *TINY, BF16, model="BERT"),
    call(2, 12, *TINY, model="Marian", call=BEAMS + STATIC),
    AccelerateCase(4, 12, *TINY, model="Llama"),
    AttentionCase(3, 2, 64, 64, 16, "causal + padding"),
    AttentionCase(1, 2, 96, 96, 16, "packed causal", BF16),
]


# What users do with other libraries' models: every family of docs/accelerate.md in float32, some in bfloat16.
_FAMILIES = (*GENERATING, *(name for name in FAMILIES if name not in GENERATING), "nn.Transformer")
_WITHOUT_DROPOUT = ("Whisper", "Llama", "ViT")  # by default
_IN_BF16 = ("Marian", "T5", "Llama", "BERT", "nn.Transformer")
_SMALL_MODEL, _LARGE_MODEL = (3, 256, 1024, 4, 8000), (6, 512, 2048, 8, 8000)
_SIZES = ((1, 32), (8, 64), (4, 256))
_SMALL_SIZES = _SIZES[:2]  # of generation, and of some training


def _calls(models: Sequence[str], *sizes: Any, static: Sequence[str] = ()) -> list[AccelerateCase]:
    """Forwards, and generation where the model generates. sizes: from n_layers to n_vocab, and the dtype. static: the
    models that generate also with a static cache."""
    generation = [(GREEDY, models), (BEAMS, models), (GREEDY + STATIC, static), (BEAMS + STATIC, static)]
    found = [call(*batch, *sizes, model=model) for batch in _SIZES for model in models]
    return found + [
        call(*batch, *sizes, model=model, call=kind)
        for kind, given in generation
        for batch in _SMALL_SIZES
        for model in given
        if model in GENERATING
    ]


def _training(
    batches: Sequence[tuple[int, int]], models: Sequence[str], *sizes: Any, dropout_p: float | None = None
) -> list[AccelerateCase]:
    return [AccelerateCase(*batch, *sizes, dropout_p=dropout_p, model=model) for batch in batches for model in models]


_OF_GPU = ("Marian", "T5", "BART", "Whisper", "BERT", "nn.Transformer")
_DROPPING = [name for name in _FAMILIES if name not in _WITHOUT_DROPOUT]
_USERS_CALLS = [
    *_calls(_FAMILIES, *_SMALL_MODEL, F32, static=("Marian", "T5", "Llama")),
    *_training(_SIZES, _FAMILIES, *_SMALL_MODEL, F32),
    *_training(_SMALL_SIZES, _DROPPING, *_SMALL_MODEL, F32, dropout_p=0.0),
    *_training(_SIZES[2:], ["Marian", "T5"], *_SMALL_MODEL, F32, dropout_p=0.0),
    *_calls(["Marian"], *_LARGE_MODEL, F32),
    *_training(_SMALL_SIZES, ["Marian"], *_LARGE_MODEL, F32),
    *_calls(_IN_BF16, *_SMALL_MODEL, BF16),
    *_training(_SIZES, _IN_BF16, *_SMALL_MODEL, BF16),
    AccelerateCase(8, 128, *_LARGE_MODEL, spread=0.0, model="Marian"),
]


def _in_both(*cases: Case) -> list[Case]:
    """Each case as it is, in float32, and in bfloat16."""
    return [case for given in cases for case in (given, dataclasses.replace(given, dtype=BF16))]


def _dropped(*cases: AttentionCase) -> list[Case]:
    """Each case without dropout and with it, in both types."""
    return _in_both(*(c for given in cases for c in (given, dataclasses.replace(given, dropout_p=0.1))))


CPU: list[Case] = [
    # The overview.
    AttentionCase(4, 8, 128, 128, 64, "padding"),
    NormCase(1024, 512, dropout_p=0.1),
    FeedForwardCase(512, 512, 2048, dropout_p=0.1),
    CrossEntropyCase(512, 512, 8000),
    DecodeAttentionCase(32, 5, 64, 8, 64, "of beams"),
    ModelCase(16, 32, *_SMALL_MODEL),
    AccelerateCase(16, 32, *_SMALL_MODEL, model="Marian"),
    DecodingCase(1, 32, *_SMALL_MODEL, new_tokens=64),
    *_in_both(ModelCase(16, 32, *_SMALL_MODEL), ModelCase(8, 64, *_LARGE_MODEL)),
    *_in_both(*(ModelCase(batch, length, n, d, 4 * d, 4, 1000) for n, d, batch, length in _SMALL)),
    *_dropped(AttentionCase(4, 8, 128, 128, 64, "padding")),
    *_in_both(NormCase(1024, 512, dropout_p=0.1), FeedForwardCase(512, 512, 2048, dropout_p=0.1)),
    *_in_both(ModelCase(2, 512, 2, *_SMALL_MODEL[1:])),
    *_USERS_CALLS,
    *_decoding(*_SMALL_MODEL, F32),
    *_decoding(*BASE[:-1], 10000, F32, batches=_BATCHES[:2]),
    *_decode_attention(F32),
    *_in_both(CrossEntropyCase(512, 512, 8000)),
    # The same 1024 tokens, at three lengths.
    *_dropped(*(AttentionCase(1024 // n, 8, n, n, 64, "causal") for n in (32, 256, 1024))),
    *_dropped(AttentionCase(4, 8, 128, 128, 64, "bias"), AttentionCase(2, 8, 256, 256, 64, "blocks", masked=0.5)),
    FeedForwardCase(512, 512, 1376, "swiglu"),
    NormCase(4096, 1024),
    # The base model with two layers each, at 2048 tokens: its memory.
    *(ModelCase(2048 // n, n, 2, *BASE[1:-1], 8000, spread=0.0) for n in (128, 1024)),
    # Every kind of mask on 2048 tokens.
    *_in_both(*(AttentionCase(2048 // n, 8, n, n, 64, mask) for n in (128, 512) for mask in MASKS[:-2])),
    *_in_both(*(AttentionCase(1, 8, 2048, 2048, 64, mask) for mask in MASKS)),
]

_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CUDA: list[Case] = [
    # The overview.
    ModelCase(256, 32, *BASE, BF16),
    attention(8192, 128, "causal"),
    NormCase(65536, 1024, BF16, 0.1),
    FeedForwardCase(8192, 512, 2048, "relu", BF16, 0.1),
    CrossEntropyCase(8192, 512, 32000, BF16),
    DecodeAttentionCase(32, 5, 64, 8, 64, "of beams", BF16),
    AccelerateCase(128, 32, *BASE, BF16, model="Marian"),
    DecodingCase(1, 32, *BASE, BF16, new_tokens=64, beam=5),
    # What every claim needs first, in some seven minutes.
    *_training([(128, 32)], _OF_GPU, *BASE, BF16),
    attention(8192, 128, "full"),
    attention(8192, 64, "full"),
    AttentionCase(128, 8, 64, 64, 64, "padding", BF16),
    attention(1024, 64, "padding"),
    attention(2048, 64, "blocks", masked=0.5),
    *_calls(_OF_GPU[:2], *BASE, BF16),
    *(attention(1024, 64, mask, tokens=8192) for mask in ("bias by distance", "softcap", "sinks")),
    AttentionCase(1, 32, 16384, 16384, 64, "packed causal", BF16),
    ModelCase(64, 128, *BIG, BF16),
    AttentionCase(128, 8, 64, 64, 64, "padding", BF16, dropout_p=0.1),
    attention(1024, 64, "causal", dropout_p=0.1),
    AttentionCase(32, 8, 256, 256, 64, "padding", F32),
    NormCase(8192, 512, BF16, 0.1),
    *_decode_attention(BF16),
    # The other parts of training and decoding.
    ModelCase(1024, 64, *BASE, BF16),
    *_decoding(*BASE, BF16),
    attention(1024, 64, "bias", tokens=8192),
    FeedForwardCase(8192, 1024, 4096, "relu", BF16, 0.1),
    # The other masks.
    attention(1024, 64, "padding", spread=LONG_TAIL),
    AttentionCase(64, 8, 48, 128, 64, "padding", BF16),
    AttentionCase(4, 16, 1024, 4096, 64, "full", BF16),
    attention(2048, 64, "blocks", masked=0.9),
    attention(2048, 64, "blocks", masked=0.25),
    AttentionCase(4, 32, 4096, 4096, 128, "causal", BF16, n_head_kv=8),
    AttentionCase(2, 16, 8192, 8192, 64, "padding", BF16, spread=LONG_TAIL),
    *(ModelCase(8192 // n, n, *BASE, BF16, spread=0.0) for n in (128, 512, 2048, 4096)),
    # The other steps: 4k tokens, 64k tokens of the big model, long sequences, a long tail.
    *(ModelCase(*batch, *model, BF16) for *batch, model in ((128, 32, BASE), (128, 32, BIG), (512, 128, BIG))),
    ModelCase(16, 512, *BASE, BF16),
    ModelCase(128, 64, *BASE, BF16, spread=LONG_TAIL),
    # Every length at the same 16,384 tokens: both head widths, full and causal.
    *(attention(n, width, mask) for width in (64, 128) for mask in ("causal", "full") for n in _LENGTHS),
    # The other widths and activations.
    *(NormCase(2**25 // width, width, BF16, 0.1) for width in (256, 512, 2048, 4096, 8192)),
    NormCase(65536, 1024, BF16),
    NormCase(65536, 1024, F32, 0.1),
    FeedForwardCase(65536, 512, 2048, "relu", BF16, 0.1),
    FeedForwardCase(8192, 1024, 4096, "gelu", BF16),
    FeedForwardCase(8192, 1024, 2752, "swiglu", BF16),
    CrossEntropyCase(8192, 512, 32000, BF16, smoothing=0.0),
    CrossEntropyCase(8192, 1024, 32000, BF16),
    *_in_both(ModelCase(64, 20, 3, 128, 512, 4, 1000)),
    *_training([(128, 32)], _OF_GPU, *BASE),
    *_in_both(*_training([(32, 128)], _OF_GPU, *BASE)),
    *_calls(_OF_GPU, *BASE, BF16),
]

TABLES = {name: list(dict.fromkeys(cases)) for name, cases in {"quick": QUICK, "cpu": CPU, "cuda": CUDA}.items()}
_FILES = (bench_accelerate, bench_transformer, bench_attention, bench_ops, bench_decoding)
BENCHMARKS: dict[str, Benchmark] = {made.name: made for file in _FILES for made in file.BENCHMARKS}


def plan(table: str) -> list[tuple[Benchmark, Case]]:
    """Every case of this table with the benchmark that measures it."""
    return [(BENCHMARKS[case.op], case) for case in TABLES[table]]
