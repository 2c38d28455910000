"""The Triton kernels as they ship, compiled for a GPU that is not here: Triton and its assembler need none.

A case calls a public op with backend="triton" under `precompile.compiling`, so tiles, warps, stages and the specialised
arguments are those of a real launch. Tensors lie on the CPU: only dtype, strides and alignment are looked at.

Triton decides between compiler and interpreter when @triton.jit runs, and a test session on a CPU is interpreted. So
this is a program, which prints a JSON line for every kernel of the group's cases:

    PYTHONPATH=.:tools python tests/codegen/triton_cases.py GROUP
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import precompile
import torch

import fastattn

LARGE = (2, 4, 1024, 1024)  # batch, heads, queries, keys: long enough for the largest tiles
Case = tuple[str, str, Callable[[], Any]]  # architecture, name, calls


def attention(dtype: str, head_dim: int, mask: str, backward: bool = True, sizes: Sequence[int] = LARGE) -> None:
    """mask: "causal" needs no tensor, "padding" is of keys, "tensors" adds a bool mask; in all, also "dropout" (or
    "least dropout", whose threshold is 1), "bias" (or "key bias", which all queries share, or "relative bias"),
    "softcap" and "dlse", a gradient of lse. sizes: batch, heads, queries, keys."""
    B, H, Lq, Lk = sizes
    zeros = partial(torch.zeros, dtype=getattr(torch, dtype), requires_grad=backward)
    q, k, v = zeros(B, H, Lq, head_dim), zeros(B, H, Lk, head_dim), zeros(B, H, Lk, head_dim)
    given: dict[str, Any] = {}
    if "tensors" in mask:
        given["attn_mask"] = torch.ones(B, 1, Lq, Lk, dtype=torch.bool)
    if "tensors" in mask or "padding" in mask:
        given["key_padding"] = torch.ones(B, Lk, dtype=torch.bool)
    if "relative bias" in mask:
        given["relative_bias"] = torch.zeros(H, Lq + Lk - 1, requires_grad=backward)
    elif "bias" in mask:
        shape = (1, 1, 1, Lk) if "key bias" in mask else (1, H, Lq, Lk)
        given["bias"] = torch.zeros(shape, requires_grad=backward)
    dropout_p = 2**-16 if "least dropout" in mask else 0.1 * ("dropout" in mask)
    options = {"is_causal": True, "dropout_p": dropout_p, "backend": "triton"}
    options["softcap"] = 50.0 if "softcap" in mask else None
    attention_mask = fastattn.AttentionMask(**given) if given else None
    out, lse = fastattn.scaled_dot_product_attention(q, k, v, attention_mask, return_lse=True, **options)
    if backward:
        (out.sum() + lse.sum() if "dlse" in mask else out.sum()).backward()


def prepare_mask(kind: str, *layout: int) -> None:
    """kind: "padding", "packed" sequences, a bool "matrix", or several of them."""
    from fastattn.kernels.mask import prepare_mask

    B, H, L = 2, 4, 1024
    given: dict[str, Any] = {"is_causal": True}
    if "padding" in kind:
        given["key_padding"] = given["query_padding"] = torch.ones(B, L, dtype=torch.bool)
    if "packed" in kind:
        given["cu_seqlens_q"] = torch.zeros(9, dtype=torch.int32)
        given["cu_seqlens_q"][1:] = L
    if "matrix" in kind:
        given["attn_mask"] = torch.ones(B, H, L, L, dtype=torch.bool)
    mask = fastattn.AttentionMask(**given)
    for by_key in (False, True):
        mask.prepare(L, L, fastattn.masks.Layout(by_key, *layout), torch.device("cpu"), prepare_mask)


def decode_attention(dtype: str, head_dim: int, keys: str) -> None:
    """keys: "of beams", found by ancestors, or "of beams, grouped" by four heads; "shared" by beams; "split" among
    several programs; of one query in many sequences, "own"; "one" of one sequence."""
    sizes = {"split": (1, 1, 2, 1024), "own": (32, 1, 8, 64), "one": (1, 1, 1, 1)}
    B, W, H, M = sizes.get(keys, (32, 5, 8, 64))
    rows, heads_k = W if "of beams" in keys else 1, H // 4 if "grouped" in keys else H
    zeros = partial(torch.zeros, dtype=getattr(torch, dtype))
    q, k, v = zeros(B, W, H, head_dim), zeros(B, M, rows, heads_k, head_dim), zeros(B, M, rows, heads_k, head_dim)
    lengths = torch.zeros(B, dtype=torch.int32)
    ancestors = torch.zeros(B, W, M, dtype=torch.int32) if "of beams" in keys else None
    fastattn.decode_attention(q, k, v, lengths, ancestors, backend="triton")


def layer_norm(
    dtype: str,
    hidden: int,
    dropout_p: float = 0.1,
    rms: bool = False,
    x_bias: bool = False,
    eps_on_std: bool = False,
) -> None:
    rows = 2 * precompile.MULTIPROCESSORS * max(4096 // hidden, 1)
    x, residual = (torch.zeros(rows, hidden, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(2))
    weight, bias = (torch.zeros_like(x[0], requires_grad=True) for _ in range(2))
    options = {"dropout_p": dropout_p, "backend": "triton"}
    if rms:
        out = fastattn.dropout_add_rms_norm(x, residual, weight, **options)
    else:
        options |= {"x_bias": bias if x_bias else None, "eps_on_std": eps_on_std}
        out = fastattn.dropout_add_layer_norm(x, residual, weight, bias, **options)
    out.sum().backward()


def layer_norm_under_autocast(x_dtype: torch.dtype, hidden: int, dropout_p: float = 0.1) -> None:
    """What a layer's residual connection launches: x, its gradient and what products read of 16 bits, all else
    float32."""
    from fastattn.kernels.add_layer_norm import add_layer_norm_bwd, add_layer_norm_fwd

    from fastattn.backends.calls import NormCall

    rows = 2 * precompile.MULTIPROCESSORS * max(4096 // hidden, 1)
    residual, weight, rng = torch.zeros(rows, hidden), torch.zeros(hidden), torch.zeros(2, dtype=torch.int64)
    x, rng = residual.to(x_dtype), rng if dropout_p > 0 else None
    call = NormCall(x, residual, weight, weight, weight, rng, 1e-6, dropout_p, False)
    add_layer_norm_fwd(call, out_dtype=x_dtype)
    out, z, statistics = add_layer_norm_fwd(call, read=x)
    add_layer_norm_bwd(out, None, call._replace(x=z), statistics, True, x_dtype)


def feed_forward(
    dtype: str, activation: str, dropout_p: float = 0.1, tokens: int = 512, d: int = 512, d_ff: int = 2048
) -> None:
    """dtype "tf32": float32 as torch multiplies it with allow_tf32. Few tokens, as in decoding, are cut smaller."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    rows = 2 * d_ff if activation.endswith("glu") else d_ff
    zeros = partial(torch.zeros, dtype=getattr(torch, dtype.replace("tf32", "float32")), requires_grad=True)
    x, weight1, bias1, weight2, bias2 = zeros(tokens, d), zeros(rows, d), zeros(rows), zeros(d, d_ff), zeros(d)
    out = fastattn.feed_forward(x, weight1, bias1, weight2, bias2, activation, dropout_p, backend="triton")
    out.sum().backward()


