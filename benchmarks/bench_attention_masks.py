"""scaled_dot_product_attention against torch's operator, on a CPU, with the masks that users have.

    python benchmarks/report.py --device cpu --only attention_masks

Masks are made before the timing. torch's operator gets the cheapest form of each that it takes: nothing, `is_causal`,
or a float mask of the query's dtype, no larger than it must be. Packed sequences it gets one after the other, as views.
Inference is without gradients, training is forward and backward. The memory is that of inference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import torch
import torch.nn.functional as F
from cases import MaskCase
from harness import Checked, Inputs, Provider, Refused, Run
from torch import Tensor

from fastattn import AttentionMask, scaled_dot_product_attention


def make_inputs(case: MaskCase, device: torch.device) -> Inputs:
    """All tensors have the layout of a projection's result: (batch, length, heads, width). The loss ignores padding."""
    randn = harness.seeded_randn(device, case.dtype)
    query, key, value, dout = (randn(*case.shape).transpose(1, 2) for _ in range(4))
    restrictions = {
        name: given.to(device) if isinstance(given, Tensor) else given for name, given in case.restrictions().items()
    }
    if "key_padding" in restrictions:
        dout *= restrictions["key_padding"][:, None, :, None]
    return Inputs({"query": query, "key": key, "value": value}, restrictions, dout)


def part(case: MaskCase, name: str, tensor: Tensor) -> Tensor:
    """The first head of the last sequence, which has the most padding. All of a packed row."""
    return tensor if tensor.dim() == 1 else tensor[-1:, :1] if tensor.dim() == 4 else tensor[-1:]


def attention_mask(inputs: Inputs) -> AttentionMask | None:
    given = dict(inputs.fixed)
    if "bias" in given:
        given["bias"] = given["bias"].to(inputs.leaves["query"].dtype)  # float64, for the check
    return AttentionMask(**given) if given else None


def float_mask(inputs: Inputs) -> Tensor:
    """The mask as torch's operator adds it to the scores."""
    query, padding = inputs.leaves["query"], inputs.fixed.get("key_padding")
    if list(inputs.fixed) == ["key_padding"]:
        visible = padding[:, None, None]
    else:
        batch, length = 1 if padding is None else len(padding), query.shape[2]
        visible = attention_mask(inputs).dense(batch, 1, length, length, query.device)
    return torch.where(visible, inputs.fixed.get("bias", 0.0), float("-inf")).to(query.dtype)


def ours(case: MaskCase, inputs: Inputs, dropout_p: float, backend: str | None = None) -> Run:
    mask = attention_mask(inputs)
    notes = {} if backend else {"default": True}
    return run(partial(scaled_dot_product_attention, attn_mask=mask, backend=backend), inputs, **notes)


def by_torch(case: MaskCase, inputs: Inputs, dropout_p: float) -> Run:
    is_causal, offsets = inputs.fixed.get("is_causal", False), inputs.fixed.get("cu_seqlens_q")
    if offsets is not None:
        lengths = offsets.diff().tolist()

        def packed(**leaves: Tensor) -> Tensor:
            sequences = zip(*(leaf.split(lengths, dim=2) for leaf in leaves.values()), strict=True)
            outs = [F.scaled_dot_product_attention(*qkv, is_causal=is_causal).transpose(1, 2) for qkv in sequences]
            return torch.cat(outs, dim=1).transpose(1, 2)  # outs lie in memory as they are joined

        return run(packed, inputs)
    if set(inputs.fixed) <= {"is_causal"}:
        return run(partial(F.scaled_dot_product_attention, is_causal=is_causal), inputs)
    return run(partial(F.scaled_dot_product_attention, attn_mask=float_mask(inputs)), inputs)


def run(function: Callable[..., Tensor], inputs: Inputs, **notes: Any) -> Run:
    made = harness.function_run(function, inputs, **notes)
    timed = {"training": made.timed["both"], "inference": torch.no_grad()(made.timed["forward"])}
    return made._replace(timed=timed)


def providers(device: torch.device) -> list[Provider]:
    reference = Provider("reference", partial(ours, backend="reference"))
    return [reference, Provider("fastattn", ours), Provider("torch", by_torch, ours=False)]


def measure(checked: Checked, provider: Provider, budget_s: float) -> dict[str, Any]:
    if provider.name == "reference":
        raise Refused("not timed: it would take most of the time, and bench_attention.py has it")
    return harness.check_and_time(checked, provider, budget_s)


BENCHMARK = harness.Benchmark(
    name="attention_masks",
    case_type=MaskCase,
    rates=(),
    inputs=make_inputs,
    providers=providers,
    directions=("training", "inference"),
    part=part,
    measure=measure,
)
