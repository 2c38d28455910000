"""scaled_dot_product_attention: every backend, torch's own with each of its kernels pinned, FlexAttention, others.

    python benchmarks/report.py --only attention

Masks are made before the timing, as a training step makes them once for all its layers. "default, new mask" prepares
its mask in every forward.
"""

from __future__ import annotations

from typing import Any

import attention_rivals
import harness
import torch
from cases import AttentionCase
from harness import Benchmark, Inputs, Provider, Refused, Run, function_run, op_call


def new_mask(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Run:
    """The default path with a new mask at every call, as a single layer uses it."""
    if "attn_mask" not in inputs.fixed:
        raise Refused("no mask to prepare")
    return function_run(op_call(case, inputs, dropout_p, new_mask=True), inputs)


def compiled_formula(case: AttentionCase, inputs: Inputs, dropout_p: float) -> Any:
    """torch.compile of the reference path. Its mask is made before the timing, as for the others."""
    return op_call(case, inputs, dropout_p, "reference")


def providers(device: torch.device) -> list[Provider]:
    found = [*harness.ours(), Provider("default, new mask", new_mask)]
    found += attention_rivals.torch_kernels(device)
    found.append(harness.rival("torch.compile of reference", compiled_formula, compiled=True))
    if device.type == "cuda":  # on a CPU FlexAttention has no backward, and FlashAttention no kernel
        found.append(attention_rivals.torch_varlen())
        found += [attention_rivals.flash_attention(version) for version in (2, 3, 4)]
        found += [attention_rivals.flex(count_mask) for count_mask in (False, True)]
    return found


FORMULA = "FLOPs: 4 x batch x n_head x visible pairs x head_dim forward, x 2.5 backward (five products for two)"
BENCHMARKS = (Benchmark("attention", FORMULA, ("flop",), harness.op_inputs, providers),)