def cross_entropy(dtype: str, n_class: int, gradient: bool = True) -> None:
    x = torch.zeros(8, 64, dtype=getattr(torch, dtype), requires_grad=gradient)
    weight, target = torch.zeros(n_class, 64, dtype=x.dtype), torch.zeros(8, dtype=torch.int64)
    loss = fastattn.linear_cross_entropy(x, weight, target, label_smoothing=0.1, backend="triton")
    if gradient:
        loss.backward()


OTHER_GPUS = ("sm_89", "sm_100a", "sm_120a")  # no machine of the project has them
# A kernel takes a second or two to compile, so each flag, dtype, size and architecture is there, not every product.
GROUPS: dict[str, list[Case]] = {
    "everyday": [
        ("sm_90a", "bfloat16 D64 causal", partial(attention, "bfloat16", 64, "causal", backward=False)),
        ("sm_80", "bfloat16 D64 causal", partial(attention, "bfloat16", 64, "causal", backward=False)),
        ("sm_90a", "mask of padding", partial(prepare_mask, "padding", 128, 64)),
        ("sm_90a", "bfloat16 D64 of beams", partial(decode_attention, "bfloat16", 64, "of beams")),
        ("sm_80", "bfloat16 D64 split", partial(decode_attention, "bfloat16", 64, "split")),
        ("sm_90a", "float32 D64 of beams", partial(decode_attention, "float32", 64, "of beams")),
        ("sm_90a", "bfloat16 hidden 512", partial(layer_norm, "bfloat16", 512)),
        ("sm_80", "bfloat16 relu", partial(feed_forward, "bfloat16", "relu")),
        ("sm_90a", "bfloat16 classes 32000", partial(cross_entropy, "bfloat16", 32000)),
        ("sm_90a", "bfloat16 one key", partial(decode_attention, "bfloat16", 1, "one")),
        ("sm_90a", "bfloat16 classes 1", partial(cross_entropy, "bfloat16", 1)),
        ("sm_100a", "bfloat16 D64 causal", partial(attention, "bfloat16", 64, "causal", backward=False)),
    ],
    # A size of 1 is a constant for Triton: where a kernel has it as an argument, the code is another.
    "sizes_of_1": [
        ("sm_90a", "bfloat16 sizes of 1", partial(attention, "bfloat16", 1, "least dropout", sizes=(1, 1, 1, 1))),
        ("sm_90a", "bfloat16 hidden 1", partial(layer_norm, "bfloat16", 1)),
        ("sm_90a", "bfloat16 relu, widths 1", partial(feed_forward, "bfloat16", "relu", tokens=1, d=1, d_ff=1)),
        *(
            ("sm_90a", f"bfloat16 {name}, {mask}", partial(attention, "bfloat16", 64, mask, sizes=sizes))
            for name, sizes in (("one query", (1, 1, 1, 80)), ("one key", (1, 1, 80, 1)))
            for mask in ("causal", "tensors, dropout, bias", "relative bias, softcap")
        ),
        ("sm_90a", "bfloat16 key bias", partial(attention, "bfloat16", 64, "key bias", sizes=(2, 4, 80, 80))),
        ("sm_90a", "bfloat16 hidden 1, rms", partial(layer_norm, "bfloat16", 1, rms=True)),
        ("sm_90a", "bfloat16 swiglu, widths 1", partial(feed_forward, "bfloat16", "swiglu", tokens=1, d=1, d_ff=1)),
        ("sm_90a", "bfloat16 gelu, d_ff 1", partial(feed_forward, "bfloat16", "gelu", d_ff=1)),
        ("sm_90a", "float32 classes 1", partial(cross_entropy, "float32", 1)),
    ],
    # What needs the most shared memory, or tensor memory.
    "other_gpus": [
        (arch, f"{name}, {arch}", call)
        for arch in OTHER_GPUS
        for name, call in (
            ("bfloat16 D64 causal", partial(attention, "bfloat16", 64, "causal")),
            ("bfloat16 D256 causal", partial(attention, "bfloat16", 256, "causal")),
            ("bfloat16 D128 tensors, dropout, bias", partial(attention, "bfloat16", 128, "tensors, dropout, bias")),
            ("bfloat16 D128 relative bias, softcap", partial(attention, "bfloat16", 128, "relative bias, softcap")),
            ("float32 D256 of beams", partial(decode_attention, "float32", 256, "of beams")),
            ("bfloat16 hidden 16384", partial(layer_norm, "bfloat16", 16384)),
            ("bfloat16 relu", partial(feed_forward, "bfloat16", "relu")),
            ("bfloat16 swiglu", partial(feed_forward, "bfloat16", "swiglu")),
            ("tf32 silu", partial(feed_forward, "tf32", "silu")),
            ("bfloat16 classes 32000", partial(cross_entropy, "bfloat16", 32000)),
        )
    ],
    "attention": [
        *(
            (arch, f"{dtype} D{head_dim} {mask}", partial(attention, dtype, head_dim, mask))
            for arch, dtype, head_dim, mask in (
                ("sm_90a", "bfloat16", 64, "causal"),
                ("sm_90a", "bfloat16", 128, "causal"),
                ("sm_90a", "bfloat16", 256, "causal"),
                ("sm_90a", "float16", 128, "tensors, dropout, bias"),
                ("sm_90a", "float32", 64, "tensors, bias, dlse"),
                ("sm_80", "bfloat16", 64, "tensors, dropout, bias, dlse"),
                ("sm_80", "float16", 128, "causal"),
                ("sm_90a", "bfloat16", 64, "relative bias"),
                ("sm_90a", "bfloat16", 128, "relative bias, softcap"),
                ("sm_80", "bfloat16", 128, "relative bias"),
                ("sm_80", "bfloat16", 64, "softcap"),
            )
        ),
        ("sm_90a", "bfloat16 D128 dropout", partial(attention, "bfloat16", 128, "causal, dropout", backward=False)),
        *(
            (
                arch,
                f"{dtype} D{head_dim} {keys} keys, {mask}",
                partial(attention, dtype, head_dim, mask, sizes=(2, 4, queries, keys)),
            )
            for arch, dtype, head_dim, queries, keys, mask in (
                ("sm_90a", "bfloat16", 64, 32, 32, "padding, dropout"),
                ("sm_90a", "bfloat16", 64, 64, 64, "padding, dropout"),
                ("sm_90a", "bfloat16", 64, 20, 50, "padding, dropout"),
                ("sm_90a", "bfloat16", 64, 64, 64, "tensors, dropout, bias, dlse"),
                ("sm_90a", "bfloat16", 128, 32, 32, "padding, dropout"),
                ("sm_90a", "bfloat16", 128, 64, 64, "padding, dropout"),
                ("sm_90a", "float32", 64, 32, 32, "padding, dropout"),
                ("sm_90a", "float32", 128, 32, 32, "padding, dropout"),
                ("sm_80", "float16", 64, 64, 64, "padding, dropout"),
                ("sm_80", "bfloat16", 128, 64, 64, "padding, dropout"),
            )
        ),
        ("sm_80", "bfloat16 D128 bias", partial(attention, "bfloat16", 128, "tensors, bias", backward=False)),
    ],
    "mask": [
        *(
            (arch, f"mask of {kind}, tiles of {layout}", partial(prepare_mask, kind, *layout))
            for arch, kind, layout in (
                ("sm_90a", "packed matrix, padding", (192, 128)),  # a tile of the CUDA kernels
                ("sm_90a", "matrix", (128, 64)),
                ("sm_90a", "packed, padding", (0, 0)),
                ("sm_80", "packed matrix, padding", (16, 16)),
                ("sm_80", "matrix, padding", (0, 0)),
            )
        ),
    ],
    "decode_attention": [
        *(
            (arch, f"{dtype} D{head_dim} {keys}", partial(decode_attention, dtype, head_dim, keys))
            for arch in ("sm_80", "sm_90a")
            for dtype in ("bfloat16", "float32")
            for head_dim in (64, 128, 256)
            for keys in ("of beams", "shared", *(("of beams, grouped", "own") if dtype == "float32" else ()))
        ),
        ("sm_90a", "float16 D128 split", partial(decode_attention, "float16", 128, "split")),
        ("sm_90a", "float32 D256 split", partial(decode_attention, "float32", 256, "split")),
    ],
    "norms": [
        *(("sm_90a", f"bfloat16 hidden {n}", partial(layer_norm, "bfloat16", n)) for n in (64, 512, 4096, 8192, 16384)),
        ("sm_90a", "float32 hidden 1024", partial(layer_norm, "float32", 1024)),
        ("sm_90a", "bfloat16 hidden 1024, no dropout", partial(layer_norm, "bfloat16", 1024, 0.0)),
        ("sm_90a", "bfloat16 hidden 1024, rms", partial(layer_norm, "bfloat16", 1024, rms=True)),
        ("sm_90a", "bfloat16 hidden 512, eps_on_std", partial(layer_norm, "bfloat16", 512, eps_on_std=True)),
        ("sm_80", "bfloat16 hidden 4096, x_bias", partial(layer_norm, "bfloat16", 4096, x_bias=True)),
        ("sm_90a", "float32 hidden 512, x bfloat16", partial(layer_norm_under_autocast, torch.bfloat16, 512)),
        ("sm_80", "float32 hidden 1024, x float16", partial(layer_norm_under_autocast, torch.float16, 1024, 0.0)),
    ],
    "feed_forward": [
        *(("sm_90a", f"bfloat16 {f}", partial(feed_forward, "bfloat16", f)) for f in ("relu", "gelu", "silu", "geglu")),
        ("sm_90a", "bfloat16 swiglu, no dropout", partial(feed_forward, "bfloat16", "swiglu", 0.0)),
        ("sm_80", "bfloat16 swiglu", partial(feed_forward, "bfloat16", "swiglu")),
        ("sm_80", "float16 gelu", partial(feed_forward, "float16", "gelu")),
        ("sm_90a", "float32 silu", partial(feed_forward, "float32", "silu")),
        ("sm_90a", "tf32 silu", partial(feed_forward, "tf32", "silu")),
        ("sm_90a", "bfloat16 geglu, few tokens", partial(feed_forward, "bfloat16", "geglu", tokens=64)),
        ("sm_80", "bfloat16 geglu, few tokens", partial(feed_forward, "bfloat16", "geglu", tokens=64)),
    ],
    "cross_entropy": [
        *(("sm_90a", f"bfloat16 classes {n}", partial(cross_entropy, "bfloat16", n)) for n in (1000, 10007, 32000)),
        ("sm_90a", "bfloat16 classes 32000, read only", partial(cross_entropy, "bfloat16", 32000, gradient=False)),
        ("sm_90a", "float32 classes 32000", partial(cross_entropy, "float32", 32000)),
        ("sm_80", "float16 classes 32000", partial(cross_entropy, "float16", 32000)),
    ],
}


def main(group: str) -> None:
    from machine_code import kernels_of

    for arch, name, call in GROUPS[group]:
        found = {}

        def keep(compiled: Any, arch: str = arch, found: dict[str, Any] = found) -> None:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
                cubin.write(compiled.asm["cubin"])
                cubin.flush()
                (kernel,) = kernels_of(Path(cubin.name), arch)
            dots = re.findall(r"(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) .*", compiled.asm["ttgir"])
            on_tensor_cores = [dot for dot in dots if re.search(r"^ttng\.tc_gen5|-> tensor<[^>]*#mma\d*>", dot)]
            found[compiled.hash] = {"kernel": kernel._replace(shared=compiled.metadata.shared)}
            found[compiled.hash] |= {"tensor_memory": compiled.metadata.tmem_size}
            found[compiled.hash] |= {"dots": len(dots), "on_tensor_cores": len(on_tensor_cores)}

        capability = int(re.search(r"\d+", arch)[0])
        with precompile.compiling(capability, keep):
            call()
        for line in found.values():
            print(json.dumps({"case": name} | line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
