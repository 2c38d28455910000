"""Stacks of accelerated models as graphed calls: while gradients are recorded, forward and backward are CUDA graphs.

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

from fastattn.graphs.graphed_call import Padding, can_replay, graphs_of, round_up_length
from fastattn.integrations import torch_nn
from fastattn.integrations.layers import Accelerated

_KNOWN = ("fastattn.", "torch.nn.modules.", "torch.nn.utils.", "transformers.")
# Dimensions of the tensors that may be padded: token ids with the stack's padding, others with 0.
_PADDED = {"input_ids": 2, "attention_mask": 2, "token_type_ids": 2}
_PADDED |= {"encoder_hidden_states": 3, "encoder_attention_mask": 2}
_OWN_MASK = "T5Gemma"  # stacks for which no mask is not one of ones
# Stacks of sound, which index by their mask: on a GPU this waits, and copies a number from the host.
_INDEXED_BY_MASK = "Wav2Vec2", "Hubert", "Speech2TextEncoder"


class GraphedStack(Accelerated):
    """Mixin of a stack."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        original, parameters = cls.original.forward, inspect.signature(cls.original.forward).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]

        @functools.wraps(original)  # generate reads its signature
        def forward(self: Any, *args: Any, **options: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | options
            is_wrong = len(given) < len(args) + len(options)
            if is_wrong or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return original(self, *args, **options)
            refusal, padding = None, None
            if not can_replay(next(self.parameters()).device):
                pass  # eager, with the arguments as they are
            elif isinstance(self, nn.TransformerEncoder | nn.TransformerDecoder):  # without hints it reads the mask
                given |= {name: False for name in names if name.endswith("is_causal") and given.get(name) is None}
            else:
                refusal, padding = _prepare(self, names, given), functools.partial(_padding, self, given)
            return graphs_of(self, _KNOWN)(self, _call, (), given, padding, refusal)

        cls.forward = forward  # type: ignore[attr-defined]


def _call(stack: Any, **given: Any) -> Any:
    return type(stack).original.forward(stack, **given)


def stacks(model: nn.Module) -> dict[str, Any]:
    """The stacks of an accelerated model by their paths."""
    found: dict[str, Any] = {}
    around: dict[str, Any] = {"": (None, None)}  # the nearest transformers model, by the path of a module
    for path, module in model.named_modules():
        around[path] = at = (path, module) if hasattr(type(module), "config_class") else around[path.rpartition(".")[0]]
        if isinstance(module, torch_nn.Encoder | torch_nn.Decoder):
            found[path] = module
        elif getattr(type(module), "in_stack", False) and at[1] is not None:
            found[at[0]] = at[1]
    return found


def remove_graphs(stack: Any) -> None:
    graphs_of(stack).reset()
    stack.__class__ = type(stack).original


def _prepare(stack: Any, names: Sequence[str], given: dict[str, Any]) -> str | None:
    """Change the arguments of a transformers stack to those that a graph repeats. Or return why none can."""
    config, ids = stack.config, given.get("input_ids")
    given.pop("num_items_in_batch", None)  # the Trainer's, which the loss alone reads
    requested = [name for name, value in given.items() if name.startswith("output_") and value]
    requested += [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name, False)]
    if requested:
        return requested[0]
    if type(stack).__name__ == "T5Gemma2Decoder":
        return "it selects tokens by their values"
    if given.get("attention_mask") is not None and type(stack).__name__.startswith(_INDEXED_BY_MASK):
        return "it indexes by its attention_mask"
    if given.get("attention_mask") is None and given.get("position_ids") is not None:
        return "position_ids without attention_mask may be those of packed sequences"
    for cache in {"cache", "past_key_values"}.intersection(names):  # since transformers 5.24, and before
        if given.get(cache) is not None:
            return "a cache is given"
        use_cache, is_decoder = given.get("use_cache"), getattr(config, "is_decoder", False)
        use_cache = getattr(config, "use_cache", False) if use_cache is None else use_cache
        if use_cache and not stack.training and (is_decoder or not hasattr(stack, "encoder")):
            return "it returns a cache: outside of training give use_cache=False"  # a loop may decode by it
        given["use_cache"] = False
    if given.get("attention_mask") is None and isinstance(ids, Tensor) and ids.dim() == 2:
        if "attention_mask" in names and not type(stack).__name__.startswith(_OWN_MASK):
            # The results are equal, and it can be padded. Without one Llama looks for packed sequences. In a capture it
            # then makes their mask, without looking, and the warm-up has not loaded the kernels that read such a mask.
            given["attention_mask"] = torch.ones_like(ids)
    return None


def _padding(stack: Any, given: dict[str, Any], tensors: Sequence[Tensor]) -> Padding | None:
    """To rounded lengths, where this leaves the results as they are."""
    named = {name: t for name, t in given.items() if isinstance(t, Tensor)}
    ids, memory_mask = named.get("input_ids"), named.get("encoder_attention_mask")
    if ids is None or ids.dim() != 2 or "attention_mask" not in named or len(named) != len(tensors):
        return None
    embedding, sizes = stack.get_input_embeddings(), vars(stack.config)
    pad = getattr(embedding, "padding_idx", None)
    pad = (sizes.get("pad_token_id") or 0) if pad is None else pad
    longest = sizes.get("max_target_positions") or sizes.get("max_position_embeddings") or sys.maxsize
    if not 0 <= pad < getattr(embedding, "num_embeddings", 0) or round_up_length(ids.shape[1]) > longest:
        return None
    shapes = []
    for name, t in named.items():
        of_memory = name.startswith("encoder_")
        like = ids if not of_memory else t if memory_mask is None else memory_mask
        if t.dim() != _PADDED.get(name) or t.shape[:2] != like.shape[:2]:
            return None
        length = t.shape[1] if of_memory and memory_mask is None else round_up_length(t.shape[1])
        shapes.append((len(t), length, *t.shape[2:]))
    return Padding(shapes, [pad if name == "input_ids" else 0 for name in named], [tuple(ids.shape)])
