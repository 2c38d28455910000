"""A training step by the kernels asks the device for at most a third of the launches of the plain formula.

A launch is an operator that writes memory, as PyTorch dispatches it below autograd, or a Triton kernel. Views,
allocations and reads of a number by the host are none.
"""

from collections import Counter
from unittest.mock import patch

import torch
from model_checks import NO_DROPOUT, PAD_TRG, fused
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fastattn import use_backend

# Operators that start no kernel, beyond views. aminmax is the check of token values, which the public ops make on a CPU
# only; fill_ is the tests' own, into uninitialised memory.
SILENT = {"_unsafe_view", "aminmax", "fill_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Launches(TorchDispatchMode):
    """Counts by name, within its context, PyTorch's operators and Triton's kernels, compiled or interpreted."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name, returns = func.overloadpacket.__name__, func._schema.returns
        is_view = func.is_view or (
            bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        )
        if not is_view and name not in SILENT and any(isinstance(t, Tensor) for t in tree_leaves(out)):
            self.counts[name] += 1
        return out

    def triton(self, kind):
        run = kind.run

        def counting_run(kernel, *args, **kwargs):
            self.counts[f"triton {kernel.__name__}"] += 1
            with _disable_current_modes():  # the interpreter itself uses PyTorch's operators
                return run(kernel, *args, **kwargs)

        return patch.object(kind, "run", counting_run)


def step_launches(batch, backend):
    """Counts of one forward, loss and backward from gradients that are None, as after zero_grad()."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    src, trg = (seq[:2, :6].contiguous() for seq in batch)  # counts depend on layers and options alone
    model, launches = fused(pack_padding=False, **NO_DROPOUT), Launches()
    gold = torch.nn.functional.pad(trg[:, 1:], (0, 1), value=PAD_TRG)
    with use_backend(backend), launches.triton(InterpretedFunction), launches.triton(JITFunction), launches:
        model.loss(src, trg, gold, 0.1).backward()
    return launches.counts


def test_a_third_of_the_launches_of_the_reference(triton, batch):
    reference, kernels = (step_launches(batch, backend) for backend in ("reference", "triton"))
    assert kernels.total() <= reference.total() / 3, kernels
    copies = sum(kernels[name] for name in ("clone", "copy_", "_to_copy"))
    assert copies <= 4, "beyond the bits of the two masks, something is copied or transposed in memory"
