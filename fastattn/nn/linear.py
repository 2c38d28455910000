"""Linear maps, by the product that is fastest: one map, several of one input, and maps that a loop applies many times.

Several of one input, as one product. The query, key and value projections of self-attention read the same input. The
key and value projections of all decoder layers read the encoder's output. In training their weights are concatenated at
every call, and one product replaces three, or two a layer. The parameters stay separate tensors.
Cost: a copy of the weights at every call (3 MB a layer at d_model 512 in float32), kept for the backward; under
torch.autocast it is the copy in 16 bits that PyTorch would make of each weight. So it is done where it pays, see
`joins`; over weights that are stored side by side one product takes as long (11.9 and 11.8 ms at d_model 512). Without
gradients the products are separate: 5 tokens take 0.15 ms at d_model 512, with the copy 0.42.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn._tracing import is_transformed
from fastattn.backends import Backend, cpu_matmul, likely_backend
from fastattn.nn.fusible import can_fuse
from fastattn.nn.leaves import keep, product
from fastattn.ops import _autocast

MAX_JOINED = 1 << 14  # elements of a weight that is small, see `joins`


def linear(module: nn.Module, x: Tensor, backend: Backend | None, fusible: bool | None = None) -> Tensor:
    """module(x), by the product that is fastest on this processor where the module is a plain nn.Linear.

    backend: as of the ops. fusible: the result of can_fuse, if it is known.
    """
    if (can_fuse(module) if fusible is None else fusible) and likely_backend("linear", x.device, backend) == "aten":
        return product(x, module.weight, module.bias)
    return module(x)


def joint_linear(
    x: Tensor, modules: Sequence[nn.Linear], backend: Backend | None, fusible: bool | None = None
) -> tuple[Tensor, ...]:
    """The outputs (.., rows) of linear maps for one input x (.., d).

    In training they are views of one product where that costs nothing, see ``joins``. The maps are called one by one
    where no gradient is recorded, under the backend "reference", under torch.compile, in transforms of torch.func, and
    where a map has hooks, is of another class, or differs from the others in dtype or device.
    backend, fusible: as in ``linear``, of all maps.
    """
    if fusible is None:
        fusible = all(map(can_fuse, modules))
    likely = likely_backend("linear", x.device, backend)
    is_joint = fusible and torch.is_grad_enabled() and likely != "reference"
    if is_joint and not torch.compiler.is_compiling() and not is_transformed():
        weights, biases = [  # faster than getattr alone, if it is a parameter
            tuple([m._parameters[name] if name in m._parameters else getattr(m, name) for m in modules])
            for name in ("weight", "bias")
        ]
        if len({(weight.dtype, weight.device) for weight in weights}) == 1:
            dtype = _autocast.dtype_under_autocast(weights[0])
            if likely != "aten" or joins(weights[0], dtype):
                weight, bias = joined((weights, without_gaps(weights, biases)), dtype)
                out = cpu_matmul.linear(x, weight, bias)
                return out.split_with_sizes([weight.shape[0] for weight in weights], -1)
    return tuple(linear(module, x, backend, fusible or None) for module in modules)


Group = tuple[Tensor | None, ...]


def without_gaps(weights: Sequence[Tensor], biases: Group) -> Group:
    """biases of linear maps that are one product: all of them, or (None,). Where only some maps have one, the others
    get zeros, whose gradient is not used."""
    missing = sum([b is None for b in biases])  # count(None) would compare the tensors
    if missing in (0, len(biases)):
        return (None,) if missing else biases
    pairs = zip(weights, biases, strict=True)
    return tuple([w.new_zeros(w.shape[0]).requires_grad_(w.requires_grad) if b is None else b for w, b in pairs])


def joins(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether weights like this one, of products in this dtype, are worth concatenating.

    On a GPU one launch in place of three is. On a CPU only where they are small, or cast, and so copied, anyway: the
    copy is kept for the backward, and takes the time that one large product saves. Measured on one core of an AMD EPYC,
    three maps in float32, forward and backward: of width 256 one product of 32, 512 and 1024 rows takes 0.78, 7.4 and
    13.4 ms, three 0.74, 7.9 and 14.9, and attention that reads views of one 0.1, 0.2 and 0.6 ms more; of width 64 and
    16 rows 104 us, three 124; of width 128 and 32 rows 211 and 230.
    """
    return weight.dtype is not dtype or not weight.is_cpu or weight.numel() <= MAX_JOINED


def wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype, added: Tensor | None = None) -> Tensor:
    """a b [+ added] in this dtype, that of added, which may be overwritten. Without autograd.

    On a GPU the sums of a float32 result are written as they are: nothing is rounded to the 16 bits of a and b, and no
    operator casts or adds what the product wrote.
    """
    if dtype is a.dtype:
        return torch.mm(a, b) if added is None else torch.addmm(added, a, b)
    if a.is_cuda and dtype is torch.float32:
        if added is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(added, a, b, out_dtype=dtype, out=added)
    made = torch.mm(a, b)
    return made.to(dtype) if added is None else added.add_(made)


def joined(groups: Sequence[Group], dtype: torch.dtype) -> list[Tensor | None]:
    """For each group of tensors these concatenated in dimension 0, in a dtype; None for a group of None alone.

    Casts of all groups are one operator, which concatenates too. A group of one tensor in this dtype is the tensor.
    """
    if torch.is_grad_enabled() and any(t is not None and t.dtype != dtype for (t, *_) in groups):
        made = iter(_Joined.apply(dtype, [len(group) for group in groups], *(t for group in groups for t in group)))
        return [None if group[0] is None else next(made) for group in groups]
    return _joined(groups, dtype)


def _joined(groups: Sequence[Group], dtype: torch.dtype) -> list[Tensor | None]:
    results: list[Tensor | None] = []
    sources: list[Tensor] = []
    copies: list[Tensor] = []
    for group in groups:
        first = group[0]
        if first is None or (first.dtype == dtype and len(group) == 1):
            results.append(first)
        elif first.dtype == dtype:
            results.append(torch.cat(group))
        else:
            rows = [t.shape[0] for t in group]
            results.append(first.new_empty(sum(rows), *first.shape[1:], dtype=dtype))
            sources += group
            copies += results[-1].split(rows) if len(rows) > 1 else results[-1:]
    if sources:
        torch._foreach_copy_(copies, sources)
    return results


