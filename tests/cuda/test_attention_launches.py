"""What attention asks of a device, noted by csrc/host in place of running it: launches, memory, and no answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attention_checks import Problem, make
from mask_cases import KINDS, mask_kinds, prefix
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastattn.cuda
from fastattn import AttentionMask
from fastattn.cuda import _visibility
from fastattn.cuda import attention as backend

FLOAT32, BFLOAT16, FLOAT16 = DTYPES = torch.float32, torch.bfloat16, torch.float16


class Launch(NamedTuple):
    kernel: str
    blocks: int
    threads: int
    shared: int  # bytes of a block


Noted = Callable[[str, Callable[[], Any]], list[Launch]]


@pytest.fixture
def noted(host_extension: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """noted(capability, act): the launches of act() on such a device; what they would compute is not there."""
    fastattn.cuda.load_host_runner(host_extension)
    file = tmp_path / "launches"
    monkeypatch.setenv("FASTATTN_HOST_LAUNCHES", str(file))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)

    def run(capability: str, act: Callable[[], Any]) -> list[Launch]:
        monkeypatch.setenv("FASTATTN_HOST_CAPABILITY", capability)
        file.write_text("")
        act()
        lines = [line.split() for line in file.read_text().splitlines()]
        return [Launch(kernel, *map(int, numbers)) for kernel, *numbers in lines]

    yield run
    fastattn.cuda.load_host_runner(None)


class Watch(TorchDispatchMode):
    """The sizes of tensors made under it. To read one on the host, which would wait for the device, is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"), name
        result = func(*args, **(kwargs or {}))
        self.made += [(t.numel(), t.dtype) for t in tree_leaves(result) if isinstance(t, Tensor)]
        return result


