"""torch.nn's attention and Transformer layers, with its signatures, state_dicts, masks and errors, on fastattn.

    from fastattn.integrations.torch_nn import TransformerEncoder, TransformerEncoderLayer

or accelerate(model) for a model that is made of torch.nn's own. Masks as in torch.nn: True blocks, a floating-point
mask is added to the scores. Masks of a stack are read once for all of its layers.

Left to torch.nn, with its numbers: attention weights on request (need_weights=True, the default of a
MultiheadAttention that is called by itself), add_bias_kv, add_zero_attn, nested tensors, unbatched inputs.

What differs: a query that may attend to nothing gives 0, as in torch.nn without weights; its fast path, in eval mode
without gradients, gives NaN. That path also gives 0 at the padding of a TransformerEncoder, and reads a float mask of a
layer as a bool mask. Here every mode gives what training gives.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    activation_name,
)
from fastattn.masks import AttentionMask
from fastattn.nn.fusible import all_can_fuse, is_unmodified
from fastattn.nn.leaves import is_small, product, pytorch_may_compute
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


class MultiheadAttention(Accelerated, nn.MultiheadAttention):
    """torch.nn.MultiheadAttention by fastattn's attention. attn_mask may be an AttentionMask.

    With need_weights=True, the default, a call is torch.nn's own unless attn_mask is an AttentionMask.
    """

    original = nn.MultiheadAttention

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
        if _has_nothing_to_gain(self, query, key, attn_mask, key_padding_mask):
            given = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return self.original.forward(self, *tensors, *given)
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


def _has_nothing_to_gain(module: nn.Module, queries: Tensor, keys: Tensor, *masks: Mask) -> bool:
    """Whether a call without masks is torch.nn's own: in eval mode on a CPU, and small."""
    if module.training or any([mask is not None for mask in masks]):
        return False
    if any([t.is_nested or t.dim() != 3 for t in (queries, keys)]):
        return False
    sizes = *queries.shape[:2], max(keys.shape[:2])
    return is_small(queries.device.type, *sizes)


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
    if attention.bias_k is not None or attention.add_zero_attn or (is_causal and blocked is None):
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
            "an AttentionMask needs batched inputs whose sizes fit, layers and attention of the classes of "
            "fastattn.integrations.torch_nn, and neither add_bias_kv nor add_zero_attn"
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
    """The masks of these layers, one for each of a layer's attentions, or None: their calls are torch.nn's.

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
        if type(attention) is not MultiheadAttention or attention.batch_first != attentions[0].batch_first:
            return False
        if not attention._qkv_same_embed_dim or not _fits(attention, x, source, source, *one):
            return False
    return True


class _Parent:
    """A module whose constructor makes other modules of this file."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        accelerate_children(self)


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


class _Layer(_Parent, TableLayer):
    """What TransformerEncoderLayer and TransformerDecoderLayer share."""

    def _run(self: Any, x: Tensor, given: Sequence[Given], *memory: Tensor) -> Tensor | None:
        """The layer's output, or None: its call is torch.nn's. given: for each attention."""
        masks = _masks([self], (x, *memory), given)
        if masks is None:
            return None
        attends = [_attend(mask, *memory[:n]) for n, mask in enumerate(masks)]
        return self.run(x, attends, *memory, batch_first=self._modules["self_attn"].batch_first)

    def may_fuse(self, attention: Any, n: int) -> bool:
        is_own = is_unmodified(attention, MultiheadAttention, ()) and type(attention.in_proj_weight) in _PLAIN
        return is_own and attention.bias_k is None and not attention.add_zero_attn

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


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer by fused ops. src_mask may be an AttentionMask.

    A call without masks uses torch.nn's fast path for inference where that is faster, on some CPUs.
    """

    original = nn.TransformerEncoderLayer
    row = _row("self_attn")

    def forward(
        self: Any,
        src: Tensor,
        src_mask: Mask = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As torch.nn.TransformerEncoderLayer. src_mask may be an AttentionMask."""
        given = src_mask, src_key_padding_mask, is_causal
        is_left = _has_nothing_to_gain(self, src, src, *given[:2])
        if not is_left and src_mask is None and src_key_padding_mask is None:
            is_left = _is_faster_in_torch(self, src)
        out = None if is_left else self._run(src, [given])
        return self.original.forward(self, src, *given) if out is None else out


MAX_LENGTH_IN_TORCH = 256
_CHILDREN = ("linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2")


