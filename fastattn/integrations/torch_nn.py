"""torch.nn's attention and Transformer layers, with its signatures, state_dicts, masks and errors, on fastattn.

Mixins of accelerate(). Masks as in torch.nn: True blocks, a floating-point mask is added to the scores; or an
AttentionMask. Masks of a stack are read once for all of its layers. On a CPU layers call their modules, those without
masks in torch.nn's own forward, which has a fast path for inference.

Left to torch.nn, with its numbers: attention weights on request (need_weights=True, the default of a
MultiheadAttention that is called by itself), add_bias_kv, add_zero_attn, nested tensors, unbatched inputs.

What differs: a query that may attend to nothing gives 0, as in torch.nn without weights; its fast path, in eval mode
without gradients, gives NaN. That path also gives 0 at the padding of a TransformerEncoder, and reads a float mask of a
layer as a bool mask. Here a call with masks gives in every mode what training gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.integrations.layers import (
    Accelerated,
    Attend,
    AttentionNames,
    FeedForwardNames,
    Row,
    TableLayer,
    accelerated_class,
)
from fastattn.masks import AttentionMask
from fastattn.nn.fusible import is_unmodified
from fastattn.nn.leaves import fastest_products, is_whole, product
from fastattn.ops.attention import scaled_dot_product_attention

Mask = Tensor | AttentionMask | None


def attention_mask(
    blocked: Mask, blocked_keys: Tensor | None, n_head: int, is_causal: bool = False
) -> AttentionMask | None:
    """torch.nn's masks as one.

    blocked: (L, S) or (N * n_head, L, S), bool or floating point; an AttentionMask is combined with the others.
    blocked_keys: (N, S).     is_causal: as in torch.nn it promises that blocked is the causal mask.
    """
    if isinstance(blocked, AttentionMask):
        if blocked_keys is None and not is_causal:
            return blocked
        return blocked & attention_mask(None, blocked_keys, n_head, is_causal)
    if blocked is None and blocked_keys is None and not is_causal:
        return None
    visible, bias, key_padding = None, None, None
    if blocked is not None and not is_causal:
        if blocked.dim() == 3:
            blocked = blocked.unflatten(0, (-1, n_head))
        visible, bias = (~blocked, None) if blocked.dtype == torch.bool else (None, blocked)
    if blocked_keys is not None:
        if blocked_keys.dtype == torch.bool:
            key_padding = ~blocked_keys
        else:
            added = blocked_keys[:, None, None]
            bias = added if bias is None else bias + added
    return AttentionMask(visible, key_padding=key_padding, is_causal=is_causal, bias=bias)


class Attention(Accelerated):
    """With need_weights=True, the default, a call is torch.nn's own unless attn_mask is an AttentionMask."""

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Mask = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch.nn.MultiheadAttention. attn_mask may be an AttentionMask, combined with key_padding_mask."""
        tensors, is_own = (query, key, value), isinstance(attn_mask, AttentionMask)
        fits = _fits(self, *tensors, attn_mask, key_padding_mask, is_causal)
        if not fits or (need_weights and not is_own):
            _check_left(attn_mask)
            given = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return self.original.forward(self, *tensors, *given)
        mask = attention_mask(attn_mask, key_padding_mask, self.num_heads, is_causal)
        if not self.batch_first:
            query, key, value = _transposed(query, key, value)
        # Not by unflatten, which torch.compile does not trace under the TorchFunctionMode of a layer's `branch`.
        projected, width = _projected(self, query, key, value), self.embed_dim // self.num_heads
        q, k, v = (t.view(*t.shape[:2], self.num_heads, width).transpose(1, 2) for t in projected)
        dropout_p = self.dropout if self.training else 0.0
        if need_weights:
            out, weights = scaled_dot_product_attention(q, k, v, mask, dropout_p, return_weights=True)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out, weights = scaled_dot_product_attention(q, k, v, mask, dropout_p), None
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return (out if self.batch_first else out.transpose(0, 1)), weights


def _transposed(*tensors: Tensor) -> list[Tensor]:
    """Each with its first two dimensions exchanged. What was one tensor stays one."""
    made: list[Tensor] = []
    for t in tensors:
        first = next(n for n, other in enumerate(tensors) if other is t)
        made.append(made[first] if first < len(made) else t.transpose(0, 1))
    return made


def _fits(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, blocked: Mask, blocked_keys: Any, is_causal: bool
) -> bool:
    """Whether it is a valid call of those that are computed here. torch.nn has the others, and the errors."""
    if is_causal and blocked is None:
        return False
    if any([t.is_nested or t.dim() != 3 for t in (query, key, value)]):
        return False
    batch, length = (0, 1) if attention.batch_first else (1, 0)
    N, L, S = query.shape[batch], query.shape[length], key.shape[length]
    if (query.shape[2], key.shape[2], value.shape[2]) != (attention.embed_dim, attention.kdim, attention.vdim):
        return False
    if key.shape[batch] != N or value.shape[:2] != key.shape[:2]:
        return False
    shapes = (L, S), (N * attention.num_heads, L, S)
    if not (blocked is None or isinstance(blocked, AttentionMask) or _is_mask(blocked, *shapes)):
        return False
    return blocked_keys is None or _is_mask(blocked_keys, (N, S))


def _is_mask(mask: Any, *shapes: tuple[int, ...]) -> bool:
    """Whether it is one of torch.nn's masks of one of these shapes."""
    is_mask = isinstance(mask, Tensor) and (mask.dtype == torch.bool or mask.is_floating_point())
    return is_mask and mask.shape in shapes


