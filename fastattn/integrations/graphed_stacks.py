"""The stacks of accelerated models as graphed calls: while gradients are recorded, forward and backward are CUDA graphs.

A stack is an encoder or a decoder: the nearest transformers model around layers that accelerate knows, or one of
torch.nn. What is around it stays as it is. A call that graphs might not repeat runs without them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.graphs.graphed_call import Padding, graphs_of
from fastattn.integrations import torch_nn
from fastattn.integrations.layers import Accelerated

_KNOWN = ("fastattn.", "torch.nn.modules.", "torch.nn.utils.", "transformers.")
_CACHES = ("cache", "past_key_values")  # the argument since transformers 5.24, and before
# The tensors with which a call may be padded, with 0 or, of tokens, the stack's padding.
_PADDED = ("input_ids", "attention_mask", "token_type_ids", "encoder_hidden_states", "encoder_attention_mask")
# Stacks that make another mask than one of ones where none is given, or none at all.
_OWN_MASK = ("Llama", "T5Gemma")


class GraphedStack(Accelerated):
    """The mixin of a stack. accelerated_class makes one for each class."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        original = cls.original.forward
        names = tuple(inspect.signature(original).parameters)[1:]

        @functools.wraps(original)  # generate reads its signature
        def forward(self: Any, *args: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return original(self, *args, **options)
            given = dict(zip(names, args, strict=False)) | options
            refusal, padding = None, None
            if isinstance(self, tuple(torch_nn.REPLACEMENTS.values())):  # without a hint it reads the mask's values
                given |= {name: False for name in names if name.endswith("is_causal") and given.get(name) is None}
            else:
                refusal, padding = _prepare(self, names, given), functools.partial(_padding, self, given)
            return graphs_of(self, _KNOWN)(self, _call, (), given, padding, refusal)

        cls.forward = forward  # type: ignore[method-assign]


def _call(stack: Any, **given: Any) -> Any:
    return type(stack).original.forward(stack, **given)


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The stacks of an accelerated model, by their paths."""
    found: dict[str, nn.Module] = {}
    known: set[str] = set()
    if "transformers" in sys.modules:
        from fastattn.integrations.huggingface_layers import MLPS, ROWS

        known = {*ROWS, *MLPS}
    nearest: dict[str, tuple[str, nn.Module] | None] = {"": None}
    for path, module in model.named_modules():
        kind, at = type(module), nearest[path.rpartition(".")[0]]
        nearest[path] = at = (path, module) if hasattr(module, "_can_set_attn_implementation") else at
        if isinstance(module, torch_nn.TransformerEncoder | torch_nn.TransformerDecoder):
            found[path] = module
        elif at and isinstance(module, Accelerated) and f"{kind.__module__}.{kind.__qualname__}" in known:
            found[at[0]] = at[1]
    return found


def _prepare(stack: Any, names: Sequence[str], given: dict[str, Any]) -> str | None:
    """Change the arguments of a transformers stack to those that a graph repeats. Returns why none can, or None."""
    config = stack.config
    given.pop("num_items_in_batch", None)  # the Trainer's, which only losses read
    options = [name for name, value in given.items() if name.startswith("output_") and value]
    options += [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name, False)]
    if options:
        return options[0]
    if any([vars(module).get("gradient_checkpointing") for module in stack.modules()]):
        return "gradient checkpointing"
    if type(stack).__name__ == "T5Gemma2Decoder":
        return "it selects tokens by their values"
    if given.get("position_ids") is not None and given.get("attention_mask") is None:
        return "position_ids without attention_mask may be those of packed sequences"
    for cache in _CACHES:
        if cache not in names:
            continue
        if given.get(cache) is not None:
            return "a cache is given"
        use_cache = given.get("use_cache")
        if getattr(config, "use_cache", False) if use_cache is None else use_cache:
            if not stack.training:
                return "it returns a cache: outside of training give use_cache=False"
            if not config.return_dict:
                return "it returns a tuple with a cache: give use_cache=False"
        given["use_cache"] = False
    ids = given.get("input_ids")
    if given.get("attention_mask") is None and isinstance(ids, Tensor) and ids.dim() == 2:
        if "attention_mask" in names and not type(stack).__name__.startswith(_OWN_MASK):
            given["attention_mask"] = torch.ones_like(ids)  # equal results, and it can be padded
    return None


def _padding(stack: Any, given: dict[str, Any], tensors: Sequence[Tensor]) -> Padding | None:
    """To lengths that are multiples of 8, of a call whose results this leaves as they are."""
    named = {name: t for name, t in given.items() if isinstance(t, Tensor)}
    ids, mask, memory_mask = [named.get(name) for name in ("input_ids", "attention_mask", "encoder_attention_mask")]
    if ids is None or mask is None or len(named) != len(tensors) or not named.keys() <= set(_PADDED):
        return None
    embedding, config = stack.get_input_embeddings(), stack.config
    pad = getattr(embedding, "padding_idx", None)
    pad = (config.pad_token_id or 0) if pad is None else pad
    sizes = config.__dict__
    longest = sizes.get("max_target_positions", sizes.get("max_position_embeddings"))
    length = _rounded(ids.shape[1])
    if not 0 <= pad < getattr(embedding, "num_embeddings", 0) or (longest is not None and length > longest):
        return None
    shapes = []
    for name, t in named.items():
        is_memory, dims = name.startswith("encoder_"), 3 if name == "encoder_hidden_states" else 2
        like = ids if not is_memory else t if memory_mask is None else memory_mask
        if t.dim() != dims or t.shape[:2] != like.shape[:2]:
            return None
        keeps = is_memory and memory_mask is None  # without a mask all of it is read
        shapes.append((len(t), t.shape[1] if keeps else _rounded(t.shape[1]), *t.shape[2:]))
    fills = [pad if name == "input_ids" else 0 for name in named]
    return Padding(shapes, fills, [tuple(ids.shape)])


def _rounded(n: int) -> int:
    return -(-n // 8) * 8
