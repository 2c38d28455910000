"""Wrong calls of everything public: an error of the documented class that names the argument, before anything runs.

An entry of CALLS is a good call, the kind of each argument, and what is wrong about several arguments together. KINDS
has the wrong values of each kind.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from catalogue import VARIANTS
from search_cases import BOS, EOS, PAD, VOCAB, make_model, make_source
from torch import Tensor, nn

import fastattn
from fastattn import AttentionMask, FusedTransformer, GraphedStep, explain, generate, masks, models
from fastattn import nn as modules

full = pytest.mark.full
T, V = TypeError, ValueError
INF, NAN = math.inf, math.nan
BOOLS, FLOATS = torch.ones(4, 4, dtype=torch.bool), torch.ones(4, 4)
TOKENS = torch.tensor([[3, 4, 5], [6, PAD, PAD]])

# The wrong values of each kind by their errors. A function makes one of the good value.
KINDS: dict[str, dict[type[Exception], tuple[Any, ...]]] = {
    "tensor": {T: ([1.0], None, lambda t: t.to(torch.int8 if t.is_floating_point() else torch.bool))},
    "mask": {T: ([[True]], BOOLS.int()), V: (torch.ones(7, 7, dtype=torch.bool),)},
    "bools": {T: ([True], FLOATS, BOOLS.long()), V: (BOOLS[0],)},
    "lengths": {T: ([3, 4], torch.tensor([3.0])), V: (torch.ones(1, 2).int(), torch.tensor([3, -1]))},
    "tokens": {T: ([[3]], None, lambda t: t.float()), V: (lambda t: t[0], lambda t: t + 99)},
    "number": {T: ("1", True), V: (INF, NAN)},
    "share": {T: ("1", None), V: (-0.1, 1.5, NAN)},
    "positive": {T: ("1", True), V: (INF, 0.0, -1)},
    "not negative": {T: ("1", None), V: (NAN, -1e-6)},
    "index": {T: ("1", 1.0, None)},
    "integer": {T: (2.5, "3", None, True), V: (0,)},  # a positive one
    "token": {T: (2.5, "3", None), V: (-2, VOCAB)},
    "flag": {T: ("yes", None)},
    "choice": {V: ("fast", None)},
    "backend": {V: ("fast", "Triton")},
    # Of constructors: fastattn/ops/_checks.py.
    "size": {V: (0, 2.5, "3", True)},
    "length": {V: (-1, 2.5, "3")},
    "probability": {V: (-0.1, 1.5, NAN, "0.1", None)},
    "module": {T: (3, "model", None, nn.Linear, [])},
}
# Of a tensor next to others: the error may name another one.
RELATED: dict[type[Exception], tuple[Callable[[Tensor], Tensor], ...]] = {
    T: (lambda t: t.double() if t.is_floating_point() else t.float(),),
    V: (lambda t: t.to("meta"), lambda t: t[..., None]),
}


class Call(NamedTuple):
    """function(**good) is right. kinds: of arguments, several names in one string. together: error, changes, message.
    A name with "?" may also be None."""

    function: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    kinds: dict[str, str]
    together: tuple[tuple[type[Exception], dict[str, Any], str], ...] = ()

    def wrong(self) -> Iterator[tuple[type[Exception], dict[str, Any], str]]:
        good = self.good()
        tensors = "|".join(name.strip("?") for name in self.kinds.get("tensor", "").split())
        for kind, names in self.kinds.items():
            for name in names.split():
                name, may_be_none = name.strip("?"), "?" in name
                for error, values in KINDS[kind].items():
                    for value in values:
                        if not (value is None and may_be_none):
                            made = value(good[name]) if hasattr(value, "__code__") else value
                            yield error, {name: made}, f"\\b{name}\\b"
                for error, changes in RELATED.items() if kind == "tensor" else ():
                    yield from ((error, {name: change(good[name])}, tensors) for change in changes)
        yield from self.together


def op(name: str, kinds: dict[str, str], *together: Any) -> Call:
    problem = VARIANTS[name]
    return Call(problem.function, lambda: problem.map(lambda t: t.detach()).arguments(), kinds, together)


def q(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*(shape or (2, 4, 5, 8)), **options)


def qkv(*shapes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    return dict(zip(("query", "key", "value"), (q(*shape) for shape in shapes), strict=True)) | others


SIZES: dict[str, Any] = {"d_model": 16, "d_inner": 24, "n_head": 4, "d_k": 6, "d_v": 10}
LAYER = {"size": "d_model d_inner n_head d_k d_v", "probability": "dropout attn_dropout", "choice": "activation norm"}
LAYER |= {"flag": "norm_first qk_norm attention_bias", "positive": "softcap", "backend": "backend"}
SMALL = SIZES | {"n_layers": 1, "n_position": 9, "d_k": 4, "d_v": 4}
STACK = {"size": "n_layers n_position d_inner n_head d_k d_v", "probability": "dropout attn_dropout"}
STACK |= {"choice": "activation position", "flag": "norm_first", "backend": "backend"}
SEARCH = {"integer": "max_len", "token": "bos_idx eos_idx", "tokens": "src_seq", "module": "model"}
LIMITS: dict[str, Any] = {"max_len": 3, "bos_idx": BOS, "eos_idx": EOS}
MODEL = make_model(position="learned")  # whose table does not grow


def searched(**options: Any) -> dict[str, Any]:
    return {"model": MODEL, "src_seq": make_source()} | LIMITS | options


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters() if isinstance(model, nn.Module) else [torch.ones(1)])


def graphed(
    model: Any, optimizer: Any = None, accumulate: int = 1, max_grad_norm: Any = None, **of_loss: Any
) -> Tensor:
    """The loss of its first step."""
    step = GraphedStep(model, optimizer or adam(model), accumulate=accumulate, max_grad_norm=max_grad_norm)
    return step(TOKENS, TOKENS, TOKENS, **of_loss)


def small_model() -> FusedTransformer:
    return FusedTransformer(9, 9, PAD, PAD, **SMALL, position="learned")


CALLS: dict[str, Call] = {
    "scaled_dot_product_attention": op("attention bias, lse", {"tensor": "query key value", "mask": "attn_mask",
        "share": "dropout_p", "number": "scale", "positive": "softcap",
        "flag": "is_causal enable_gqa return_lse return_weights", "backend": "backend"},
        (V, qkv((4, 5, 8), (4, 5, 8), (4, 5, 8), attn_mask=q(2, 1, 4, 5, 5)), "attn_mask"),
        (V, qkv((), (3, 4, 5, 8), ()), "key"), (V, qkv((), (), (2, 2, 5, 8)), "value"),
        (V, qkv((), (2, 2, 5, 8), (2, 2, 5, 8)), "enable_gqa"),
        (V, qkv((), (2, 3, 5, 8), (2, 3, 5, 8), enable_gqa=True), "key"),
        (V, qkv((), (), (), attn_mask=q(4, 2, 5, 5)), "attn_mask|bias"),
        (V, qkv((4, 4, 5, 8), (4, 4, 5, 8), (4, 4, 5, 8), attn_mask=q(4, 1, 5) > 0), r"attn_mask\[:, None\]"),
        (V, qkv((), (), (), attn_mask=q(2, 5, dtype=torch.bool)), "key_padding="),
        (V, qkv((2, 5, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)), r"layout \(B, H, L, D\)")),
    "decode_attention": op("decoding", {"tensor": "query key value", "number": "scale", "positive": "softcap",
        "backend": "backend"}, (V, {"query": q(2, 2, 2, 16), "ancestors": None}, "without ancestors"),
        (V, {"query": q(2, 3, 2, 16).requires_grad_()}, "has no gradient"), (T, {"lengths": [8, 5]}, "lengths"),
        (T, {"ancestors": torch.ones(2, 3, 8)}, "ancestors"), (V, {"bias": torch.ones(3, 8)}, "bias")),
    "dropout_add_layer_norm": op("norm", {"tensor": "x residual? weight bias x_bias?", "share": "dropout_p",
        "not negative": "eps", "flag": "return_sum eps_on_std", "backend": "backend"}),
    "dropout_add_rms_norm": op("rms norm", {"tensor": "weight", "share": "dropout_p", "not negative": "eps",
        "flag": "return_sum", "backend": "backend"}, (V, {"x": q(2, 3, 8)}, "x|weight")),
    "feed_forward": op("feed-forward", {"tensor": "x weight1 bias1? weight2 bias2?", "choice": "activation",
        "share": "dropout_p", "backend": "backend"},
        (V, {"activation": "swiglu", "weight1": q(13, 16)}, "weight1 has 13 rows")),
    "linear_cross_entropy": op("loss", {"tensor": "x weight target bias?", "share": "label_smoothing",
        "choice": "smooth_over reduction", "index": "ignore_index", "number": "logit_scale", "backend": "backend"},
        *((V, {"target": torch.full((6,), value)}, f"target has the value {value}, expected 0 to 8")
        for value in (9, -1))),
    "explain": Call(explain, lambda: {"op": "attention"} | qkv((), (), ()), {"tensor": "query key value",
        "share": "dropout_p", "backend": "backend", "choice": "op"}, ((T, {"dropout": 0.1}, "dropout"),)),
    "add_sinks": Call(fastattn.add_sinks, lambda: {"out": q(1, 2, 3, 4), "lse": q(1, 2, 3), "sinks": q(2)}, {},
        (*((T, {n: [1.0]}, n) for n in ("out", "lse", "sinks")), (V, {"sinks": q(3)}, "one for each head"),
        (V, {"lse": q(1, 2, 3, 1)}, "out must come from"))),
    "merge": Call(fastattn.merge, lambda: {n: (q(1, 2, 3, 4), q(1, 2, 3)) for n in ("first", "second")}, {},
        tuple((error, {n: value}, n) for n in ("first", "second") for error, value in ((T, None), (T, q(1, 2, 3, 4)),
        (V, (q(1, 2, 3, 4), q(1, 2, 3, 1))), (V, (q(1, 2, 5, 4), q(1, 2, 5)))))),
    "use_backend": Call(fastattn.use_backend, lambda: {"name": None}, {},
        tuple((V, {"name": n}, "use_backend") for n in ("cudnn", "Triton", "gpu", 1))),
    "AttentionMask": Call(AttentionMask, lambda: {"key_padding": BOOLS, "bias": FLOATS},
        {"bools": "key_padding query_padding", "flag": "is_causal", "choice": "align"},
        (*((T, {"attn_mask": t}, "attn_mask") for t in (FLOATS, [[True]], BOOLS.int())),
        (T, {"bias": BOOLS}, "bias"), (V, {"bias": FLOATS[None, None, None]}, "bias"),
        (T, {"relative_bias": BOOLS}, "relative_bias"),
        (V, {"relative_bias": FLOATS[0]}, r"relative_bias has shape \(4,\), expected \(H, Lq"),
        (T, {"window": 3}, "window"), (V, {"window": (-1, 0)}, "window"), (T, {"cu_seqlens_q": [0, 3]}, "cu_seqlens_q"),
        *((V, {"cu_seqlens_q": torch.tensor(t)}, "cu_seqlens_q") for t in ([[0, 3]], [0, 5, 3], [3, 3])),
        (V, {"cu_seqlens_k": torch.tensor([0, 3])}, "cu_seqlens_q"),
        (V, {"cu_seqlens_q": torch.tensor([0, 1, 3]), "cu_seqlens_k": torch.tensor([0, 3])}, "cu_seqlens_k"),
        (T, {"keypadding": BOOLS}, "keypadding"))),
    "lengths_to_padding": Call(masks.lengths_to_padding, lambda: {"lengths": torch.tensor([3, 0]), "seqlen": 4},
        {"lengths": "lengths", "length": "seqlen"}, ((V, {"lengths": torch.tensor([3, 5])}, "lengths"),)),
    "prefix_lm_mask": Call(masks.prefix_lm_mask,
        lambda: {"prefix_lengths": torch.tensor([3, 0]), "seqlen_q": 2, "seqlen_k": 4},
        {"lengths": "prefix_lengths", "length": "seqlen_q"}, ((V, {"seqlen_k": 2}, "prefix_lengths"),)),
    "documents_to_cu_seqlens": Call(masks.documents_to_cu_seqlens, lambda: {"document_ids": torch.tensor([0, 0, 1])},
        {}, (*((T, {"document_ids": t}, "document_ids") for t in (FLOATS[0], [0, 1], None)),
        (V, {"document_ids": torch.ones(2, 3, dtype=torch.int)}, "document_ids"))),
    "get_pad_mask": Call(masks.get_pad_mask, lambda: {"seq": TOKENS, "pad_idx": PAD}, {"index": "pad_idx"},
        ((T, {"seq": [[3]]}, "seq"), (V, {"seq": TOKENS[0]}, "seq"))),
    "get_subsequent_mask": Call(masks.get_subsequent_mask, lambda: {"seq": TOKENS}, {},
        (*((T, {"seq": t}, "seq") for t in ([[3]], None, TOKENS.numpy())), (V, {"seq": TOKENS[0]}, "seq"))),
    "alibi_slopes": Call(masks.alibi_slopes, lambda: {"n_head": 4}, {"size": "n_head"}),
    "alibi": Call(masks.alibi, lambda: {"slopes": torch.ones(2), "seqlen_q": 3, "seqlen_k": 3},
        {"length": "seqlen_q seqlen_k"}, ((T, {"slopes": [1.0]}, "slopes"), (V, {"slopes": FLOATS}, "slopes"))),
    "t5_relative_bias": Call(masks.t5_relative_bias, lambda: {"table": torch.ones(32, 2), "seqlen_q": 3, "seqlen_k": 3},
        {"length": "seqlen_q seqlen_k", "size": "max_distance", "flag": "bidirectional"},
        ((T, {"table": [1.0]}, "table"), (V, {"table": torch.ones(5, 2)}, "table"))),
    "EncoderLayer": Call(modules.EncoderLayer, lambda: SIZES, LAYER | {"size": LAYER["size"] + " n_head_kv"}),
    "DecoderLayer": Call(modules.DecoderLayer, lambda: SIZES, LAYER),
    "MultiHeadAttention": Call(modules.MultiHeadAttention, lambda: {n: s for n, s in SIZES.items() if n != "d_inner"},
        {"size": "n_head d_model d_k d_v kdim vdim", "probability": "dropout attn_dropout", "choice": "norm",
        "flag": "norm_first qk_norm bias", "positive": "softcap", "backend": "backend"},
        ((V, {"n_head_kv": 3}, "n_head must be a multiple of n_head_kv, got n_head=4 and n_head_kv=3"),)),
    "PositionwiseFeedForward": Call(modules.PositionwiseFeedForward, lambda: {"d_in": 16, "d_hid": 24},
        {"size": "d_in d_hid", "probability": "dropout", "choice": "activation norm", "flag": "norm_first",
        "backend": "backend"}),
    "PositionalEncoding": Call(modules.PositionalEncoding, lambda: {"d_hid": 16, "n_position": 9},
        {"size": "d_hid n_position", "flag": "learned"}),
    "ScaledDotProductAttention": Call(modules.ScaledDotProductAttention, lambda: {"temperature": 3.0},
        {"probability": "attn_dropout", "positive": "softcap temperature", "backend": "backend"}),
    "Encoder": Call(models.Encoder, lambda: SMALL | {"n_src_vocab": 9, "d_word_vec": 16, "pad_idx": PAD},
        STACK | {"flag": "norm_first scale_emb"}, ((V, {"d_word_vec": 8}, "d_word_vec must equal d_model"),)),
    "Decoder": Call(models.Decoder, lambda: SMALL | {"n_trg_vocab": 9, "d_word_vec": 16, "pad_idx": PAD}, STACK),
    "FusedTransformer": Call(FusedTransformer, lambda: SMALL | {"n_src_vocab": 9, "n_trg_vocab": 9, "src_pad_idx": PAD,
        "trg_pad_idx": PAD}, STACK | {"size": STACK["size"] + " n_src_vocab n_trg_vocab d_model",
        "choice": "activation scale_emb_or_prj position",
        "flag": "norm_first trg_emb_prj_weight_sharing emb_src_trg_weight_sharing pack_padding?"},
        (*((V, {n: v}, n) for n in ("src_pad_idx", "trg_pad_idx") for v in (9, None, True)),
        (V, {"d_word_vec": 8}, "d_word_vec must equal d_model, got 8 and 16"),
        (V, {"n_trg_vocab": 8}, "n_trg_vocab=8 .* n_src_vocab=9"))),
    "FusedTransformer.loss": Call(small_model().loss, lambda: {"src_seq": TOKENS, "trg_seq": TOKENS, "gold": TOKENS},
        {"tokens": "src_seq trg_seq gold", "share": "label_smoothing", "choice": "smooth_over reduction"},
        ((V, {"trg_seq": TOKENS[:1], "gold": TOKENS[:1]}, "src_seq holds 2 sequences and trg_seq 1"),
        (V, {"gold": TOKENS[:, 1:]}, r"gold has shape \(2, 2\), expected \(2, 3\) as trg_seq, or \(6,\)"),
        (V, {"gold": TOKENS - 100}, "gold has the value -100, expected 0 to"),
        (V, {"src_seq": torch.ones(2, 10).long()}, r"10 tokens .* 9 positions"))),
    "ABDTransformer": Call(models.ABDTransformer,
        lambda: {"vocab": SimpleNamespace(n_vocabs=9, word2idx={"<blank>": 0}), "device": "cpu", "d_feat": 10,
        "d_model": 16, "d_ff": 8, "n_heads": 4, "n_layers": 1, "dropout": 0.1, "feature_mode": "one", "n_heads_big": 8},
        {"size": "d_feat d_model d_ff n_heads n_heads_big n_layers", "probability": "dropout",
        "choice": "feature_mode positions", "backend": "backend"},
        ((V, {"feature_mode": "two"}, "d_feat must have 2 widths"),
        (V, {"n_heads": 3}, "d_model must be a multiple of the number of heads, got 16 and 3"))),
    "src_trg_mask": Call(models.src_trg_mask, lambda: {"src": q(2, 3, 4), "r2l_trg": TOKENS, "trg": TOKENS,
        "pad_idx": PAD}, {"index": "pad_idx"}, ((T, {"src": "x"}, "src"), (V, {"src": q(2, 3)}, "src"),
        *((T, {n: [[3]]}, n) for n in ("r2l_trg", "trg")), (V, {"trg": TOKENS[0]}, "trg"))),
    "unpad": Call(models.unpad, lambda: {"x": q(2, 3, 4), "real": TOKENS != PAD}, {},
        ((T, {"x": [1]}, "x must be a Tensor"), (T, {"real": TOKENS}, "real"), (V, {"real": TOKENS[0] > 0}, "real"),
        (V, {"x": q(2, 2, 4)}, r"x has shape \(2, 2, 4\) and real \(2, 3\)"))),
    "pad": Call(models.pad, lambda: dict(zip(("x", "unpadded"), models.unpad(q(2, 3, 4), TOKENS != PAD), strict=True)),
        {}, ((T, {"x": [1]}, "x must be a Tensor"), (V, {"x": q(1, 3, 4)}, r"x has shape .* expected \(1, 4, ..\)"),
        (V, {"x": q(4, 4)}, "x has shape"), (T, {"unpadded": TOKENS}, "unpadded must be what unpad returned"))),
    "Translator": Call(models.Translator, lambda: {"model": MODEL, "beam_size": 2, "max_seq_len": 4, "src_pad_idx": PAD,
        "trg_pad_idx": PAD, "trg_bos_idx": BOS, "trg_eos_idx": EOS}, {"integer": "beam_size max_seq_len",
        "token": "trg_bos_idx trg_eos_idx", "module": "model"},
        (*((V, {n: 1}, f"{n} is 1, and the model's 0") for n in ("src_pad_idx", "trg_pad_idx")),
        (V, {"max_seq_len": 1}, "max_seq_len must be at least 2"))),
    "greedy": Call(generate.greedy, searched, SEARCH,
        ((V, {"src_seq": torch.full((2, 41), 3)}, "a sequence of 41 tokens is longer than the 40 positions"),
        (V, {"max_len": 41}, "max_len=41 is longer than the 40 positions"), (T, {"on_token": 1}, "on_token"))),
    "beam_search": Call(generate.beam_search, lambda: searched(beam_size=2),
        SEARCH | {"integer": "max_len beam_size n_best"},
        ((V, {"n_best": 3}, "n_best must be at most beam_size = 2, got 3"),
        (V, {"length_penalty": NAN}, "length_penalty=nan is out of range"),
        (T, {"length_penalty": "3"}, "length_penalty must"))),
    "sample": Call(generate.sample, searched, SEARCH,
        (*((V, {"temperature": t}, "temperature must be from") for t in (0.0, -1, NAN)),
        *((V, {"top_p": p}, "top_p must be above 0") for p in (0.0, 1.5)), (V, {"top_k": 0}, "top_k must be at least"),
        *((T, {n: "3"}, f"{n} must be") for n in ("temperature", "top_p", "top_k", "generator", "on_token")))),
    "GraphedStep": Call(graphed, lambda: {"model": small_model()},
        {"integer": "accumulate", "share": "label_smoothing", "choice": "smooth_over"},
        ((V, {"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        (T, {"max_grad_norm": "1"}, "max_grad_norm must be a number"),
        (T, {"optimizer": torch.amp.GradScaler("cpu")}, "must be a torch.optim.Optimizer, got GradScaler"),
        (V, {"optimizer": adam(small_model())}, "optimizer does not have parameter encoder"),
        (T, {"model": max}, "model must be a torch.nn.Module, got builtin"))),
    "accelerate": Call(fastattn.accelerate, lambda: {"model": nn.Linear(2, 2)}, {"module": "model",
        "flag": "attention layers"}),
    "restore": Call(fastattn.restore, lambda: {"model": nn.Linear(2, 2)}, {"module": "model"}),
    "shadow": Call(lambda **given: fastattn.shadow(**given).every, lambda: {"model": nn.Linear(2, 2)},
        {"module": "model", "size": "every"}),
}  # fmt: skip


# What the package hands out and no user builds; what only ops call; what has no argument.
NOT_CALLED = {"Explanation", "ModelExplanation", "Hypothesis", "Layout", "PreparedMask", "Memory", "PendingResidual"}
NOT_CALLED |= {"DecoderCache"}  # of people's own models
NOT_CALLED |= {"Unpadded", "from_operator_args", "to_operator_args", "prepare", "zero_distance", "drop_graphs"}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(name: str) -> None:
    call, failures, count = CALLS[name], [], 0
    is_op = name in {op.function.__name__ for op in fastattn.backends.OPS.values()}

    call.function(**call.good())
    for error, changes, message in call.wrong():
        shown = {n: f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else v for n, v in changes.items()}
        given, count = call.good() | changes, count + 1
        for backend in (None, "reference") if is_op else (None,):
            state = torch.get_rng_state()
            try:
                with fastattn.use_backend(backend):
                    call.function(**given)
            except Exception as raised:
                if not isinstance(raised, error) or not re.search(message, str(raised)):
                    failures.append(f"{shown}: {type(raised).__name__}: {raised}")
            else:
                failures.append(f"{shown} is accepted")
            if is_op and not torch.equal(state, torch.get_rng_state()):
                failures.append(f"{shown}: a number was drawn")
    assert count >= 4 and not failures, f"{len(failures)} of {count}:\n" + "\n".join(failures)


# A command, arguments that are right, and wrong ones by what the last line on stderr has of them.
TRAIN, PREPARE = ["--d-model=16", "--heads=2", "--out={folder}/out"], ["--data={folder}", "--out={folder}/out"]
COMMANDS: list[tuple[str, list[str], dict[str, str]]] = [
    ("fastattn.__main__", ["doctor"], {"--device nowhere": "--device", "--backend x": "--backend"}),
    ("train_translation", TRAIN, {"--layers 0": "--layers", "--epochs x": "--epochs", "--batch-tokens 1.5": "--batch",
        "--dropout 1": "--dropout", "--label-smoothing -0.1": "--label-smoothing", "--device nowhere": "--device",
        "--parallel fast": "--parallel", "--seed -1": "--seed", "--heads 3": "--heads 3 does not divide --d-model 16",
        "--keep-best bleu": "--keep-best bleu needs --data", "--lr 1e-3": "unrecognized arguments: --lr 1e-3"}),
    ("prepare_text", PREPARE, {"--vocabulary 0": "--vocabulary", "--max-length x": "--max-length"}),
    ("translate", ["--model={folder}"], {"--beam 0": "--beam", "--n-best x": "--n-best", "--engine fast": "--engine",
        "--input x abc": "give sentences or --input, not both",
        "--quantization int8 abc": "--quantization needs --export"}),
    ("train_captioning", ["--out={folder}/out"], {"--epochs 0": "--epochs", "--device nowhere": "--device"}),
    ("finetune_huggingface", ["--out={folder}/out"], {"--steps 0": "--steps", "--epochs 1": "--epochs",
        "--model x": "--model and --pairs go together"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "right", "wrong"),  # transformers takes seconds to import
    [pytest.param(*row, marks=full if row[0] == "finetune_huggingface" else ()) for row in COMMANDS],
)
def test_wrong_options(
    name: str, right: list[str], wrong: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, the last line on stderr names the option, and nothing was computed or written."""
    if name == "finetune_huggingface":
        pytest.importorskip("transformers")
    main = importlib.import_module(name).main
    for given, message in wrong.items():
        try:
            status = main([text.format(folder=tmp_path) for text in right] + given.split())
        except SystemExit as stopped:
            status = stopped.code
        out, err = capsys.readouterr()
        assert status == 2 and not out and message in err.strip().split("\n")[-1], f"{given}: {status}, {err[-200:]}"
    assert not list(tmp_path.iterdir())


def test_everything_public_is_in_the_table() -> None:
    public = {
        name for m in (fastattn, masks, modules, models, generate) for name in m.__all__ if callable(getattr(m, name))
    }
    assert public - NOT_CALLED <= set(CALLS)
    assert NOT_CALLED <= public
