"""The modules of fastattn.nn one by one, against formulas written here."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import skip_without_triton

from fastattn import AttentionMask, use_backend
from fastattn.backends import BACKENDS
from fastattn.models import Decoder, Encoder
from fastattn.nn import (
    DecoderCache,
    DecoderLayer,
    EncoderLayer,
    Memory,
    MultiHeadAttention,
    PendingResidual,
    PositionalEncoding,
    PositionwiseFeedForward,
    ScaledDotProductAttention,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, LQ, LK, D, H, DK, DV = 2, 5, 7, 16, 4, 6, 10


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def random_mask(*shape):
    """bool, True = attend; every query may attend to the first key."""
    keep = torch.rand(*shape, device=DEVICE) < 0.7
    keep[..., 0] = True
    return keep


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
    keep = random_mask(B, 1, LQ, LK)
    weights = (q @ k.mT / 3.0).masked_fill(~keep, -torch.inf).softmax(-1)
    out, none = module(q, k, v, keep)
    assert none is None
    torch.testing.assert_close(out, weights @ v, rtol=0, atol=1e-5)
    out, returned = module(q, k, v, AttentionMask(keep), return_attn=True)
    torch.testing.assert_close(out, weights @ v, rtol=0, atol=1e-5)
    torch.testing.assert_close(returned, weights, rtol=0, atol=1e-6)
    out, returned = module.train()(q, k, v, return_attn=True)  # the weights after dropout
    torch.testing.assert_close(returned @ v, out, rtol=0, atol=1e-5)
    assert 0.2 < (returned == 0).float().mean() < 0.8


def expected_norm(module, x):
    weights = (module.layer_norm.weight, getattr(module.layer_norm, "bias", None))
    if isinstance(module.layer_norm, torch.nn.LayerNorm):
        return F.layer_norm(x, (D,), *weights, 1e-6)
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[0]


MODERN = dict(norm="rms", qk_norm=True, bias=True)


@pytest.mark.parametrize(
    "options",
    [dict(n_head_kv=1), dict(n_head_kv=2), {}, MODERN, dict(n_head_kv=2, qk_norm=True, kdim=11, vdim=9)],
    ids=str,
)
def test_multi_head_attention(options):
    module, n_head_kv = heads(**options), options.get("n_head_kv", H)
    for t in module.parameters():
        torch.nn.init.normal_(t, std=0.3)
    q, k, v = randn(B, LQ, D), randn(B, LK, options.get("kdim", D)), randn(B, LK, options.get("vdim", D))
    keep = random_mask(B, LQ, LK)
    queries, keys, values = (
        F.linear(x, w.weight, w.bias).view(B, x.size(1), n, -1).transpose(1, 2)
        for w, x, n in ((module.w_qs, q, H), (module.w_ks, k, n_head_kv), (module.w_vs, v, n_head_kv))
    )
    if "qk_norm" in options:
        queries, keys = (
            x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
            for x, norm in ((queries, module.q_norm), (keys, module.k_norm))
        )
    kv_head = torch.arange(H, device=DEVICE) // (H // n_head_kv)  # of each query head
    weights = (queries @ keys[:, kv_head].mT / DK**0.5).masked_fill(~keep[:, None], -torch.inf).softmax(-1)
    branch = module.fc((weights @ values[:, kv_head]).transpose(1, 2).reshape(B, LQ, -1))
    out, none = module(q, k, v, keep)
    assert none is None
    torch.testing.assert_close(out, expected_norm(module, q + branch), rtol=0, atol=2e-5)
    projected = module.w_ks(k), module.w_vs(v)
    out, returned = module(q, k, v, keep, return_attn=True, projected=projected)
    torch.testing.assert_close(out, expected_norm(module, q + branch), rtol=0, atol=2e-5)
    torch.testing.assert_close(returned, weights, rtol=0, atol=1e-6)


@pytest.mark.full
def test_a_layer_with_other_norms_and_biases_is_traced():
    layer = EncoderLayer(D, 24, H, DK, DV, norm="rms", qk_norm=True, attention_bias=True).to(DEVICE).eval()
    x, mask = randn(B, LQ, D), AttentionMask(is_causal=True)
    compiled = torch.compile(lambda x: layer(x, mask)[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x, mask)[0], rtol=0, atol=1e-5)


def test_stacks_pass_the_options_of_their_layers_on():
    options = dict(attn_dropout=0.3, n_head_kv=1, activation="swiglu", norm_first=True, norm="rms", qk_norm=True)
    options |= dict(softcap=0.2, attention_bias=True, backend="aten", device=DEVICE, dtype=torch.float64)
    for stack, layer in ((Encoder, EncoderLayer), (Decoder, DecoderLayer)):
        made = stack(9, D, 1, H, DK, DV, D, 24, 0, dropout=0.2, **options)
        assert repr(made.layer_stack[0]) == repr(layer(D, 24, H, DK, DV, 0.2, **options))
        assert type(made.layer_norm) is torch.nn.RMSNorm
        assert {module.backend for module in made.modules() if hasattr(module, "backend")} == {"aten"}
        assert {(t.dtype, t.device.type) for t in made.state_dict().values()} == {(torch.float64, DEVICE)}


@pytest.mark.parametrize("options", [dict(norm="rms", qk_norm=True, attention_bias=True), dict(softcap=0.2)], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer_with_options(norm_first, options):
    """The same as its sublayers one by one, and step by step."""
    layer = DecoderLayer(D, 24, H, DK, DV, norm_first=norm_first, **options).to(DEVICE).eval()
    names = [name for name, _ in layer.named_parameters()]
    if "norm" in options:
        assert {"slf_attn.q_norm.weight", "enc_attn.fc.bias", "pos_ffn.layer_norm.weight"} < {*names}
        assert not any(name.endswith("norm.bias") for name in names)
    with torch.no_grad():
        for t in layer.parameters():
            t.add_(0.2 * torch.randn_like(t))
    x, memory, causal = randn(B, LQ, D), randn(B, LK, D), AttentionMask(is_causal=True)
    out, _, _ = layer(x, memory, causal)
    y, _ = layer.slf_attn(x, x, x, causal)
    y, _ = layer.enc_attn(y, memory, memory)
    torch.testing.assert_close(out, layer.pos_ffn(y), rtol=0, atol=1e-5)
    attention, lengths = layer.enc_attn, torch.full((B,), LK, dtype=torch.int32, device=DEVICE)
    kept = Memory({attention: attention.memory((attention.w_ks(memory), attention.w_vs(memory)))}, lengths)
    cache = DecoderCache(B, 1, LQ, x.device, (kept,))
    with torch.no_grad():
        for i in range(LQ):
            step, *_ = layer(x[:, i : i + 1], None, cache=cache)
            torch.testing.assert_close(step, out[:, i : i + 1], rtol=0, atol=1e-5)
            cache.advance()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("options", [{}, dict(bias=False), dict(kdim=11), dict(vdim=9, bias=False)], ids=str)
def test_from_torch(options, norm_first):
    theirs = torch.nn.MultiheadAttention(D, H, 0.3, batch_first=True, device=DEVICE, **options).eval()
    for t in theirs.parameters():
        torch.nn.init.normal_(t, std=0.3)  # their biases begin as 0
    norm = torch.nn.RMSNorm(D, device=DEVICE) if norm_first else torch.nn.LayerNorm(D, device=DEVICE)
    torch.nn.init.normal_(norm.weight)
    ours = MultiHeadAttention.from_torch(theirs, norm, 0.2, norm_first=norm_first)
    assert (ours.attention.dropout.p, ours.dropout.p, ours.training) == (0.3, 0.2, False)
    q, k, v = randn(B, LQ, D), randn(B, LK, options.get("kdim", D)), randn(B, LK, options.get("vdim", D))
    keep = random_mask(B, LK)
    branch, _ = theirs(norm(q) if norm_first else q, k, v, key_padding_mask=~keep)
    expected = q + branch if norm_first else norm(q + branch)
    torch.testing.assert_close(ours(q, k, v, AttentionMask(key_padding=keep))[0], expected, rtol=0, atol=2e-5)
    assert ours.layer_norm is not norm and not {*ours.parameters()} & {*theirs.parameters()}


def test_from_torch_names_what_does_not_fit():
    module = torch.nn.MultiheadAttention(D, H, dtype=torch.float64)
    ours = MultiHeadAttention.from_torch(module)
    assert ours.training and {t.dtype for t in ours.parameters()} == {torch.float64}
    assert isinstance(ours.layer_norm, torch.nn.LayerNorm)
    for given, error, message in (
        ((ours,), TypeError, "module must be a torch.nn.MultiheadAttention, got MultiHeadAttention"),
        ((torch.nn.MultiheadAttention(D, H, add_bias_kv=True),), ValueError, "add_bias_kv=True"),
        ((torch.nn.MultiheadAttention(D, H, add_zero_attn=True),), ValueError, "add_zero_attn=True"),
        ((module, torch.nn.LayerNorm(D + 1)), ValueError, r"layer_norm normalises \(17,\), expected \(16,\)"),
        ((module, None, 2.0), ValueError, "dropout"),
    ):
        with pytest.raises(error, match=message):
            MultiHeadAttention.from_torch(*given)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8])
def test_dense_masks(dtype):
    module, x = heads(), randn(B, LQ, D)
    keys = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], device=DEVICE).bool()
    expected, _ = module(x, x, x, AttentionMask(key_padding=keys))
    for mask in (keys[:, None], keys[:, None].expand(B, LQ, LQ)):
        mask = mask if dtype == torch.bool else 3 * mask.to(dtype)  # any number but 0 means attend
        torch.testing.assert_close(module(x, x, x, mask)[0], expected, rtol=0, atol=1e-6)
    causal = torch.ones(1, LQ, LQ, device=DEVICE).tril().to(dtype)
    expected, _ = module(x, x, x, AttentionMask(is_causal=True))
    torch.testing.assert_close(module(x, x, x, causal)[0], expected, rtol=0, atol=1e-6)


def test_bad_masks_and_inputs_are_named():
    module, x = heads(), randn(B, LQ, D)
    for mask, error, message in (
        (torch.ones(B, LQ, dtype=torch.bool, device=DEVICE), ValueError, r"\(B, 1, Lk\).*\(2, 5\)"),
        (torch.zeros(B, LQ, LQ, device=DEVICE), ValueError, "float32.*bias"),
        (torch.ones(B, 1, LK, dtype=torch.bool, device=DEVICE), ValueError, "key_padding"),
        ([[True]], TypeError, "a mask must be .* got list"),
    ):
        with pytest.raises(error, match=message):
            module(x, x, x, mask)
    for q, k, name, width in ((x[0], x, "q", "d_model"), (x, x[..., 1:], "k", "kdim")):
        with pytest.raises(ValueError, match=rf"{name} has shape .* expected \(B, L, {width} = {D}\)"):
            module(q, k, x)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu", "reglu", "geglu", "geglu_tanh", "swiglu"])
def test_feed_forward(activation):
    norm = "rms" if activation == "swiglu" else "layer"
    module = PositionwiseFeedForward(D, 24, activation=activation, norm=norm).to(DEVICE).eval()
    x = randn(B, LQ, D)
    gates = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}
    functions = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
    functions["gelu_tanh"] = lambda z: F.gelu(z, approximate="tanh")
    function = functions[gates.get(activation, activation)]
    hidden = module.w_1(x)
    assert hidden.size(-1) == (48 if activation in gates else 24)
    hidden = function(hidden[..., :24]) * hidden[..., 24:] if activation in gates else function(hidden)
    expected = expected_norm(module, x + module.w_2(hidden))
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-5)


def test_dropout_is_around_the_branch_only():
    """With dropout 1 the branch is 0, and only the normalised residual is left."""
    x = randn(B, LQ, D)
    expected = F.layer_norm(x, (D,), eps=1e-6)
    torch.testing.assert_close(PositionwiseFeedForward(D, 24, dropout=1.0).to(DEVICE)(x), expected, rtol=0, atol=1e-5)
    attention = MultiHeadAttention(H, D, DK, DV, dropout=1.0).to(DEVICE)
    torch.testing.assert_close(attention(x, x, x)[0], expected, rtol=0, atol=1e-5)


def pre_norm_pair(kind, dropout=0.0):
    """A pre-norm layer of this kind, and torch's layer with the same weights."""
    layer = kind(D, 24, H, D // H, D // H, dropout, attn_dropout=0.0, norm_first=True)
    torchs = torch.nn.TransformerEncoderLayer if kind is EncoderLayer else torch.nn.TransformerDecoderLayer
    theirs = torchs(D, H, 24, dropout, layer_norm_eps=1e-6, batch_first=True, norm_first=True)
    blocks = [layer.slf_attn] + ([layer.enc_attn] if kind is DecoderLayer else []) + [layer.pos_ffn]
    for ours, norm in zip(blocks, (theirs.norm1, theirs.norm2, getattr(theirs, "norm3", None)), strict=False):
        torch.nn.init.normal_(ours.layer_norm.weight)
        norm.load_state_dict(ours.layer_norm.state_dict())
    with torch.no_grad():
        for ours, attention in zip(blocks, (theirs.self_attn, getattr(theirs, "multihead_attn", None)), strict=False):
            if isinstance(ours, MultiHeadAttention):
                attention.in_proj_weight.copy_(torch.cat([ours.w_qs.weight, ours.w_ks.weight, ours.w_vs.weight]))
                attention.in_proj_bias.zero_()
                attention.out_proj.weight.copy_(ours.fc.weight)
                attention.out_proj.bias.zero_()
    theirs.linear1.load_state_dict(layer.pos_ffn.w_1.state_dict())
    theirs.linear2.load_state_dict(layer.pos_ffn.w_2.state_dict())
    return layer.to(DEVICE), theirs.to(DEVICE)


@pytest.mark.parametrize("changed", [False, True], ids=["as it is", "with another norm"])
@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer])
def test_a_pre_norm_layer_takes_and_gives_tensors(kind, changed):
    """Equal to torch's layer, with gradients. A stack of summands gives the same."""
    (layer, theirs), x, memory = pre_norm_pair(kind), randn(B, LQ, D).requires_grad_(), randn(B, LK, D)
    others = () if kind is EncoderLayer else (memory,)
    if changed:
        layer.pos_ffn.layer_norm = torch.nn.RMSNorm(D, device=DEVICE)
        setattr(theirs, "norm2" if kind is EncoderLayer else "norm3", layer.pos_ffn.layer_norm)
    out, expected = layer(x, *others)[0], theirs(x, *others)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    (dx, expected_dx) = (torch.autograd.grad(t.square().sum(), x)[0] for t in (out, expected))
    torch.testing.assert_close(dx, expected_dx, rtol=1e-4, atol=1e-4)

    summands = PendingResidual(x, None)
    for _ in range(2):
        summands, *_ = layer(summands, *others)
    assert isinstance(summands, PendingResidual)
    torch.testing.assert_close(summands.sum(layer.pos_ffn.dropout), layer(out, *others)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer])
