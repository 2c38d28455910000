"""The public implementation's Transformer in plain PyTorch: what FusedTransformer must equal, and the speed to beat.

Written from the architecture, with none of fastattn in it: one eager operator after another, the scores of every
attention in memory. Module and parameter names are the public ones, so a state_dict goes from here to FusedTransformer
and back. Initial weights are drawn in the same order, so they are equal after the same torch.manual_seed. The options
that fastattn's layers add to the public ones are here too, each in its plainest form.
"""

import math
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu}
GATES = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}


# The public constructor's arguments, and the options of fastattn's layers.
DEFAULTS = dict(d_word_vec=512, d_model=512, d_inner=2048, n_layers=6, n_head=8, d_k=64, d_v=64, n_position=200)
DEFAULTS |= dict(dropout=0.1, attn_dropout=0.1, scale_emb_or_prj="prj")
DEFAULTS |= dict(trg_emb_prj_weight_sharing=True, emb_src_trg_weight_sharing=True)
DEFAULTS |= dict(norm_first=False, activation="relu", n_head_kv=None, norm="layer")
DEFAULTS |= dict(qk_norm=False, softcap=None, attention_bias=False)


class Attention(nn.Module):
    """Parameters w_qs, w_ks, w_vs, fc and layer_norm. q (B, Lq, d), k and v (B, Lk, d), mask as wide as the scores."""

    def __init__(self, given):
        super().__init__()
        n_head, d_model, d_k, d_v = given.n_head, given.d_model, given.d_k, given.d_v
        self.n_head, self.n_head_kv, self.temperature = n_head, given.n_head_kv or n_head, d_k**0.5
        self.norm_first, self.softcap, bias = given.norm_first, given.softcap, given.attention_bias
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=bias)
        self.w_ks = nn.Linear(d_model, self.n_head_kv * d_k, bias=bias)
        self.w_vs = nn.Linear(d_model, self.n_head_kv * d_v, bias=bias)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=bias)
        self.attn_dropout, self.dropout = nn.Dropout(given.attn_dropout), nn.Dropout(given.dropout)
        self.layer_norm = NORMS[given.norm](d_model, eps=1e-6)
        self.q_norm, self.k_norm = (nn.RMSNorm(d_k, eps=1e-6) if given.qk_norm else None for _ in range(2))

    def heads(self, x, count=None):
        return x.view(x.size(0), x.size(1), count or self.n_head, -1).transpose(1, 2)

    def forward(self, q, k, v, mask):
        x = self.layer_norm(q) if self.norm_first else q
        k, v = (x if t is q else t for t in (k, v))
        keys, values = (self.heads(t, self.n_head_kv) for t in (self.w_ks(k), self.w_vs(v)))
        queries = self.heads(self.w_qs(x))
        if self.q_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if self.n_head_kv != self.n_head:
            keys, values = (t.repeat_interleave(self.n_head // self.n_head_kv, 1) for t in (keys, values))
        scores = torch.matmul(queries / self.temperature, keys.transpose(2, 3))
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        low = max(-1e9, torch.finfo(scores.dtype).min)  # the public -1e9 is more than float16 holds
        weights = self.attn_dropout(F.softmax(scores.masked_fill(mask.unsqueeze(1) == 0, low), dim=-1))
        joined = torch.matmul(weights, values).transpose(1, 2).reshape(q.size(0), q.size(1), -1)
        out = self.dropout(self.fc(joined))
        out += q
        return out if self.norm_first else self.layer_norm(out), weights


class FeedForward(nn.Module):
    """Parameters w_1, w_2 and layer_norm; x (B, L, d_model)."""

    def __init__(self, given):
        super().__init__()
        self.norm_first, self.is_gated = given.norm_first, given.activation in GATES
        self.activation = ACTIVATIONS[GATES.get(given.activation, given.activation)]
        self.w_1 = nn.Linear(given.d_model, 2 * given.d_inner if self.is_gated else given.d_inner)
        self.w_2 = nn.Linear(given.d_inner, given.d_model)
        self.layer_norm = NORMS[given.norm](given.d_model, eps=1e-6)
        self.dropout = nn.Dropout(given.dropout)

    def forward(self, x):
        hidden = self.w_1(self.layer_norm(x) if self.norm_first else x)
        gate, up = hidden.chunk(2, -1) if self.is_gated else (hidden, None)
        hidden = self.activation(gate) if up is None else self.activation(gate) * up
        out = self.dropout(self.w_2(hidden))
        out += x
        return out if self.norm_first else self.layer_norm(out)


class Layer(nn.Module):
    """An encoder layer, or with cross=True a decoder layer."""

    def __init__(self, given, cross):
        super().__init__()
        self.slf_attn = Attention(given)
        if cross:
            self.enc_attn = Attention(given)
        self.pos_ffn = FeedForward(given)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x, attns = self.slf_attn(x, x, x, mask)
        attns = [attns]
        if memory is not None:
            x, attn = self.enc_attn(x, memory, memory, memory_mask)
            attns.append(attn)
        return self.pos_ffn(x), attns


class Positions(nn.Module):
    """pos_table (1, n_position, width): sines in the even columns, cosines in the odd ones."""

    def __init__(self, n_position, width):
        super().__init__()
        table = torch.zeros(n_position, width, dtype=torch.float64)
        for column in range(width):
            period = math.pow(10000, 2 * (column // 2) / width)
            wave = torch.cos if column % 2 else torch.sin
            table[:, column] = wave(torch.arange(n_position, dtype=torch.float64) / period)
        self.register_buffer("pos_table", table.float().unsqueeze(0))

    def forward(self, x):
        return x + self.pos_table[:, : x.size(1)]


class Stack(nn.Module):
    """Embedding (under the name given), positions, dropout, LayerNorm and the layers."""

    def __init__(self, embedding, n_vocab, pad_idx, given, cross):
        super().__init__()
        self.embedding, self.norm_first = embedding, given.norm_first
        self.scale_emb = given.trg_emb_prj_weight_sharing and given.scale_emb_or_prj == "emb"
        self.add_module(embedding, nn.Embedding(n_vocab, given.d_model, padding_idx=pad_idx))
        self.position_enc = Positions(given.n_position, given.d_model)
        self.dropout = nn.Dropout(given.dropout)
        self.layer_stack = nn.ModuleList(Layer(given, cross) for _ in range(given.n_layers))
        self.layer_norm = NORMS[given.norm](given.d_model, eps=1e-6)

    def forward(self, seq, mask, memory=None, memory_mask=None):
        """Returns the output and, for each attention of a layer, the list of the layers' weights."""
        x = self.get_submodule(self.embedding)(seq)
        if self.scale_emb:
            x *= x.size(-1) ** 0.5
        x = self.dropout(self.position_enc(x))
        x, attns = x if self.norm_first else self.layer_norm(x), []
        for layer in self.layer_stack:
            x, attn = layer(x, mask, memory, memory_mask)
            attns.append(attn)
        x = self.layer_norm(x) if self.norm_first else x
        return x, [list(of_one_kind) for of_one_kind in zip(*attns, strict=True)]


class PlainTransformer(nn.Module):
    """Constructor arguments and forward as FusedTransformer's, the options of its layers included."""

    def __init__(self, n_src_vocab, n_trg_vocab, src_pad_idx, trg_pad_idx, **options):
        super().__init__()
        assert options.keys() <= DEFAULTS.keys(), options
        given = SimpleNamespace(**DEFAULTS | options)
        assert given.d_word_vec == given.d_model
        self.src_pad_idx, self.trg_pad_idx = src_pad_idx, trg_pad_idx
        scales = given.trg_emb_prj_weight_sharing and given.scale_emb_or_prj == "prj"
        self.logit_scale = given.d_model**-0.5 if scales else 1.0
        self.encoder = Stack("src_word_emb", n_src_vocab, src_pad_idx, given, cross=False)
        self.decoder = Stack("trg_word_emb", n_trg_vocab, trg_pad_idx, given, cross=True)
        self.trg_word_prj = nn.Linear(given.d_model, n_trg_vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        if given.trg_emb_prj_weight_sharing:
            self.trg_word_prj.weight = self.decoder.trg_word_emb.weight
        if given.emb_src_trg_weight_sharing:
            self.encoder.src_word_emb.weight = self.decoder.trg_word_emb.weight

    def masks(self, src_seq, trg_seq):
        """Dense bool masks: (B, 1, Ls) of the source, (B, Lt, Lt) of the target."""
        length = trg_seq.size(1)
        causal = torch.ones(1, length, length, dtype=torch.bool, device=trg_seq.device).tril()
        return (src_seq != self.src_pad_idx).unsqueeze(1), (trg_seq != self.trg_pad_idx).unsqueeze(1) & causal

    def forward(self, src_seq, trg_seq):
        src_mask, trg_mask = self.masks(src_seq, trg_seq)
        memory, _ = self.encoder(src_seq, src_mask)
        out, _ = self.decoder(trg_seq, trg_mask, memory, src_mask)
        logits = self.trg_word_prj(out)
        if self.logit_scale != 1.0:
            logits *= self.logit_scale
        return logits.view(-1, logits.size(2))