def _check_left(*masks: Mask) -> None:
    """ValueError for an AttentionMask in a call that is left to torch.nn, which does not know it."""
    if any([isinstance(mask, AttentionMask) for mask in masks]):
        raise ValueError(
            "an AttentionMask needs batched inputs whose sizes fit, and layers and attention that accelerate took and "
            "nothing has changed since"
        )


def _projected(attention: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values, (N, L, E)."""
    E, bias = attention.embed_dim, attention.in_proj_bias
    if not attention._qkv_same_embed_dim:
        weights = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
    elif query is key is value:
        return product(query, attention.in_proj_weight, bias).split(E, 2)
    elif key is value:
        return product(query, attention.in_proj_weight[:E], None if bias is None else bias[:E]), *_memory(
            attention, key
        )
    else:
        weights = attention.in_proj_weight.split(E)
    biases = (None,) * 3 if bias is None else bias.split(E)
    return tuple(product(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))


def _memory(attention: Any, memory: Tensor) -> tuple[Tensor, ...]:
    """Keys and values of a memory (N, S, E), by one product."""
    E, bias = attention.embed_dim, attention.in_proj_bias
    return product(memory, attention.in_proj_weight[E:], None if bias is None else bias[E:]).split(E, 2)


# Of an attention's call: the mask, the blocked keys, and whether a hint says that the mask is causal.
Given = tuple[Mask, Tensor | None, bool]
_BLOCKS = ("_sa_block", "_mha_block", "_ff_block")  # methods of torch.nn's layers; one may be set on the object


def _masks(
    layers: Sequence[Any], sources: Sequence[Tensor], given: Sequence[Given]
) -> list[AttentionMask | None] | None:
    """The masks of these layers, one for each of a layer's attentions, or None if their calls are torch.nn's.

    sources: the layer's input, and the memory of its second attention. ValueError for an AttentionMask in such a call.
    """
    if all([_fits_layer(layer, sources, given) for layer in layers]):
        attentions = _attentions(layers[0])
        return [attention_mask(m, k, a.num_heads, c) for a, (m, k, c) in zip(attentions, given, strict=True)]
    _check_left(*[mask for mask, _, _ in given])
    return None


def _fits_layer(layer: Any, sources: Sequence[Tensor], given: Sequence[Given]) -> bool:
    if any([name in layer.__dict__ for name in _BLOCKS]):
        return False
    attentions, x = _attentions(layer), sources[0]
    for attention, source, one in zip(attentions, sources, given, strict=True):
        if type(attention) is not _ATTENTION or attention.batch_first != attentions[0].batch_first:
            return False
        if not attention._qkv_same_embed_dim or not _fits(attention, x, source, source, *one):
            return False
    return True


def _attentions(layer: Any) -> list[Any]:
    return [layer._modules[names.module] for names in layer.row.attentions]


def _row(*modules: str) -> Row:
    """Of a layer with these attentions. Its dropouts and norms are numbered."""
    *numbers, last = range(1, len(modules) + 2)
    return Row(
        FeedForwardNames("linear1", "activation", "dropout", "linear2", f"dropout{last}", f"norm{last}"),
        *[
            AttentionNames(module, "", "", ".out_proj", ".head_dim", ".dropout", f"dropout{n}", f"norm{n}")
            for module, n in zip(modules, numbers, strict=True)
        ],
    )


_PLAIN = (nn.Parameter, Tensor)


class _Layer(TableLayer):
    """What TransformerEncoderLayer and TransformerDecoderLayer share."""

    def run_with(self: Any, given: Sequence[Given], x: Tensor, *memory: Tensor) -> Tensor:
        """The layer's output. given: for each attention."""
        masks = _masks([self], (x, *memory), given)
        if masks is None or not (is_whole(x) or any([mask is not None for mask in masks])):
            return self.call_original(x, *memory, *chain(*zip(*given, strict=True)))
        if is_whole(x):
            attends = [_attend(mask, *memory[:n]) for n, mask in enumerate(masks)]
            return self.run(x, attends, *memory, batch_first=self._modules["self_attn"].batch_first)
        with fastest_products(x):
            return self._call_modules(masks, x, *memory)

    def _call_modules(self: Any, masks: Sequence[Any], x: Tensor, *memory: Tensor) -> Tensor:
        """As torch.nn's forward."""
        blocks: list[Callable[[Tensor], Tensor]] = [lambda x: self._sa_block(x, masks[0], None)]
        if memory:
            blocks.append(lambda x: self._mha_block(x, *memory, masks[1], None))
        for n, block in enumerate([*blocks, self._ff_block], 1):
            norm = getattr(self, f"norm{n}")
            x = x + block(norm(x)) if self.norm_first else norm(x + block(x))
        return x

    def may_fuse(self, attention: Any, n: int) -> bool:
        return is_unmodified(attention, _ATTENTION, ()) and type(attention.in_proj_weight) in _PLAIN

    def projections(self, maps: list[Any], attention: Any, reads_memory: bool) -> tuple[Any, Any, int]:
        E, weight, bias = attention.embed_dim, attention.in_proj_weight, attention.in_proj_bias
        if reads_memory:
            weight, bias = weight[:E], None if bias is None else bias[:E]
        return (weight,), (bias,), E

    def project(self: Any, memory: Tensor) -> tuple[Tensor, ...]:
        return _memory(self.multihead_attn, memory)


def _attend(mask: AttentionMask | None, *memory: Tensor) -> Attend:
    def branch(attention: nn.Module, x: Tensor) -> Tensor:
        source = memory[0] if memory else x
        return attention(x, source, source, attn_mask=mask, need_weights=False)[0]

    return Attend(branch, mask)


class EncoderLayer(_Layer):
    row = _row("self_attn")

    def forward(
        self: Any,
        src: Tensor,
        src_mask: Mask = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As torch.nn.TransformerEncoderLayer. src_mask may be an AttentionMask."""
        return self.run_with([(src_mask, src_key_padding_mask, is_causal)], src)


class DecoderLayer(_Layer):
    row = _row("self_attn", "multihead_attn")

    def forward(
        self: Any,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Mask = None,
        memory_mask: Mask = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As torch.nn.TransformerDecoderLayer. tgt_mask and memory_mask may be AttentionMasks."""
        given = [(tgt_mask, tgt_key_padding_mask, tgt_is_causal)]
        given += [(memory_mask, memory_key_padding_mask, memory_is_causal)]
        return self.run_with(given, tgt, memory)


class Encoder(Accelerated):
    """It reads the masks once for all layers. Outputs at padding are in every mode those of training, not 0 as from
    torch.nn's fast path."""

    def forward(
        self: Any,
        src: Tensor,
        mask: Mask = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As torch.nn.TransformerEncoder. mask may be an AttentionMask."""
        given = (mask, src_key_padding_mask, is_causal)
        made = _stack_masks(self.layers, EncoderLayer, (src,), given)
        if made is None:
            return self.original.forward(self, src, *given)
        for layer in self.layers:
            src = layer(src, src_mask=made[0])
        return src if self.norm is None else self.norm(src)


class Decoder(Accelerated):
    """It reads the masks once for all layers."""

    def forward(
        self: Any,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Mask = None,
        memory_mask: Mask = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As torch.nn.TransformerDecoder. tgt_mask and memory_mask may be AttentionMasks."""
        given = [(tgt_mask, tgt_key_padding_mask, tgt_is_causal)]
        given += [(memory_mask, memory_key_padding_mask, memory_is_causal)]
        made = _stack_masks(self.layers, DecoderLayer, (tgt, memory), *given)
        if made is None:
            return self.original.forward(self, tgt, memory, *chain(*zip(*given, strict=True)))
        for layer in self.layers:
            tgt = layer(tgt, memory, tgt_mask=made[0], memory_mask=made[1])
        return tgt if self.norm is None else self.norm(tgt)


def _stack_masks(
    layers: Any, kind: type[_Layer], sources: Sequence[Tensor], *given: Any
) -> list[AttentionMask | None] | None:
    """As _masks. With a hint of None the mask is read to find whether it is causal, as in torch.nn."""
    if not layers or any([kind not in type(layer).__mro__[:2] for layer in layers]):
        _check_left(*[mask for mask, _, _ in given])
        return None
    (mask, blocked_keys, hint), *others = given
    if hint is None:
        hint = _is_causal(mask, sources[0], layers[0].self_attn.batch_first)
    return _masks(layers, sources, [(mask, blocked_keys, hint), *others])


def _is_causal(mask: Any, x: Tensor, batch_first: bool) -> bool:
    """Whether the mask is causal. Under torch.compile, where values cannot be read, the mask is used as it is."""
    if x.is_nested or x.dim() != 3 or torch.compiler.is_compiling():
        return False
    length = x.shape[1 if batch_first else 0]
    if not _is_mask(mask, (length, length)):
        return False
    blocked = mask if mask.dtype == torch.bool else mask == float("-inf")
    if blocked is not mask and not bool((blocked | (mask == 0)).all()):
        return False
    return bool((blocked == torch.ones_like(blocked).triu_(1)).all())


MIXINS: dict[type[nn.Module], type[Accelerated]] = {
    nn.MultiheadAttention: Attention,
    nn.TransformerEncoderLayer: EncoderLayer,
    nn.TransformerDecoderLayer: DecoderLayer,
    nn.TransformerEncoder: Encoder,
    nn.TransformerDecoder: Decoder,
}
_ATTENTION = accelerated_class(nn.MultiheadAttention, Attention)