class Calls:
    """Forward and backward of a problem, one at a time."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.mask = AttentionMask(**p.mask, bias=p.bias)
        rng_state = torch.zeros(2, dtype=torch.int64) if p.dropout_p > 0 else None
        self.rest = (self.mask, p.scale, p.dropout_p, rng_state)
        self.out, self.lse = torch.zeros_like(p.dout), torch.zeros(p.q.shape[:3])

    def forward(self) -> None:
        backend.attention_fwd(self.p.q, self.p.k, self.p.v, *self.rest)

    def backward(self) -> None:
        p = self.p
        backend.attention_bwd(p.dout, p.dlse, p.q, p.k, p.v, self.out, self.lse, *self.rest, p.bias is not None)

    def weights(self) -> None:
        for wanted in ((range(self.p.q.shape[1]),), "mean", "argmax"):
            backend.attention_weights(self.p.q, self.p.k, self.lse, *self.rest, wanted)


SHORT = [(dtype, D) for dtype in (BFLOAT16, FLOAT16) for D in (40, 64, 128)] + [(FLOAT32, 64)]


@pytest.mark.parametrize("capability", ["80", "90"])
@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"is_causal": True, "key_padding": prefix([90, 40, 0], 90)}])
def test_short_sequences_take_one_launch_each_way(mask: dict[str, Any], capability: str, noted: Noted) -> None:
    """A block for each (batch, head), but for Hopper's forward, whose blocks take one after the other. Nothing is as
    large as the scores, of which padding has no bits either; of dq there is no copy in float32."""
    for (dtype, D), Lq in itertools.product(SHORT, (128, 60)):
        calls = Calls(make(B=3, H=2, Lq=Lq, Lk=90, D=D, dtype=dtype, mask=mask, dropout_p=0.1))
        prepared = len(noted(capability, calls.forward)) - 1
        assert prepared == ("key_padding" in mask), "which keys are seen, once a mask"
        with Watch() as forward:
            (launch,) = noted(capability, calls.forward)
        hopper = capability == "90" and dtype != FLOAT32
        assert launch.blocks == (2 if hopper else 6)
        with Watch() as backward:
            (launch,) = noted(capability, calls.backward)
        assert launch.blocks == 6
        results = [(3 * 2 * n * D, dtype) for n in (Lq, Lq, 90, 90)]  # out, dq, dk, dv
        others = [size for size in forward.made + backward.made if size not in results]
        assert max(numel for numel, _ in others) <= 3 * 2 * Lq


@pytest.mark.parametrize("capability", ["80", "86", "90"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_of_short_sequences_is_one_launch(dtype: torch.dtype, capability: str, noted: Noted) -> None:
    """Whatever the heads, their dimension, the bias; of one that batches or heads share, the gradient is a second."""
    shapes = {None: 1, (3, 4, 128, 90): 1, (1, 1, 1, 90): 1, (3, 4, 1, 90): 1, (1, 1, 128, 1): 1, (1, 4, 128, 90): 2}
    for D, Hk, (bias, count) in itertools.product((64, 128, 256), (1, 4), shapes.items()):
        p = make(B=3, H=4, Hk=Hk, Lq=128, Lk=90, D=D, dtype=dtype, mask="causal", bias=bias, dropout_p=0.1)
        calls = Calls(p)
        noted(capability, calls.backward)  # prepares the mask, but for a bias, which may hide other keys at every call
        launches = noted(capability, calls.backward)[bias is not None :]
        assert len(launches) == count and launches[0].blocks == 3 * Hk, (D, Hk, bias)


@pytest.mark.parametrize("capability, most", [("80", 2), ("86", 4), ("90", 1)])
def test_short_forward_of_any_head_dim(capability: str, most: int, noted: Noted) -> None:
    """Of float32 beyond head dimension 128, `most` blocks share a head, as shared memory wants. Only the keys that are
    seen are prepared, once a mask."""
    mask = {"is_causal": True, "key_padding": prefix([90, 40, 0], 128)}
    for dtype, D in itertools.product(DTYPES, (40, 96, 136, 256)):
        calls = Calls(make(B=3, H=2, Lq=128, Lk=128, D=D, dtype=dtype, mask=mask))
        assert len(noted(capability, calls.forward)) == 2
        (launch,) = noted(capability, calls.forward)
        if capability == "90" and dtype != FLOAT32:
            assert launch.blocks == 2
        else:
            blocks = most if dtype == FLOAT32 and D > 128 else 1
            assert (launch.blocks, launch.threads) == (6 * blocks, 256 // blocks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_99_kib_of_shared_memory(dtype: torch.dtype, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what sm_86, sm_89 and sm_120 have: every kernel fits, or another one serves."""
    largest, options = 0, dict(B=1, H=2, mask="decoder", dropout_p=0.1, dtype=dtype)
    for tf32, D, L in itertools.product((False, True)[: 1 + (dtype == FLOAT32)], (64, 128, 256), (64, 128, 200)):
        monkeypatch.setattr(backend, "_tf32", lambda tf32=tf32: tf32)
        for bias in (None, (1, 2, L, L), (1, 1, L, L), (1, 2, 1, L)):
            calls = Calls(make(Lq=L, Lk=L, D=D, bias=bias, **options))
            for call in (calls.forward, calls.backward, calls.weights):
                largest = max(largest, *(launch.shared for launch in noted("86", call)))
    assert 48 << 10 < largest <= 99 << 10


@pytest.mark.parametrize("capability", ["80", "90"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_host_asks_for_no_answer(kind: str, capability: str, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are prepared, and kernels launched, without a look at a value on the device. Nothing but an attn_mask takes
    bits of the size of the scores."""
    if "attn_mask" not in mask_kinds(1, 1, 4, 4)[kind] or kind in ("attn_mask_keys", "attn_mask_expanded", "nothing"):
        monkeypatch.setattr(_visibility, "_build_bits", None)
    for L in (40, 200):
        calls = Calls(make(Lq=L, Lk=L + 50, D=16, mask=kind, bias=(1, 2, L, L + 50), dtype=BFLOAT16, dropout_p=0.1))
        for call in (calls.forward, calls.backward, calls.weights):
            with Watch():
                noted(capability, call)