def test_a_pre_norm_layer_drops_only_its_branches(kind):
    """With dropout 1 only the unchanged input is left."""
    layer, x = kind(D, 24, H, DK, DV, 1.0, norm_first=True).to(DEVICE), randn(B, LQ, D)
    assert torch.equal(layer(x, *(() if kind is EncoderLayer else (x,)))[0], x)


def test_the_wrong_kind_of_input_is_named():
    x = randn(B, LQ, D)
    total = PendingResidual(x, None)
    attention, feed_forward = heads(), PositionwiseFeedForward(D, 24).to(DEVICE)
    for call, message in (
        (lambda: attention(total, total, total), "MultiHeadAttention got a PendingResidual, .* norm_first is False"),
        (lambda: feed_forward(total), "PositionwiseFeedForward got a PendingResidual, .* norm_first is False"),
        (lambda: EncoderLayer(D, 24, H, DK, DV).to(DEVICE)(total), "got a PendingResidual"),
        (lambda: attention(x.tolist(), x, x), "MultiHeadAttention got a list, expected a Tensor"),
        (lambda: feed_forward(x.tolist()), "PositionwiseFeedForward got a list, expected a Tensor"),
        (lambda: attention(x, total, x), "k must be a Tensor, got PendingResidual"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    if DEVICE == "cpu":
        for dtype in (torch.float16, torch.int64):
            message = f"the layer's input has dtype {dtype}, expected torch.float32 as its weights"
            with pytest.raises(TypeError, match=message):
                EncoderLayer(D, 24, H, DK, DV)(x.to(dtype))


class RowsOfOneProcess(torch.nn.Linear):
    """As parallelize_module makes it, of two processes."""

    def forward(self, x):
        return super().forward(x)[..., : self.out_features // 2]


@pytest.mark.parametrize("activation", ["swiglu", "reglu", "geglu"])
def test_a_gated_feed_forward_cannot_be_divided(activation):
    module = PositionwiseFeedForward(D, 24, activation=activation).to(DEVICE)
    module.w_1 = RowsOfOneProcess(D, 48, device=DEVICE)
    module.w_2 = torch.nn.Linear(12, D, device=DEVICE)
    with pytest.raises(ValueError, match=f"w_1 gave 24 of its 48 outputs: .* activation '{activation}'"):
        module(randn(B, LQ, D))


@pytest.mark.bug_class("T18")
@pytest.mark.parametrize("way", ["as it is", "hooked", "reference", "triton"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_stream_keeps_its_dtype(dtype, norm_first, way):
    """A residual connection gives the dtype of a layer's input, as PyTorch's layers do. Its branch may be unused."""
    if way == "triton":
        skip_without_triton()
    layer, x = EncoderLayer(D, 24, H, DK, DV, norm_first=norm_first).to(DEVICE), randn(B, LQ, D).to(dtype)
    if way == "hooked":
        layer.pos_ffn.w_1.register_forward_hook(lambda *_: None)
    inputs = [x.requires_grad_(), PendingResidual(x.bfloat16(), x)][: 1 + norm_first]
    with torch.autocast(DEVICE, torch.bfloat16), use_backend(way if way in BACKENDS else None):
        outs = [layer(given)[0] for given in inputs]
    found = [out.residual if isinstance(out, PendingResidual) else out for out in outs]
    assert {out.dtype for out in found} == {dtype}
    sum(out.float().square().sum() for out in found).backward()
    assert x.grad.dtype == dtype


def test_repr_names_the_options():
    text = repr(EncoderLayer(D, 24, H, DK, DV, activation="swiglu", n_head_kv=2))
    assert "n_head=4, n_head_kv=2, d_k=6, d_v=10" in text and "activation=swiglu" in text
    assert "16, n_position=9" in repr(PositionalEncoding(D, n_position=9))
