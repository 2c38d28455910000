"""The modules of fastattn.nn one by one, against formulas written here."""

import math

import pytest
import torch
import torch.nn.functional as F

from fastattn import AttentionMask, explain, use_backend
from fastattn.nn import (
    DecoderLayer,
    EncoderLayer,
    MultiHeadAttention,
    OpenSum,
    PositionalEncoding,
    PositionwiseFeedForward,
    ScaledDotProductAttention,
)
from fastattn.nn import attention as attention_module
from fastattn.nn.residual import norm_adds_bias

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, LQ, LK, D, H, DK, DV = 2, 5, 7, 16, 4, 6, 10


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def rand(*shape):
    return torch.rand(*shape, device=DEVICE)


def heads(**options):
    return MultiHeadAttention(H, D, DK, DV, **options).to(DEVICE).eval()


def test_positions_follow_the_formula():
    table = PositionalEncoding(7, n_position=50).pos_table
    assert table.shape == (1, 50, 7) and table.dtype == torch.float32
    for position, column in ((0, 0), (0, 1), (3, 0), (3, 1), (17, 4), (17, 5), (49, 6)):
        angle = position / 10000 ** (2 * (column // 2) / 7)
        expected = math.cos(angle) if column % 2 else math.sin(angle)
        assert table[0, position, column].item() == pytest.approx(expected, abs=1e-7)


def test_positions_are_added_and_are_no_parameter():
    module, x = PositionalEncoding(D, n_position=9).to(DEVICE), randn(B, LQ, D)
    assert torch.equal(module(x), x + module.pos_table[:, :LQ])
    assert not list(module.parameters()) and list(module.state_dict()) == ["pos_table"]
    with pytest.raises(ValueError, match="10 tokens .* 9 positions"):
        module(randn(B, 10, D))


def test_scaled_dot_product_attention():
    module = ScaledDotProductAttention(temperature=3.0, attn_dropout=0.5).eval()
    q, k, v = randn(B, H, LQ, DK), randn(B, H, LK, DK), randn(B, H, LK, DV)
    keep = rand(B, 1, LQ, LK) < 0.7
    keep[..., 0] = True
    weights = (q @ k.mT / 3.0).masked_fill(~keep, -torch.inf).softmax(-1)
    out, none = module(q, k, v, keep)
    assert none is None
    torch.testing.assert_close(out, weights @ v, rtol=0, atol=1e-5)
    out, returned = module(q, k, v, AttentionMask(keep), return_attn=True)
    torch.testing.assert_close(out, weights @ v, rtol=0, atol=1e-5)
    torch.testing.assert_close(returned, weights, rtol=0, atol=1e-6)


def test_returned_weights_are_those_after_dropout():
    module = ScaledDotProductAttention(temperature=1.0, attn_dropout=0.5)
    q, k, v = randn(B, H, LQ, DK), randn(B, H, LK, DK), randn(B, H, LK, DV)
    out, weights = module(q, k, v, return_attn=True)
    torch.testing.assert_close(weights @ v, out, rtol=0, atol=1e-5)
    assert 0.2 < (weights == 0).float().mean() < 0.8


@pytest.mark.parametrize("n_head_kv", [1, 2, 4])
def test_multi_head_attention(n_head_kv):
    module = heads(n_head_kv=n_head_kv)
    q, memory = randn(B, LQ, D), randn(B, LK, D)
    keep = rand(B, LQ, LK) < 0.7
    keep[..., 0] = True
    queries, keys, values = (
        w(x).view(B, x.size(1), n, -1).transpose(1, 2)
        for w, x, n in ((module.w_qs, q, H), (module.w_ks, memory, n_head_kv), (module.w_vs, memory, n_head_kv))
    )
    which = torch.arange(H, device=DEVICE) // (H // n_head_kv)  # the key and value head of each query head
    weights = (queries @ keys[:, which].mT / DK**0.5).masked_fill(~keep[:, None], -torch.inf).softmax(-1)
    expected = F.layer_norm(
        q + module.fc((weights @ values[:, which]).transpose(1, 2).reshape(B, LQ, -1)),
        (D,),
        module.layer_norm.weight,
        module.layer_norm.bias,
        1e-6,
    )
    out, none = module(q, memory, memory, keep)
    assert none is None
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)
    out, returned = module(q, memory, memory, keep, return_attn=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(returned, weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8])
def test_dense_masks(dtype):
    module, x = heads(), randn(B, LQ, D)
    keys = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], device=DEVICE).bool()
    expected, _ = module(x, x, x, AttentionMask(key_padding=keys))
    for mask in (keys[:, None], keys[:, None].expand(B, LQ, LQ)):
        mask = mask if dtype == torch.bool else 3 * mask.to(dtype)  # any number but 0 says attend
        torch.testing.assert_close(module(x, x, x, mask)[0], expected, rtol=0, atol=1e-6)
    causal = torch.ones(1, LQ, LQ, device=DEVICE).tril().to(dtype)
    torch.testing.assert_close(
        module(x, x, x, causal)[0], module(x, x, x, AttentionMask(is_causal=True))[0], rtol=0, atol=1e-6
    )


