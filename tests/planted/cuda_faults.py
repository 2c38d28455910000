"""Faults in csrc/, which test_planted_cuda.py compiles all at once. `tests` names what must show them, in PROBLEMS.

Where BUG is in `wrong`, it is (planted_bug == the fault's number), for texts that are neither expressions nor
statements. The text of one fault may be a part of another one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from catalogue import make
from mask_cases import after_full_tiles, in_blocks, packed_and_padded, with_gap
from planted.fault import Fault

from fastattn.check.cases import Problem

BF16 = torch.bfloat16


def attention(**options: Any) -> Callable[[], list[Problem]]:
    return lambda: [make("attention", **{"B": 1, "H": 2, "D": 40, "dtype": BF16} | options)]


def norms() -> list[Problem]:
    """520: two warps a row, vectors. 500: one warp a row, element by element. 37 rows: every block takes several turns.
    1040: weight gradients by a second kernel."""
    sizes = (
        (37, 520, {"dropout_p": 0.3, "x_bias": True}),
        (37, 500, {"dropout_p": 0.3, "x_bias": True}),
        (7, 1040, {"x_bias": True}),
        (9, 500, {"rms": True}),
        (9, 500, {"eps_on_std": True, "eps": 1e-2}),
    )
    return [make("add_layer_norm", rows=(rows,), hidden=n, return_sum=True, **options) for rows, n, options in sizes]


def hidden_layers() -> list[Problem]:
    """relu's h decides in the backward, gating pairs columns; 75 columns are computed element by element."""
    sizes = {"tokens": (150,), "d": 40, "d_out": 24, "dropout_p": 0.3, "dtype": BF16}
    activations = ("swiglu", 264), ("relu", 264), ("gelu", 75)
    return [make("feed_forward", activation=activation, d_ff=d_ff, **sizes) for activation, d_ff in activations]


PROBLEMS: dict[str, Callable[[], list[Problem]]] = {
    "all": attention(mask="attn_mask_2d", Hk=1, Lq=70, Lk=140, dropout_p=0.3),
    "band": attention(mask={"window": (40, 20)}, Lq=150, Lk=200),
    "causal": attention(mask="causal", Lq=400, Lk=400),
    "dropout": attention(mask="causal", Lq=150, Lk=270, dropout_p=0.3),
    "float32": attention(H=1, D=16, mask="causal", return_lse=True, Lq=1, Lk=1, dtype=torch.float32),
    "full": attention(Lq=200, Lk=520),
    "packed": attention(mask=packed_and_padded(150, 140), B=2, Lq=150, Lk=140),
    "blocks": attention(mask={"attn_mask": in_blocks(1, 2, 300, 520)}, Lq=300, Lk=520),
    "after full": attention(mask={"attn_mask": after_full_tiles()}, H=8, D=128, Lq=128, Lk=512),
    "gap": attention(mask={"attn_mask": with_gap(128, 1100)}, D=128, Lq=128, Lk=1100),
    "poisoned": attention(mask="key_padding_holes", poison=True, B=2, Lq=150, Lk=140),
    "norm": norms,
    "hidden": hidden_layers,
}

