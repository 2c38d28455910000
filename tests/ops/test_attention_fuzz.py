"""Random attention problems in every backend, each within the rule for error: lengths 1 to 300, every mask kind,
dropout 0 to 0.9, grouped heads, odd head dimensions and strides, biases with a gradient, a gradient of lse.

    FASTATTN_FUZZ=2000 pytest --full tests/ops/test_attention_fuzz.py -k triton

runs that many problems of a backend. A failure names the problem's number; FASTATTN_FUZZ_FIRST starts there.
"""

from __future__ import annotations

import os
import random

import pytest
import torch
from attention_checks import BACKENDS, Problem, backend_call, check, make
from layouts import every_second, reversed_dims, sliced, swapped_dims
from mask_cases import KINDS, scattered

PROBLEMS = int(os.environ.get("FASTATTN_FUZZ", 60))
FIRST = int(os.environ.get("FASTATTN_FUZZ_FIRST", 0))
PART = 20  # problems a test
SCORES = 60_000  # of all heads of a problem, so that many fit into minutes
LAYOUTS = (torch.clone, swapped_dims, reversed_dims, sliced, every_second)


def draw(number: int, device: torch.device) -> tuple[str, Problem]:
    """Problem `number`, and what it is in words."""
    rng = random.Random(number)
    Lq, Lk = (rng.choice((rng.randint(1, 20), rng.randint(1, 300))) for _ in range(2))
    heads = max(min(SCORES // (Lq * Lk), 8), 1)
    B = rng.randint(1, min(heads, 3))
    Hk = rng.randint(1, max(heads // B, 1))
    H = Hk * rng.randint(1, max(heads // (B * Hk), 1))
    D, Dv = (rng.choice((rng.randint(1, 64), 16, 32, 64, rng.randint(1, 160))) for _ in range(2))
    kind = rng.choice((*KINDS, "scattered"))  # each query of "scattered" may attend to one to three keys
    mask = (
        {"attn_mask": scattered(Lq, Lk, min(rng.randint(1, 3), Lk), number).to(device)} if kind == "scattered" else kind
    )
    options = {
        "dtype": rng.choice((torch.float32, torch.bfloat16, torch.float16)),
        "bias": rng.choice((None, None, tuple(rng.choice((1, n)) for n in (B, H, Lq, Lk)))),
        "dropout_p": rng.choice((0.0, 0.1, round(rng.uniform(0, 0.9), 3))),
        "dlse": rng.random() < 0.5,
    }
    p = make(B, H, Lq, Lk, D, Hk=Hk, Dv=Dv, mask=mask, device=device, seed=number, may_be_empty=True, **options)
    layouts = [rng.choice(LAYOUTS) for _ in range(4)]
    tensors = {n: layout(getattr(p, n)) for n, layout in zip(("q", "k", "v", "dout"), layouts, strict=True)}
    p = p.but(**tensors, scale=rng.choice((p.scale, p.scale, 1.0, -0.3)))
    words = f"problem {number}: B {B}, H {H}, Hk {Hk}, Lq {Lq}, Lk {Lk}, D {D}, Dv {Dv}, {kind}, {options}"
    return f"{words}, {[layout.__name__ for layout in layouts]}, scale {p.scale:.3g}", p


@pytest.mark.full
@pytest.mark.parametrize("part", range(-(-PROBLEMS // PART)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_problems(backend: str, part: int, device: torch.device) -> None:
    attend = backend_call(backend, device)
    first = FIRST + PART * part
    failures = []
    for number in range(first, min(first + PART, FIRST + PROBLEMS)):
        words, p = draw(number, device)
        try:
            check(p, attend)
        except AssertionError as error:
            failures.append(f"{words}: {error}")
    assert not failures, "\n".join(failures)