def test_a_mask_that_could_be_misread_is_refused():
    module, x = heads(), randn(B, LQ, D)
    with pytest.raises(ValueError, match=r"\(B, 1, Lk\).*\(2, 5\)"):
        module(x, x, x, torch.ones(B, LQ, dtype=torch.bool, device=DEVICE))
    with pytest.raises(ValueError, match="float32.*bias"):
        module(x, x, x, torch.zeros(B, LQ, LQ, device=DEVICE))
    with pytest.raises(ValueError, match="key_padding"):
        module(x, x, x, torch.ones(B, 1, LK, dtype=torch.bool, device=DEVICE))
    with pytest.raises(TypeError, match="a mask must be .* got list"):
        module(x, x, x, [[True]])


def test_inputs_of_another_shape_are_named():
    module, x = heads(), randn(B, LQ, D)
    for q, k, name in ((x[0], x, "q"), (x, x[..., 1:], "k")):
        with pytest.raises(ValueError, match=rf"{name} has shape .* expected \(B, L, d_model = {D}\)"):
            module(q, k, x)


def test_heads_are_views_and_none_is_copied(monkeypatch):
    module, x, seen = heads(), randn(B, LQ, D), []
    op = attention_module.scaled_dot_product_attention

    def spy(q, k, v, *args, **kwargs):
        seen.extend((q, k, v))
        return op(q, k, v, *args, **kwargs)

    monkeypatch.setattr(attention_module, "scaled_dot_product_attention", spy)
    module(x, x, x)
    N = H * (DK + DK + DV)  # one product gives all three
    for t, n, width in zip(seen, (H, H, H), (DK, DK, DV), strict=True):
        assert t.shape == (B, n, LQ, width) and t.stride() == (LQ * N, width, N, 1)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "reglu", "geglu", "geglu_tanh", "swiglu"])
def test_feed_forward(activation):
    module, x = PositionwiseFeedForward(D, 24, activation=activation).to(DEVICE).eval(), randn(B, LQ, D)
    plain = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
    act = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
        "silu": F.silu,
    }[plain.get(activation, activation)]
    hidden = module.w_1(x)
    assert hidden.size(-1) == (48 if activation in plain else 24)
    hidden = act(hidden[..., :24]) * hidden[..., 24:] if activation in plain else act(hidden)
    expected = F.layer_norm(x + module.w_2(hidden), (D,), module.layer_norm.weight, module.layer_norm.bias, 1e-6)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-5)