class _Joined(torch.autograd.Function):
    """`joined` where tensors are cast. lengths: of the groups of these tensors."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, lengths: list[int], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        groups = [tuple(next(rest) for _ in range(length)) for length in lengths]
        ctx.groups = [[(t.shape[0], t.dtype) for t in group if t is not None] for group in groups]
        ctx.lengths = lengths
        return tuple(t for t in _joined(groups, dtype) if t is not None)

    @staticmethod
    def backward(ctx: Any, *djoints: Tensor) -> tuple[Tensor | None, ...]:
        grads, djoints = [], iter(djoints)
        for length, group in zip(ctx.lengths, ctx.groups, strict=True):
            if not group:
                grads += [None] * length
                continue
            grads += next(djoints).to(group[0][1]).split([rows for rows, _ in group])
        return None, None, *grads


class Product:
    """x weight^T + bias + residual, for many x with as many rows. The weight (n, k) is cast and packed once.

    On a CPU it is prepacked for oneDNN, or read in blocks, see cpu_matmul.packing. Under torch.autocast it is cast:
    PyTorch keeps casts of trainable weights only, until its context ends, and the feed-forward op would cast at every
    step. What is packed is kept for the next generation, see leaves.py. Memory: the weight once more, where it is
    packed, cast or made of several.
    """

    def __init__(
        self,
        owner: nn.Module,
        name: str,
        parts: Sequence[Tensor],
        bias: Tensor | Group | None,
        rows: int,
        dtype: torch.dtype,
        packs: bool = True,
        join: Callable[..., Tensor] = lambda *parts: parts[0] if len(parts) == 1 else torch.cat(parts),
    ) -> None:
        """parts: of which `join` makes the weight.     bias: one, or those of the parts.

        owner, name: for which a packed weight is kept.
        """
        biases = without_gaps(parts, bias) if isinstance(bias, tuple) else (bias,)
        self.parts, self.biases, self.join, self.dtype = parts, None if biases[0] is None else biases, join, dtype
        self.bias = self._joined(self.biases)
        sizes = sum([len(part) for part in parts]), parts[0].shape[1]
        kind = cpu_matmul.packing(rows, parts[0].new_empty(()).expand(sizes), dtype) if packs else None
        self.is_prepacked = kind == "prepacked"
        if self.is_prepacked:
            pack = cpu_matmul.prepack
            self.weight = keep(owner, name, (kind, dtype), parts, lambda *copies: pack(join(*copies).to(dtype)))
        else:
            self.weight = self._joined(parts)
        self.by_blocks = kind == "blocks" and self.weight.is_contiguous()
        self.of_rows, self.added = self._functions()

    def _functions(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """`self(x)` and `self(x, residual)` of contiguous matrices in the product's dtype, without questions."""
        weight, bias = self.weight, self.bias
        if self.is_prepacked:
            by_onednn = cpu_matmul.prepacked_product
            return (lambda x: by_onednn(x, weight, bias)), (lambda x, residual: by_onednn(x, weight, bias, residual))
        plain, plus = cpu_matmul.block_products(weight) if self.by_blocks else cpu_matmul.products(weight)
        if bias is None:
            return plain, plus
        # In 16 bits the sum with the residual, which is the largest, is rounded once.
        return (lambda x: plus(x, bias)), (lambda x, residual: plus(x, bias).add_(residual))

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x (.., k), with a residual (rows, k). The result has the dtype of residual."""
        if x.dtype is not self.dtype:
            x = x.to(self.dtype)
        if residual is not None:
            return self.added(x, residual) if residual.dtype is self.dtype else residual + self(x)
        if self.by_blocks and x.numel() == x.shape[-1]:
            return self.of_rows(x.contiguous()).view(*x.shape[:-1], -1)
        return self.of_rows(x) if self.is_prepacked else F.linear(x, self.weight, self.bias)

    def refresh(self) -> None:
        """Copy a cast or joined weight again, which may have changed, to where the copy is: a CUDA graph reads it
        there."""
        for copy, sources in ((self.weight, self.parts), (self.bias, self.biases)):
            if copy is not None and copy is not sources[0]:
                copy.copy_(self.join(*sources))

    def _joined(self, tensors: Any) -> Any:
        return None if tensors is None else self.join(*tensors).to(self.dtype)


class Products:
    """The linear maps of a loop such as decoding, each prepared at its first call.

    The maps, their devices and torch.autocast must not change while it is in use.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[nn.Module, str], Any] = {}  # a Product, or the module if it is modified

    def __call__(self, module: nn.Module, x: Tensor, backend: Backend | None) -> Tensor:
        """module(x), x (.., in_features)."""
        if (found := self._made.get((module, ""))) is None:
            if can_fuse(module):
                found = self.product(module, "", module.weight, module.bias, x, backend)
            else:
                found = self._made[module, ""] = module
        return found(x)

    def product(
        self, owner: nn.Module, name: str, weight: Any, bias: Any, x: Tensor, backend: Backend | None
    ) -> Product:
        """Of a linear map of owner, for inputs such as x; of several, where weight and bias are tuples of theirs. Under
        the backend "reference" nothing is packed."""
        if (found := self._made.get((owner, name))) is None:
            packs = likely_backend("linear", x.device, backend) != "reference"
            rows, dtype = x.numel() // x.shape[-1], _autocast.dtype_under_autocast(x)
            parts = weight if isinstance(weight, tuple) else (weight,)
            found = self._made[owner, name] = Product(owner, name, parts, bias, rows, dtype, packs)
        return found

    def refresh(self) -> None:
        for made in self._made.values():
            if isinstance(made, Product):
                made.refresh()
