"""The captioner in plain PyTorch: what fastattn.models.ABDTransformer must equal.

Written from the definition, with none of fastattn in it. Module and parameter names are the public ones. Where nothing
is visible to a query, attention gives 0, which is fastattn's definition.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


class Connection(nn.Module):
    def __init__(self, size, dropout):
        super().__init__()
        self.layer_norm, self.dropout = Norm(size), nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return self.dropout(self.layer_norm(x + sublayer(x)))


class Attention(nn.Module):
    def __init__(self, heads, d_model, dropout):
        super().__init__()
        self.heads = heads
        self.linear_query, self.linear_key = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.linear_value, self.linear_out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, mask):
        def heads(x):
            return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

        q, k, v = heads(self.linear_query(query)), heads(self.linear_key(key)), heads(self.linear_value(key))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.size(-1))
        visible = torch.ones_like(scores, dtype=torch.bool)
        if mask is not None:
            visible = visible & (mask.unsqueeze(1) != 0)
        weights = F.softmax(scores.masked_fill(~visible, torch.finfo(scores.dtype).min), dim=-1)
        weights = weights * visible.any(-1, keepdim=True)
        return self.linear_out((self.dropout(weights) @ v).transpose(1, 2).reshape(query.shape))


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)
        self.dropout_1, self.dropout_2 = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout_2(self.w_2(self.dropout_1(F.relu(self.w_1(self.layer_norm(x))))))


class Layer(nn.Module):
    def __init__(self, d_model, d_ff, heads, dropout, connections, attends=True):
        super().__init__()
        self.attn, self.feed_forward = Attention(heads, d_model, dropout), FeedForward(d_model, d_ff)
        self.attends = attends
        self.sublayer_connection = nn.ModuleList(Connection(d_model, dropout) for _ in range(connections))

    def forward(self, x, mask, memory=None, memory_mask=None, other=None, other_mask=None):
        connection = self.sublayer_connection
        if self.attends:
            x = connection[0](x, lambda x: self.attn(x, x, mask))
        if memory is not None:
            x = connection[1](x, lambda x: self.attn(x, memory, memory_mask))
        if other is not None:
            x = connection[-2](x, lambda x: self.attn(x, other, other_mask))
        return connection[-1](x, self.feed_forward)


class Stack(nn.Module):
    def __init__(self, name, layers):
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleList(layers))

    def forward(self, x, *rest):
        for layer in getattr(self, self.name):
            x = layer(x, *rest)
        return x


class Positions(nn.Module):
    def __init__(self, d_model, dropout, by):
        super().__init__()
        position = torch.arange(5000).unsqueeze(1).float()
        frequency = torch.exp(torch.arange(0, d_model, 2).float() * -(math.log(10000.0) / d_model))
        pe = torch.zeros(5000, d_model)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * frequency), torch.cos(position * frequency)
        self.register_buffer("pe", pe.unsqueeze(1))
        self.dropout, self.by = nn.Dropout(dropout), by

    def forward(self, x):
        pe = self.pe[: x.size(0)] if self.by == "batch" else self.pe[: x.size(1)].transpose(0, 1)
        return self.dropout(x * math.sqrt(x.size(-1)) + pe)


class PlainCaptioner(nn.Module):
    def __init__(self, vocab, d_feat, d_model, d_ff, n_heads, n_layers, dropout, mode, n_heads_big, positions="batch"):
        super().__init__()
        self.vocab, self.mode = vocab, mode
        names = ["src"] if mode == "one" else ["image_src", "motion_src", "object_src", "rel_src"]
        for name, width in zip(names, [d_feat] if mode == "one" else d_feat, strict=False):
            layers = nn.Sequential(Norm(width), nn.Dropout(dropout), nn.Linear(width, d_model))
            self.add_module(f"{name}_embed", nn.ModuleDict({"video_embeddings": layers}))
        self.trg_embed = nn.ModuleDict({"embed": nn.Embedding(vocab.n_vocabs, d_model)})
        self.pos_embed = Positions(d_model, dropout, positions)

        def stack(name, heads, connections, **more):
            return Stack(name, [Layer(d_model, d_ff, heads, dropout, connections, **more) for _ in range(n_layers)])

        self.encoder, self.encoder_big = stack("encoder_layer", n_heads, 2), stack("encoder_layer", n_heads_big, 2)
        self.encoder_no_attention = stack("encoder_layer", n_heads, 2, attends=False)
        self.r2l_decoder, self.l2r_decoder = stack("decoder_layer", n_heads, 3), stack("decoder_layer", n_heads, 4)
        self.generator = nn.ModuleDict({"linear": nn.Linear(d_model, vocab.n_vocabs)})

    def features(self, name, x):
        return self.get_submodule(f"{name}_src_embed.video_embeddings")(x)

    def words(self, tokens):
        x = self.trg_embed["embed"](tokens)
        return self.pos_embed(x * math.sqrt(x.size(-1)))

    def log_probs(self, states):
        return F.log_softmax(self.generator["linear"](states), dim=-1)

    def image_and_motion(self, src, masks):
        image = self.encoder_big(self.pos_embed(self.features("image", src[0])), masks[0])
        return image + self.encoder_big(self.pos_embed(self.features("motion", src[1])), masks[1])

    def encodings(self, src, src_mask):
        """What the right-to-left and the left-to-right decoder read, and its mask."""
        if self.mode == "one":
            x = self.encoder(self.pos_embed(self.src_embed["video_embeddings"](src)), src_mask)
            return x, x, src_mask
        masks, mask = src_mask
        r2l = self.image_and_motion(src, masks)
        if self.mode == "two":
            return r2l, r2l, mask
        x = self.encoder(self.pos_embed(self.features("image", src[0])), masks[0])
        x = x + self.encoder(self.pos_embed(self.features("motion", src[1])), masks[1])
        objects = self.features("object", src[2])
        x = x + self.encoder(self.pos_embed(objects) if self.mode == "three" else objects, masks[2])
        if self.mode == "four":
            x = x + self.encoder_no_attention(self.features("rel", src[3]), masks[3])
        return r2l, x, mask

    def forward(self, src, r2l_trg, trg, mask):
        src_mask, r2l_pad_mask, r2l_trg_mask, trg_mask = mask
        r2l_memory, memory, src_mask = self.encodings(src, src_mask)
        r2l = self.r2l_decoder(self.words(r2l_trg), r2l_trg_mask, r2l_memory, src_mask)
        l2r = self.l2r_decoder(self.words(trg), trg_mask, memory, src_mask, r2l, r2l_pad_mask)
        return self.log_probs(r2l), self.log_probs(l2r)

    def masks(self, src, r2l_trg, trg, pad):
        causal = [torch.ones(1, t.size(1), t.size(1), dtype=torch.bool).tril() for t in (r2l_trg, trg)]
        pads = [(f[:, :, 0] != pad).unsqueeze(1) for f in ([src] if self.mode == "one" else src)]
        src_mask = pads[0] if self.mode == "one" else (tuple(pads), pads[0] & pads[1])
        r2l_pad, trg_pad = (r2l_trg != pad).unsqueeze(1), (trg != pad).unsqueeze(1)
        return src_mask, r2l_pad, r2l_pad & causal[0], trg_pad & causal[1]

    @torch.no_grad()
    def greedy(self, src_mask, memory, max_len):
        """Computes every prefix again. Returns the states of the last one and all tokens."""
        tokens = torch.full((memory.size(0), 1), self.vocab.word2idx["<S>"], device=memory.device)
        for _ in range(max_len + 1):
            causal = tokens.new_ones(1, tokens.size(1), tokens.size(1), dtype=torch.bool).tril()
            states = self.r2l_decoder(self.words(tokens), causal, memory, src_mask)
            tokens = torch.cat([tokens, self.log_probs(states[:, -1]).argmax(-1, keepdim=True)], 1)
        return states, tokens