def _is_faster_in_torch(layer: Any, x: Tensor) -> bool:
    """Whether torch.nn's fast path computes a call without masks, and in less time.

    Where products are PyTorch's, the fast path has less Python and one operator less. Measured on one core, torch 2.13,
    width 256, three layers, the time of torch.nn by ours: 0.9 of 16 x 32 and 8 x 128, 1.05 of 2 x 512, 0.4 of 2 x 4 of
    width 32.
    """
    if layer.training or torch.is_grad_enabled() or x.is_nested or x.dim() != 3 or x.shape[1] > MAX_LENGTH_IN_TORCH:
        return False
    if not pytorch_may_compute(x) or not all_can_fuse(layer, _CHILDREN):
        return False
    attention, activation = layer.self_attn, activation_name(layer.activation)
    if not layer.may_fuse(attention, 0) or not all_can_fuse(attention, ("out_proj",)):
        return False
    if activation not in ("relu", "gelu") or attention.in_proj_bias is None or attention.num_heads % 2:
        return False
    return attention.batch_first and layer.norm1.eps == layer.norm2.eps and torch.backends.mha.get_fastpath_enabled()


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer by fused ops. tgt_mask and memory_mask may be AttentionMasks."""

    original = nn.TransformerDecoderLayer
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
        masks = (
            (tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            (memory_mask, memory_key_padding_mask, memory_is_causal),
        )
        given = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, memory_is_causal
        is_left = _has_nothing_to_gain(self, tgt, memory, *given[:4])
        if not is_left and (out := self._run(tgt, masks, memory)) is not None:
            return out
        return self.original.forward(self, tgt, memory, *given)


class TransformerEncoder(_Parent, Accelerated, nn.TransformerEncoder):
    """torch.nn.TransformerEncoder that reads the masks once for all layers. mask may be an AttentionMask.

    Outputs at padding are in every mode those of training, not 0 as from torch.nn's fast path.
    """

    original = nn.TransformerEncoder

    def forward(
        self: Any,
        src: Tensor,
        mask: Mask = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As torch.nn.TransformerEncoder. mask may be an AttentionMask."""
        given = (mask, src_key_padding_mask, is_causal)
        made = None
        if not _has_nothing_to_gain(self, src, src, *given[:2]):
            made = _stack_masks(self.layers, TransformerEncoderLayer, (src,), given)
        if made is None:
            return nn.TransformerEncoder.forward(self, src, *given)  # type: ignore[arg-type]
        for layer in self.layers:
            src = layer(src, src_mask=made[0])
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(_Parent, Accelerated, nn.TransformerDecoder):
    """torch.nn.TransformerDecoder that reads the masks once for all layers. They may be AttentionMasks."""

    original = nn.TransformerDecoder

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
        given = (
            (tgt_mask, tgt_key_padding_mask, tgt_is_causal),
            (memory_mask, memory_key_padding_mask, memory_is_causal),
        )
        masks, made = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask), None
        if not _has_nothing_to_gain(self, tgt, memory, *masks):
            made = _stack_masks(self.layers, TransformerDecoderLayer, (tgt, memory), *given)
        if made is None:
            call = tgt, memory, *masks, tgt_is_causal, memory_is_causal
            return nn.TransformerDecoder.forward(self, *call)  # type: ignore[arg-type]
        for layer in self.layers:
            tgt = layer(tgt, memory, tgt_mask=made[0], memory_mask=made[1])
        return tgt if self.norm is None else self.norm(tgt)


def _stack_masks(
    layers: Any, kind: type[_Layer], sources: Sequence[Tensor], *given: Any
) -> list[AttentionMask | None] | None:
    """As _masks. A hint of None: as in torch.nn it is found out whether the mask is causal."""
    if not layers or any([type(layer) is not kind for layer in layers]):
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


class Transformer(_Parent, nn.Transformer):
    """torch.nn.Transformer made of the classes above. src_mask, tgt_mask and memory_mask may be AttentionMasks."""


REPLACEMENTS: dict[type[nn.Module], type[Accelerated]] = {
    kind.original: kind
    for kind in (
        MultiheadAttention,
        TransformerEncoderLayer,
        TransformerDecoderLayer,
        TransformerEncoder,
        TransformerDecoder,
    )
}


def accelerate_children(module: nn.Module) -> None:
    """Make torch.nn's modules inside this one those of this file."""
    for child in module.modules():
        if child is not module and type(child) in REPLACEMENTS:
            child.__class__ = REPLACEMENTS[type(child)]