FORWARD, DQ, DKDV = (f"attention/{name}.cu" for name in ("forward", "backward_dq", "backward_dkdv"))
FORWARD_90, DKDV_90, ROWS_90 = (f"attention/{name}_sm90.cu" for name in ("forward", "backward_dkdv", "backward_rows"))
PIPELINE_90 = "attention/backward_dkdv_sm90_pipeline.cuh"
MASK, BACKWARD, MMA = "attention/mask.cuh", "attention/backward_common.cuh", "common/mma.cuh"
NORM, REDUCE = "add_layer_norm/backward.cu", "common/reduce.cuh"
HIDDEN, POINTWISE = "feed_forward/hidden.cuh", "feed_forward/pointwise.cu"
SOURCES = (FORWARD, DQ, DKDV, FORWARD_90, DKDV_90, ROWS_90, POINTWISE)
SOURCES += ("add_layer_norm/forward.cu", "add_layer_norm/backward.cu")
# Always in the copy. Less to compile: attention in bfloat16 and float32 with head dimensions up to 64, two kernels of
# the norm, in float32. Few heads of attention fit into the L2 cache.
CHANGES = [
    ("attention/sm90.cuh", "32 << 20", "24 << 10"),
    (
        "attention/tile.cuh",
        "  dtype_switch(dtype, with_type);",
        "  dtype == DType::float32 ? with_type(float{}) : with_type(__nv_bfloat16{});",
    ),
    ("attention/tile.cuh", "return with_type(Tf32{});", "return;"),
    ("attention/tile.cuh", "head_dim <= 64 ? f(t, Int<64>{}) : f(t, Int<128>{})", "f(t, Int<64>{})"),
    (
        "add_layer_norm/rows.cuh",
        "template <class Function>\nvoid dispatch(",
        """template <class Function>
void dispatch(DType, DType, int chunks, bool is_aligned, Function&& f) {
  if (chunks == 4) return f(float{}, float{}, Int<4>{}, Int<1>{});
  is_aligned ? f(float{}, float{}, Int<2>{}, Int<1>{}) : f(float{}, float{}, Int<2>{}, Int<0>{});
}

template <class Function>
void dispatch_to_all(""",
    ),
]
K_IS_THERE = "    __syncthreads();  // k is there, and v was read\n"
LEAVE = "    named_barrier_sync(kGroupBarrier + group_, kGroup);\n    if (thread_ == 0) {"
FAULTS: list[Fault] = [
    Fault("copy not waited for", FORWARD, f"    cp_async_wait<0>();\n{K_IS_THERE}", "    __syncthreads();\n", "band"),
    Fault("tile overwritten while it is read", FORWARD, K_IS_THERE, "", "band"),
    Fault("sum not rescaled", FORWARD, "row_sum[half] *= rescale", "row_sum[half] *= 1.0f", "full"),
    Fault("an interval without its last column", MASK, "end = interval.y;", "end = interval.y - BUG;", "packed"),
    Fault("keys that take no part are read", DQ, "takes_part(mask, b, n)", "true", "poisoned"),
    Fault("gradient of lse forgotten", BACKWARD, "delta -= p.dlse[row0 + m]", "delta -= 0.0f", "band"),
    Fault("dropout of another key", DKDV, ">> g & 1", ">> (BUG ? c : g) & 1", "all"),
    Fault("keys not waited for", FORWARD_90,
        "(kind)::value;\n      shared_.full_k", "(kind)::value;\n      if (!BUG) shared_.full_k", "full"),
    Fault("stage released before its product", FORWARD_90,
        "      wgmma_wait<1>(s);\n      release_keys();\n", "      release_keys();\n      wgmma_wait<1>(s);\n", "full"),
    Fault("keys kept by a warpgroup without queries", FORWARD_90,
        "__syncwarp();\n      release_keys();", "__syncwarp();\n      if (!BUG) release_keys();", "causal"),
    Fault("dropout without the scale", FORWARD_90, "unit = a_.p.softmax_scale * kLog2e",
        "unit = (BUG && kDropout ? 1.0f : a_.p.softmax_scale) * kLog2e", "dropout"),
    Fault("a phase that never flips", "attention/sm90.cuh", "stage = 0, phase ^= 1", "stage = 0", "causal"),
    Fault("the classes of the block after", FORWARD_90,
        "classes[keys_.phase][keys_.stage] >> 4 * group_", "classes[keys_.phase][keys_.stage] >> 4 * group_ + 2 * BUG",
        "blocks"),
    Fault("keys loaded into a stage that is in use", "attention/forward_sm90_pipeline.cuh",
        "      shared.empty_k[keys.stage].wait(keys.phase ^ 1);\n", "      (void)0;\n", "gap"),
    Fault("values released before others have the last ones", FORWARD_90,
        "      shared_.full_v[values_.stage].wait(values_.phase);\n      named_barrier",
        "      if (!BUG) shared_.full_v[values_.stage].wait(values_.phase);\n      named_barrier", "after full"),
    Fault("the first block for the second", "attention/sm90.cuh", "second ? 64 : 0", "0", "blocks"),
    Fault("a partial block as a full one", "attention/sm90.cuh", "second ? 8 : 2", "0", "blocks"),
    Fault("dS of a skipped tile kept", DKDV_90, "    write_ds(Packed<kBlockM>{}, 0);\n", "    (void)0;\n", "blocks"),
    Fault("dS of a skipped block kept", DKDV_90,
        "if constexpr (16 * kSteps < kBlockM) write_ds", "if constexpr (16 * kSteps < kBlockM) if (!BUG) write_ds",
        "blocks"),
    Fault("lse of the other block", DKDV_90, "&values[first + 2 * j", "&values[(BUG ? 0 : first) + 2 * j", "blocks"),
    Fault("no fence before the store", FORWARD_90,
        f"    fence_async_proxy();\n{LEAVE}", f"    if (!BUG) fence_async_proxy();\n{LEAVE}", "causal"),
    Fault("queries released too early", DKDV_90,
        "    wgmma_wait<1>(dk, dv);\n", "    wgmma_wait<3>(dk, dv);\n", "causal"),
    Fault("the other dS not waited for", DKDV_90,
        "    named_barrier_sync(kBothBarrier, kConsumers * kGroup);  // both wrote dS and read the last one\n",
        "    (void)0;\n", "causal"),
    Fault("a part overwritten before it is sent", DKDV_90,
        "    if (!has_dq_) return;\n    named_barrier_sync(kEmpty + group_, kGroup + 32);\n",
        "    if (!has_dq_) return;\n    named_barrier_arrive(kEmpty + group_, kGroup + 32);\n", "causal"),
    Fault("the last part of dq not sent", DKDV_90,
        "    hand_over_dq();\n    named", "    if (!BUG) hand_over_dq();\n    named", "causal"),
    Fault("turns of lists that are all first", ROWS_90,
        "shared.earlier[tile] + __popc(shared.listed[tile] & first_bits(warp))", "0", "packed"),
    Fault("turns one too low", PIPELINE_90,
        "return item.n0 / kBlockN - max(m0 - mask.band_hi, 0) / kBlockN;",
        "return max(item.n0 / kBlockN - max(m0 - mask.band_hi, 0) / kBlockN - 1, 0);", "causal"),
    Fault("turns not waited for", PIPELINE_90, "wait_for_count(counters + part, tile.turn);", "(void)0;", "causal"),
    Fault("turns passed on too early", PIPELINE_90, "bulk_wait<0>();", "(void)0;", "causal"),
    Fault("no barrier in a row's sum", REDUCE,
        "    if (row == static_cast<int>(threadIdx.y)) named_barrier_sync(1 + row, blockDim.x);\n", "", "norm"),
    Fault("one barrier for several rows", REDUCE, "1 + row", "1", "norm"),
    Fault("sums of two rows in one place", NORM, "turn ^= 1", "turn ^= 0", "norm"),
    Fault("dropout counts elements", "common/philox.cuh", "draw(words, row, col / 8)", "draw(words, row, col)", "norm"),
    Fault("no mean of g * normal", NORM, "normal[j] * mean_g_normal", "0.0f", "norm"),
    Fault("a ticket too few", NORM, "count - 1", "count - 2", "norm"),
    Fault("no barrier before a block's rows are added", NORM,
        "    __syncthreads();\n    const int first =", "    if (!BUG) __syncthreads();\n    const int first =", "norm"),
    Fault("no ratio of standard deviations", NORM, "p.eps_on_std", "false", "norm"),
    Fault("gate not multiplied", HIDDEN, "gate[j] *= up[j]", "gate[j] *= BUG ? 1.0f : up[j]", "hidden"),
    Fault("another chunk's mask", HIDDEN,
        "dropout.apply(gate, row, col)", "dropout.apply(gate, row, col ^ (BUG ? 8 : 0))", "hidden"),
    Fault("this turn's row again", POINTWISE,
        "read(row + kRowThreads)", "read(BUG ? row : row + kRowThreads)", "hidden"),
    Fault("no barrier before a block's rows are added", POINTWISE,
        "  __syncthreads();\n  const int column", "  if (!BUG) __syncthreads();\n  const int column", "hidden"),
    Fault("one head of the group", DKDV, "(h_k + 1) * group", "h_k * group + 1", "all"),
    Fault("a product of parts left out", MMA, "    mma_instruction<Tf32>(sum, a_big, b_small);\n", ";", "float32"),
    Fault("small times small left out", MMA, "    mma_instruction<Tf32>(sum, a_rest, b_rest);\n", ";", "float32"),
    Fault("a row without keys is not 0", FORWARD, "total == 0.0f ? 0.0f : value * factor", "value * factor", "packed"),
    Fault("a mean in RMSNorm", "add_layer_norm/forward.cu", "p.bias ? sum[0] / p.hidden : 0.0f", "sum[0] / p.hidden",
        "norm"),
    Fault("the gate's slope without the other half", HIDDEN, "grad[j] *= slope * factor", "grad[j] *= slope", "hidden"),
]  # fmt: skip
