"""The rule that chooses a backend on a GPU, against what was measured on one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import has_kernel

from fastattn import AttentionMask
from fastattn.backends import OPS, automatic_order

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
GPU = torch.device("cuda", 0)
HOPPER, AMPERE = (9, 0), (8, 0)
MOST = 1.05  # times as long as the fastest backend that is right
EXCEPTIONS = {  # call -> why, and times as long
    # Triton has 1.0504 of aten's time. A layer that kernels alone compute takes less time of the host.
    "attention bfloat16 128 tokens": 1.051
}


def attention(shape: tuple[int, ...], words: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of the choice, without memory. shape: B, H, L, D."""
    q = torch.empty(shape, dtype=dtype, device="meta")
    (_, H, L, _), given = shape, {}
    if "causal" in words:
        given["is_causal"] = True
    if "mask" in words or "padding" in words:
        given["key_padding"] = torch.ones(1, L, dtype=torch.bool)
    if "blocks" in words:
        given["attn_mask"] = torch.ones(1, 1, L, L, dtype=torch.bool)
    if "dense bias" in words:
        given["bias"] = torch.zeros(1, H, 1, 1).expand(1, H, L, L)
    if "relative bias" in words:
        given["relative_bias"] = torch.zeros(1, 2 * L - 1)
    mask, softcap = AttentionMask(**given) if given else None, 30.0 if "softcap" in words else None
    return q, q, q, mask, 0.1 * ("dropout" in words), softcap, False, "lse" in words


def other(op: str, words: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """The same for another op, as far as the rule reads them. words: such as "16384 x 512, relu"."""
    return (torch.empty(*map(int, re.findall(r"\d+", words)[:2]), dtype=dtype, device="meta"),)


def measured() -> list[tuple[str, str, tuple[Any, ...], dict[str, float]]]:
    """(op, the call, its arguments, milliseconds by backend) of each row of the records, forward and backward."""
    found = []
    for row in json.loads((RESULTS / "h200_backends.json").read_text())["rows"]:
        op, words, dtype = row["op"], row["call"], getattr(torch, row["class"].split(",")[0])
        shape = (2, 8, int(words.split()[0]), 64)
        given = attention(shape, words, dtype) if op == "attention" else other(op, words, dtype)
        found.append((op, f"{op} {str(dtype)[6:]} {words}", given, row["ms"]))
    for name in ("h200_first_contact", "report_h200_rivals"):
        cases: dict[tuple[str, str], dict[str, float]] = {}
        for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"]:
            if row["op"] in OPS and row["provider"] in ("aten", "triton", "cuda") and "both" in row.get("timings", ()):
                ms = cases.setdefault((row["op"], row["case"]), {})
                ms[row["provider"]] = row["timings"]["both"]["median_ms"]
        for (op, words), ms in cases.items():
            if op == "attention":
                L, D = map(int, re.search(r"(\d+)x\d+ d(\d+)", words).groups())
                given = attention((2, 8, L, D), words, torch.bfloat16)
            else:
                given = other(op, words.replace("x", " x "), torch.bfloat16)
            found.append((op, f"{op} {words}, {name}", given, ms))
    return found


def capability(monkeypatch: pytest.MonkeyPatch, of_gpu: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: of_gpu)


def test_the_rule_and_the_records_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first backend is at most 5 % slower than the fastest one, among those that still have a kernel."""
    capability(monkeypatch, HOPPER)
    rows, slow, exceptions = measured(), [], dict(EXCEPTIONS)
    for op, call, given, ms in rows:
        ms = {backend: time for backend, time in ms.items() if has_kernel(op, backend)}
        first = automatic_order(op, GPU, given)[0]
        ratio = ms[first] / min(ms.values())
        if ratio > exceptions.pop(call, MOST):
            slow.append(f"{call}: {first} takes {ratio:.2f} times as long as {min(ms, key=ms.get)}")
    assert len(rows) > 70 and not slow, "\n".join(slow)
    assert not exceptions


LONG, WIDE = (4, 8, 4096, 64), (2, 16, 8192, 128)
BF16, FLOAT32 = torch.bfloat16, torch.float32
TWO_GIB = (64, 8, 1024, 64)  # of scores in float32, where half of it is the most


@pytest.mark.parametrize(
    ("of_gpu", "shape", "words", "dtype", "order"),
    [
        # What no record times is no default: a dense bias, wide heads, a bias by distance, softcap.
        (HOPPER, LONG, "dense bias causal", BF16, "triton aten"),
        (HOPPER, (4, 8, 1024, 256), "padding", BF16, "triton aten"),
        (HOPPER, LONG, "relative bias", BF16, "triton aten"),
        (HOPPER, LONG, "softcap", BF16, "triton aten"),
        # Causal alone: without CUDA kernels PyTorch comes before Triton, which takes 1.5 times as long.
        (HOPPER, WIDE, "causal", BF16, "cuda aten triton"),
        (HOPPER, LONG, "causal padding", BF16, "cuda triton aten"),
        # Long calls without a mask or causal alone, on a GPU without a record.
        (AMPERE, LONG, "causal", torch.float16, "aten triton"),
        (AMPERE, (4, 8, 512, 64), "causal", BF16, "triton aten"),
        (AMPERE, LONG, "causal lse", BF16, "triton aten"),
        (AMPERE, LONG, "padding", BF16, "triton aten"),
        # float32, where PyTorch makes all scores of a bias by distance, and for lse.
        (AMPERE, LONG, "padding", FLOAT32, "aten triton"),
        (HOPPER, TWO_GIB, "relative bias", FLOAT32, "triton aten"),
        (AMPERE, TWO_GIB, "lse", FLOAT32, "triton aten"),
        # Under torch.use_deterministic_algorithms(True) no kernel gives way to PyTorch's in 16 bits.
        (HOPPER, WIDE, "equal bits", BF16, "cuda triton aten"),
        (AMPERE, LONG, "causal, equal bits", BF16, "triton aten"),
    ],
)
def test_attention(
    of_gpu: Any, shape: Any, words: str, dtype: torch.dtype, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: "equal bits" in words)
    capability(monkeypatch, of_gpu)
    found = automatic_order("attention", GPU, attention(shape, words, dtype))
    assert found[: len(order.split())] == tuple(order.split()) and found[-1] == "reference"
    assert automatic_order("attention", torch.device("cpu"), attention(shape, words, dtype)) == ("aten", "reference")


def test_other_ops_on_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, AMPERE)
    firsts = {"feed_forward": "aten", "add_layer_norm": "triton", "linear_cross_entropy": "triton"}
    for op in firsts:
        assert automatic_order(op, GPU, other(op, "512 x 512", BF16))[0] == "triton"
        assert automatic_order(op, GPU, other(op, "512 x 512", FLOAT32))[0] == firsts[op]
