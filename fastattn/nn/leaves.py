"""nn.Dropout, faster on a CPU, what decides whether a call on a CPU has something to gain, and packed weights.

accelerate() changes the class of a model's own dropouts. On other devices, and where calls are exported or transformed,
they call PyTorch's. nn.Linear keeps its class: other tools, such as PyTorch's quantisation, look for it by name.

Generations on a CPU keep packed copies of weights for later ones. No edit of a weight is missed, in whatever way it was
made: through `.data`, numpy's memory, or another process. Versions and addresses do not show every edit, and sums of
the elements do not either. So next to each packed copy a plain one is kept, and every generation compares all bits of
the weight with it. That takes about a quarter of the time of packing: on an Intel Xeon, 2048 x 512 in float32, 0.9 ms
in place of 3.4. What this package keeps of a model is a table in docs/how_it_works.md.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastattn._tracing import can_read_values
from fastattn.backends import cpu_matmul, load_backend, request_of_all_ops
from fastattn.backends.reference.philox import draw_rng_state
from fastattn.ops import _autocast

_NOTHING = nullcontext()


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, by the product that is fastest."""
    if torch.compiler.is_compiling():
        return cpu_matmul.linear_in_graph(x, weight, bias)
    if can_read_values(x) and _autocast.autocast_dtype(x.device) is None:
        return cpu_matmul.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class FastestProducts(TorchFunctionMode):
    """Within it the modules of other libraries have the products that are the fastest."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (product if func is F.linear else func)(*args, **(kwargs or {}))


def fastest_products(x: Tensor) -> AbstractContextManager[Any]:
    """FastestProducts where products with x (.., d_model) may be faster than PyTorch's, which takes a question for each
    operator in it."""
    may_gain = x.is_cpu and x.dtype is torch.float32 and not x.is_nested
    if may_gain and not torch.compiler.is_compiling():
        may_gain = not torch._C._is_tracing() and x.numel() * x.shape[-1] >= cpu_matmul.MIN_WORK  # as jit.is_tracing()
        may_gain = may_gain and not torch.is_autocast_enabled("cpu")
    return FastestProducts() if may_gain and cpu_matmul.choice() == "oneDNN" else _NOTHING


def is_whole(x: Tensor) -> bool:
    """Whether layers of other libraries compute this input whole: on a GPU, where a backend is requested, and in
    training of more than MAX_TOKENS tokens under torch.autocast.

    Else they call their modules on a CPU, of which attention and dropout are fastattn's. Measured on one core of an
    Intel Xeon, torch 2.13, width 256, Marian, BERT and BART, 2 x 32 to 4 x 128 tokens, the time of whole layers by that
    of modules: training 1.00 in float32 (0.94 to 1.07) and 0.97 under torch.autocast (0.94 to 1.03), a forward 1.02
    (0.98 to 1.07); layers of torch.nn 1.01 (0.97 to 1.10) and 1.02 (0.94 to 1.11).
    """
    pays = torch.is_grad_enabled() and torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
    pays = pays and x.numel() > MAX_TOKENS * x.shape[-1]
    return not x.is_cpu or pays or request_of_all_ops() != (None, "")


MAX_SCORES = 1 << 15  # of small attention in inference: queries times keys of a batch, for each head
MAX_TOKENS = 128  # of a small call while gradients are recorded


def is_small(device: Any, batch: int, queries: int, keys: int) -> bool:
    """Whether attention of this size has nothing to gain where no backend is requested: of one query in inference, and
    of few tokens on a CPU. So has a call that torch.jit.trace records.

    While gradients are recorded, choices cost as much as dropout gains. Measured as PyTorch's time by ours, a step of
    Marian and BERT with dropout 0.1 on an AMD EPYC, 2 threads: 32 tokens of width 128 0.84 and 0.90, of width 256 0.93
    and 0.91; 128 tokens of width 256 0.96 and 1.02; 256 tokens 1.02 and 1.06.
    """
    if torch.jit.is_tracing():  # sizes are tensors then, and its graphs hold no autograd.Function
        return True
    if not no_backend_requested():
        return False
    if queries == 1:
        return not torch.is_grad_enabled()
    if torch.device(device).type != "cpu" or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled():
        return batch * max(queries, keys) <= MAX_TOKENS
    return batch * queries * keys <= MAX_SCORES


def no_backend_requested() -> bool:
    return request_of_all_ops() == (None, "")


MIN_DROPPED = 10_000  # elements; PyTorch drops fewer in less time, 8192 with their gradient in 84 us against 97


class Dropout(nn.Dropout):
    """With the random numbers of the backend aten, about 10x faster. Seeds come from torch's generator."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if not self.training or self.p == 0 or self.inplace or not input.dim() or not drops_faster(input):
            return F.dropout(input, self.p, self.training, self.inplace)
        if not torch.compiler.is_compiling() and input.numel() < MIN_DROPPED and no_backend_requested():
            return F.dropout(input, self.p)
        return dropout_add(input, None, self.p)


def drops_faster(x: Tensor) -> bool:
    """Whether dropout_add is faster than PyTorch's dropout: on a CPU, under torch.compile too."""
    return can_read_values(x) or (torch.compiler.is_compiling() and x.is_cpu and not torch.compiler.is_exporting())


def dropout_add(x: Tensor, residual: Tensor | None, dropout_p: float) -> Tensor:
    """[residual +] dropout(x) where drops_faster(x)."""
    rng_state = draw_rng_state(x.device, "aten")
    return load_backend("add_layer_norm", "aten").dropout_add(x, residual, dropout_p, rng_state)


# Of a module, for each of its products: the kind of packing, plain copies of the weights, and what was made of these.
_Packed = tuple[Hashable, list[Tensor], Tensor]
_kept: WeakKeyDictionary[nn.Module, dict[str, _Packed]] = WeakKeyDictionary()


def keep(
    module: nn.Module, name: str, kind: Hashable, weights: Sequence[Tensor], make: Callable[..., Tensor]
) -> Tensor:
    """make(*weights), or what an earlier call made for this name and kind of weights that were equal in every bit."""
    of_module = _kept.setdefault(module, {})
    if (found := of_module.get(name)) is not None and found[0] == kind:
        if len(found[1]) == len(weights) and all(map(_is_equal, found[1], weights)):
            return found[2]
    copies = [t.detach().clone(memory_format=torch.contiguous_format) for t in weights]
    made = make(*copies)  # what another thread edits meanwhile is in neither
    of_module[name] = kind, copies, made
    return made


def drop_kept(module: nn.Module | None = None) -> None:
    """Free what is kept of a module, or of all modules."""
    if module is None:
        _kept.clear()
    else:
        _kept.pop(module, None)


def _is_equal(copy: Tensor, weight: Tensor) -> bool:
    """Whether the bits are equal: NaN is equal to itself, and 0 is not equal to -0."""
    if copy.shape != weight.shape or copy.dtype is not weight.dtype:
        return False
    flat = weight.detach().reshape(-1)
    # Comparing 8 bytes at a time is the fastest. PyTorch can read them at multiples of 8 in a storage.
    is_aligned = all([n * weight.itemsize % 8 == 0 for n in (flat.storage_offset(), len(flat))])
    bits = torch.int64 if is_aligned else torch.uint8
    return torch.equal(flat.view(bits), copy.view(-1).view(bits))
