"""A training step by the kernels needs at most a third of the launches of the plain formula.

A launch is an operator that writes memory, as PyTorch dispatches it below autograd, or a Triton kernel. Views,
allocations and reads of a number by the host are none.
"""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from model_checks import DEVICE, NO_DROPOUT, PAD_SRC, PAD_TRG, fused, gold_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fastattn import AttentionMask, use_backend

pytest.importorskip("triton")

from fastattn.kernels.common.launch import Launch

# Operators that start no kernel, beyond views. aminmax is the check of token values, which the public ops make on a CPU
# only; fill_ is the tests' own, into uninitialised memory.
SILENT = {"_unsafe_view", "aminmax", "fill_", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Launches(TorchDispatchMode):
    """Counts by name, within its context, PyTorch's operators and Triton's kernels, compiled or interpreted."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.embedding_dense_backward.default:  # on a GPU it would write out of bounds
            assert 0 <= args[1].min() and args[1].max() < args[2], "an index out of range"
        out = func(*args, **(kwargs or {}))
        name, returns = func.overloadpacket.__name__, func._schema.returns
        is_view = func.is_view or (
            bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        )
        if not is_view and name not in SILENT and any(isinstance(t, Tensor) for t in tree_leaves(out)):
            self.counts[name] += 1
        return out

    @contextmanager
    def triton(self, run_them=True):
        """run_them: whether Triton's kernels run, or are counted only. Then integers that they would write are 0:
        PyTorch's operators may use them as indices."""
        run = Launch.run

        def counting_run(launch, *args):
            self.counts[f"triton {launch.kernel.__name__}"] += 1
            if run_them:
                with _disable_current_modes():  # the interpreter itself uses PyTorch's operators
                    run(launch, *args)
                return
            _, _, _, tensors, *_ = args
            with _disable_current_modes():
                for t in tensors:
                    if t is not None and t.dtype in (torch.int32, torch.int64):
                        t.data.masked_fill_(t == torch.iinfo(t.dtype).max, 0)  # see poisoned_memory

        with patch.object(Launch, "run", counting_run):
            yield


def step_launches(batch, backend):
    """Counts of one forward, loss and backward from gradients that are None, as after zero_grad()."""
    src, trg = (seq[:2, :6].contiguous() for seq in batch)  # counts depend only on layers and options
    model, launches = fused(pack_padding=False, **NO_DROPOUT), Launches()
    gold = gold_of(trg)
    with use_backend(backend), launches.triton(), launches:
        model.loss(src, trg, gold, 0.1).backward()
    return launches.counts


def test_a_third_of_the_launches_of_the_reference(triton, batch):
    reference, kernels = (step_launches(batch, backend) for backend in ("reference", "triton"))
    assert kernels.total() <= reference.total() / 3, kernels
    copies = sum(kernels[name] for name in ("clone", "copy_", "_to_copy"))
    assert copies <= 4, "beyond the bits of the two masks, something is copied or transposed in memory"


def mask_launches(source_length, target_length):
    """The launches for the masks in a step of 2 + 2 layers and 8 padded sentence pairs of these maximal lengths. More
    layers or wider ones need no more."""
    model, launches, of_masks = fused(n_layers=2, n_position=200, backend="triton"), Launches(), Counter()
    real = torch.arange(source_length, device=DEVICE) < source_length - 5 * torch.arange(8, device=DEVICE)[:, None]
    src = torch.where(real, 5, PAD_SRC)
    trg = torch.where(real.new_ones(8, target_length).tril(target_length - 4), 5, PAD_TRG)

    def counted(function):
        def wrapped(*args):
            before = launches.counts.copy()
            result = function(*args)
            of_masks.update(launches.counts - before)
            return result

        return wrapped

    model.src_mask, model.trg_mask = counted(model.src_mask), counted(model.trg_mask)
    with (
        patch.object(AttentionMask, "prepare_all", counted(AttentionMask.prepare_all)),
        launches.triton(run_them=False),
        launches,
    ):
        model.loss(src, trg, trg, 0.1).backward()
    return of_masks


def test_a_mask_takes_one_launch_for_each_layout(triton):
    """With lists of tiles and without: 3 pairs of a mask and lengths, each in at most 3 layouts."""
    for lengths in ((64, 64), (200, 200), (200, 130)):
        found = mask_launches(*lengths)
        kernels = found.pop("triton prepare_mask_kernel")
        assert found == {"ne": 2}, f"{lengths}: compare tokens with padding, twice"
        assert kernels <= 9, lengths


def test_the_launcher_is_stored_last():
    """Launch.run asks for it alone, perhaps in another thread."""
    stored = []

    class Recorded(Launch):
        def __setattr__(self, name, value):
            stored.append(name)
            super().__setattr__(name, value)

    kernel = MagicMock(pre_run_hooks=[], arg_names=[])
    launch = Recorded(SimpleNamespace(kernel=kernel, kinds=()), None, {})
    stored.clear()
    launch._run_by_triton((1, 1), (), ())
    assert len(stored) == 4 and stored[-1] == "launcher"