def test_dropout_is_around_the_branch_only():
    """With dropout 1 a branch vanishes, and only the normalised residual is left."""
    x = randn(B, LQ, D)
    expected = F.layer_norm(x, (D,), eps=1e-6)
    torch.testing.assert_close(PositionwiseFeedForward(D, 24, dropout=1.0).to(DEVICE)(x), expected, rtol=0, atol=1e-5)
    attention = MultiHeadAttention(H, D, DK, DV, dropout=1.0).to(DEVICE)
    torch.testing.assert_close(attention(x, x, x)[0], expected, rtol=0, atol=1e-5)


def test_norm_first_leaves_the_sum_open():
    x, branch = randn(B, LQ, D), randn(B, LQ, D)
    for module in (PositionwiseFeedForward(D, 24, norm_first=True).to(DEVICE), heads(norm_first=True)):
        module.eval()
        torch.nn.init.normal_(module.layer_norm.weight)
        total = OpenSum(branch, x)
        out = module(total) if isinstance(module, PositionwiseFeedForward) else module(total, total, total)[0]
        normed = module.layer_norm(x + branch)
        arguments = (normed,) if isinstance(module, PositionwiseFeedForward) else (normed,) * 3 + (None, False, None)
        expected, _ = module.branch(*arguments)
        torch.testing.assert_close(out.residual, x + branch, rtol=0, atol=1e-6)
        torch.testing.assert_close(out.branch, expected, rtol=0, atol=1e-5)


def test_the_last_bias_waits_for_the_norm_where_a_kernel_trains():
    x = torch.zeros(1, 2, D)  # on a CPU
    assert not norm_adds_bias(x, None)
    assert norm_adds_bias(x, "triton")
    with use_backend("cuda"):
        assert norm_adds_bias(x, None)
        assert not norm_adds_bias(x, "aten")
    with torch.no_grad():
        assert not norm_adds_bias(x, "triton")


def test_layers_are_their_sublayers_in_order():
    x, memory = randn(B, LQ, D), randn(B, LK, D)
    mask = AttentionMask(is_causal=True)
    encoder, decoder = (
        EncoderLayer(D, 24, H, DK, DV).to(DEVICE).eval(),
        DecoderLayer(D, 24, H, DK, DV).to(DEVICE).eval(),
    )
    out, none = encoder(x, mask)
    assert none is None
    torch.testing.assert_close(out, encoder.pos_ffn(encoder.slf_attn(x, x, x, mask)[0]))
    out, slf, enc = decoder(x, memory, mask, None, return_attns=True)
    middle, expected_slf = decoder.slf_attn(x, x, x, mask, return_attn=True)
    middle, expected_enc = decoder.enc_attn(middle, memory, memory, return_attn=True)
    torch.testing.assert_close((out, slf, enc), (decoder.pos_ffn(middle), expected_slf, expected_enc))
    assert slf.shape == (B, H, LQ, LQ) and enc.shape == (B, H, LQ, LK)


def test_repr_tells_what_was_built():
    text = repr(EncoderLayer(D, 24, H, DK, DV, activation="swiglu", n_head_kv=2))
    assert "n_head=4, n_head_kv=2, d_k=6, d_v=10" in text and "activation=swiglu" in text
    assert "16, n_position=9" in repr(PositionalEncoding(D, n_position=9))


@pytest.mark.parametrize("n_head_kv", [H, 1])
def test_gradients_of_self_attention_come_in_one_piece(n_head_kv, monkeypatch):
    """The kernels write dq, dk and dv where the joint projection reads its gradient: nothing is copied together."""
    module, x = heads(n_head_kv=n_head_kv, backend="triton"), randn(B, LQ, D)
    if reason := explain("scaled_dot_product_attention", *[x.view(B, 1, LQ, D)] * 3).refusals["triton"]:
        pytest.skip(reason)
    joined, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, dim=0: joined.append(dim) or cat(tensors, dim))
    module.eval()(x, x, x)[0].sum().backward()
    assert -1 not in joined
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    module.attention.backend = module.backend = "reference"
    module(x, x, x)[0].sum().backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-3, atol=1e-4)
