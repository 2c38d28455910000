"""The modules of fastattn.nn one by one: what test_contract.py does not see of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from model_checks import DEVICE, TINY, fused, request_backend, rows
from torch import Tensor, nn

from fastattn import AttentionMask, use_backend
from fastattn.backends import BACKENDS
from fastattn.nn import (
    DecoderLayer,
    EncoderLayer,
    MultiHeadAttention,
    PendingResidual,
    PositionalEncoding,
    PositionwiseFeedForward,
    ScaledDotProductAttention,
)
from fastattn.nn import position as positions

B, LQ, LK, D, H, DK, DV = 2, 5, 7, 16, 4, 6, 10


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def random_mask(*shape: int) -> Tensor:
    """bool, True = attend; every query may attend to the first key."""
    keep = torch.rand(*shape, device=DEVICE) < 0.7
    keep[..., 0] = True
    return keep


def test_scaled_dot_product_attention() -> None:
    module = ScaledDotProductAttention(temperature=3.0, attn_dropout=0.5).eval()
    q, k, v = randn(B, H, LQ, DK), randn(B, H, LK, DK), randn(B, H, LK, DV)
    keep = random_mask(B, 1, LQ, LK)
    weights = (q @ k.mT / 3.0).masked_fill(~keep, -torch.inf).softmax(-1)
    out, none = module(q, k, v, keep)
    assert none is None
    torch.testing.assert_close(out, weights @ v, rtol=0, atol=1e-5)
    found = module(q, k, v, AttentionMask(keep), return_attn=True)
    torch.testing.assert_close(found, (weights @ v, weights), rtol=0, atol=1e-5)
    out, returned = module.train()(q, k, v, return_attn=True)  # the weights after dropout
    torch.testing.assert_close(returned @ v, out, rtol=0, atol=1e-5)
    assert 0.2 < (returned == 0).float().mean() < 0.8


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("options", [{}, dict(bias=False), dict(kdim=11), dict(vdim=9, bias=False)], ids=str)
def test_from_torch(options: dict[str, Any], norm_first: bool) -> None:
    theirs = nn.MultiheadAttention(D, H, 0.3, batch_first=True, device=DEVICE, **options).eval()
    for t in theirs.parameters():
        nn.init.normal_(t, std=0.3)  # their biases begin as 0
    norm = nn.RMSNorm(D, device=DEVICE) if norm_first else nn.LayerNorm(D, device=DEVICE)
    nn.init.normal_(norm.weight)
    ours = MultiHeadAttention.from_torch(theirs, norm, 0.2, norm_first=norm_first)
    assert (ours.attention.dropout.p, ours.dropout.p, ours.training) == (0.3, 0.2, False)
    q, k, v = randn(B, LQ, D), randn(B, LK, options.get("kdim", D)), randn(B, LK, options.get("vdim", D))
    keep = random_mask(B, LK)
    branch, _ = theirs(norm(q) if norm_first else q, k, v, key_padding_mask=~keep)
    expected = q + branch if norm_first else norm(q + branch)
    torch.testing.assert_close(ours(q, k, v, AttentionMask(key_padding=keep))[0], expected, rtol=0, atol=2e-5)
    assert ours.layer_norm is not norm and not {*ours.parameters()} & {*theirs.parameters()}


@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer])
def test_a_pre_norm_layer_of_tensors_and_of_summands(kind: type) -> None:
    layer, x, memory = kind(D, 24, H, DK, DV, norm_first=True).to(DEVICE).eval(), randn(B, LQ, D), randn(B, LK, D)
    others = () if kind is EncoderLayer else (memory,)
    expected, summands = x, PendingResidual(x, None)
    for _ in range(2):
        expected, (summands, *_) = layer(expected, *others)[0], layer(summands, *others)
    assert isinstance(summands, PendingResidual)
    torch.testing.assert_close(summands.sum(layer.pos_ffn.dropout), expected, rtol=0, atol=1e-4)
    layer.pos_ffn.dropout.train()  # the summands have a bias that is not added yet
    torch.testing.assert_close(PendingResidual(x, x, x[0, 0], 0.0).sum(), 2 * x + x[0, 0])


WAYS = [(d, n, w) for d in ("bfloat16", "float32") for n in (False, True) for w in ("fused", "hooked", *BACKENDS[::2])]


@pytest.mark.parametrize(("dtype", "norm_first", "way"), rows([WAYS[0], WAYS[5], WAYS[12]], WAYS))
def test_under_autocast_the_stream_keeps_its_dtype(
    dtype: str, norm_first: bool, way: str, request: pytest.FixtureRequest
) -> None:
    """A residual connection gives the dtype of a layer's input, as PyTorch's layers do. Its branch may be unused."""
    request_backend(request, way)
    layer = EncoderLayer(D, 24, H, DK, DV, norm_first=norm_first).to(DEVICE)
    x = randn(B, LQ, D).to(getattr(torch, dtype))
    if way == "hooked":
        layer.pos_ffn.w_1.register_forward_hook(lambda *_: None)
    inputs = [x.requires_grad_(), PendingResidual(x.bfloat16(), x)][: 1 + norm_first]
    with torch.autocast(DEVICE, torch.bfloat16), use_backend(way if way in BACKENDS else None):
        outs = [layer(given)[0] for given in inputs]
    found = [out.residual if isinstance(out, PendingResidual) else out for out in outs]
    assert {out.dtype for out in found} == {x.dtype}
    sum(out.float().square().sum() for out in found).backward()
    assert x.grad.dtype == x.dtype


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("backend", "name"), [("aten", "bias"), ("triton", "bias"), ("triton", "relative_bias")])
def test_a_bias_of_the_scores(backend: Any, name: str, norm_first: bool, request: pytest.FixtureRequest) -> None:
    """A mask with a bias that learns, in a fused sublayer, against modules."""
    request_backend(request, backend)
    layer = EncoderLayer(D, 24, H, DK, DK, dropout=0.0, attn_dropout=0.0, norm_first=norm_first).to(DEVICE)
    x, padding = randn(B, LQ, D), random_mask(B, LQ)
    bias = randn(*((1, H, LQ, LQ) if name == "bias" else (H, 2 * LQ - 1))).requires_grad_()
    found = []
    for by in (backend, "reference"):
        with use_backend(by):
            out = layer(x, AttentionMask(key_padding=padding, **{name: bias}))[0]
        found.append(
            [out, *torch.autograd.grad((out * torch.arange(D, device=DEVICE)).sum(), [bias, *layer.parameters()])]
        )
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_table_of_positions_grows(dtype: torch.dtype) -> None:
    """By the rows, bit for bit, of a table that is made longer, whatever its dtype was before; and in no state_dict. An
    edit of the table, through .data too, is an error of long sequences alone."""
    x, position = torch.zeros(1, 9, 6, dtype=dtype, device=DEVICE), torch.tensor([[8, 0, 3]], device=DEVICE)
    for before in (dtype, torch.float32, torch.float16):
        short, long = (PositionalEncoding(6, n, dtype=before, device=DEVICE).to(dtype) for n in (4, 9))
        torch.func.jvp(short, (x,), (x,))  # where new tensors are not ordinary ones
        for encoding in (short, copy.deepcopy(short), pickle.loads(pickle.dumps(short))):
            torch.testing.assert_close(encoding(x), long(x), rtol=0, atol=0)
            torch.testing.assert_close(encoding(x[:, :3], position), long(x[:, :3], position), rtol=0, atol=0)
        assert [*vars(short)["_buffers"]] == ["pos_table"] and short.pos_table.shape == (1, 4, 6)
        if before == dtype:
            assert torch.equal(copy.deepcopy(short).bfloat16()(x.bfloat16()), long.bfloat16()(x.bfloat16()))
        edits = lambda t: t.data.mul_(0.5), lambda t: t.mul_(3), lambda t: setattr(t, "data", t.data.clone() * 3)
        for edit, reads in zip(edits, (True, False, False), strict=True):  # on a GPU values are not read
            edited = copy.deepcopy(short)
            with patch.object(positions, "can_read_values", lambda t, reads=reads: reads):
                edited(x)
                edit(edited.pos_table)
                with pytest.raises(ValueError, match="9 tokens .* 4 positions .* does not hold the sines"):
                    edited(x)
                assert torch.equal(edited(x[:, :2], position[:, 1:]), x[:, :2] + edited.pos_table[:, ::3])


# Wrong input.


def test_wrong_input_is_named() -> None:
    """Where the sizes alone would not raise, or not say what is wrong."""
    x, keys = randn(B, LQ, D), torch.ones(B, LQ, dtype=torch.bool, device=DEVICE)
    attention = MultiHeadAttention(H, D, DK, DV).to(DEVICE)
    divided = PositionwiseFeedForward(D, 24, activation="swiglu").to(DEVICE)
    divided.w_1.register_forward_hook(lambda module, inputs, out: out[..., :24])  # as parallelize_module divides it
    grown = PositionalEncoding(D, 4).to(DEVICE)
    grown.grow(LQ)
    tables = {"pos_table": grown.pos_table[None].expand(2, 1, 4, D)}
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: attention(x, x, x, keys), r"\(B, 1, Lk\).*\(2, 5\)"),
        (lambda: attention(x, x, x, torch.zeros(B, LQ, LQ, device=DEVICE)), "float32.*bias"),
        (lambda: divided(x), "w_1 gave 24 of its 48 outputs: .* activation 'swiglu'"),
        (lambda: PositionalEncoding(D, 4, learned=True).to(DEVICE)(x), "5 tokens .* 4 positions .* learned"),
        (lambda: torch.vmap(lambda t: torch.func.functional_call(grown, t, x))(tables), "in eager mode only"),
        (lambda: torch.export.export(PositionalEncoding(D, 4).to(DEVICE), (x,)), "4 positions .* eager mode only"),
        (lambda: MultiHeadAttention.from_torch(nn.MultiheadAttention(D, H, add_bias_kv=True)), "add_bias_kv"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


WRONG: dict[str, Callable[[Any], None]] = {
    "norm": lambda layer: setattr(layer.pos_ffn, "layer_norm", nn.LayerNorm(24, device=DEVICE)),
    "w_2": lambda layer: setattr(layer.pos_ffn, "w_2", nn.Linear(24, 12, device=DEVICE)),
    "bias of w_1": lambda layer: setattr(layer.pos_ffn.w_1, "bias", nn.Parameter(torch.zeros(8, device=DEVICE))),
    "w_1 in float64": lambda layer: layer.pos_ffn.w_1.double(),
}


@pytest.mark.parametrize(
    ("backend", "wrong"), rows([("aten", w) for w in WRONG] + [("triton", "w_2")], [("triton", w) for w in WRONG])
)
def test_wrong_parameters_reach_no_kernel(backend: str, wrong: str, request: pytest.FixtureRequest) -> None:
    """A kernel would read memory that is not theirs."""
    request_backend(request, backend)
    model, seq = fused(**TINY, backend=backend).eval(), torch.full((2, 3), 3, device=DEVICE)
    WRONG[wrong](model.decoder.layer_stack[0])
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        model(seq, seq)
