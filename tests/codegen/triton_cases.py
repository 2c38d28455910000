"""The Triton kernels as they ship, compiled for a GPU that is not here: Triton and its assembler need none.

A case solves a problem of fastattn/check/cases.py with the backend triton under `precompile.compiling`, so tiles,
warps, stages and the specialised arguments are those of a real launch. Tensors are on the CPU: only dtype, strides and
alignment are looked at.

Triton decides between compiler and interpreter when @triton.jit runs, and a test session on a CPU is interpreted. So
this is a program, which prints a JSON line for every kernel of the group's cases:

    PYTHONPATH=.:tools python tests/codegen/triton_cases.py GROUP
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import fastattn.kernels.mask
import precompile
import torch
from fastattn.kernels.search import choose

import fastattn
from fastattn.backends.calls import NormCall
from fastattn.check import cases
from fastattn.generate import beams, sampling
from fastattn.nn import DecoderCache
from fastattn.ops.decode_attention import write_and_attend

LARGE = (2, 4, 1024, 1024)  # batch, heads, queries, keys: long enough for the largest tiles
CPU, BFLOAT16 = torch.device("cpu"), torch.bfloat16


def solve(op: str, arguments: dict[str, Any], dtype: str, backward: bool = True) -> None:
    """dtype "tf32": float32 as torch multiplies it with allow_tf32."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    p = getattr(cases, op)(**arguments, dtype=getattr(torch, dtype.replace("tf32", "float32")))
    cases.solve(p if backward else p._replace(differentiable=False), "triton")


def attention(dtype: str, D: int, words: str, backward: bool = True, sizes: tuple[int, ...] = LARGE) -> None:
    """words: "padding" is of keys, "tensors" adds a bool mask; in all, also "dropout" (or "least", a threshold of 1),
    "bias" (or "key bias", which all queries share, or "relative bias"), "softcap" and "dlse", a gradient of lse."""
    B, H, Lq, Lk = sizes
    mask = {"is_causal": True} | ({"attn_mask": torch.ones(B, 1, Lq, Lk).bool()} if "tensors" in words else {})
    if "tensors" in words or "padding" in words:
        mask["key_padding"] = torch.ones(B, Lk).bool()
    given = dict(zip(("B", "H", "Lq", "Lk", "D", "mask"), (*sizes, D, mask), strict=True))
    if "relative bias" in words:
        given["relative_bias"] = (H, Lq + Lk - 1)
    elif "bias" in words:
        given["bias"] = (1, 1, 1, Lk) if "key bias" in words else (1, H, Lq, Lk)
    given["bias_dtype"] = torch.float32
    given["dropout_p"] = 2**-16 if "least" in words else 0.1 * ("dropout" in words)
    given |= {"softcap": 50.0 if "softcap" in words else None, "return_lse": "dlse" in words}
    solve("attention", given, dtype, backward)


def prepare_mask(kind: str, *layout: int, has_classes: bool = False) -> None:
    """kind: "padding", "packed" sequences, a bool "matrix", or several of them."""
    B, H, L = 2, 4, 1024
    given: dict[str, Any] = {"is_causal": True}
    if "padding" in kind:
        given["key_padding"] = given["query_padding"] = torch.ones(B, L, dtype=torch.bool)
    if "packed" in kind:
        given["cu_seqlens_q"] = torch.tensor([0] + [L] * 8, dtype=torch.int32)
    if "matrix" in kind:
        given["attn_mask"] = torch.ones(B, H, L, L, dtype=torch.bool)
    for by_key in (False, True):
        layout_ = fastattn.masks.Layout(by_key, *layout, has_classes=has_classes)
        fastattn.AttentionMask(**given).prepare(L, L, layout_, CPU, fastattn.kernels.mask.prepare_mask)


def decode_attention(dtype: str, head_dim: int, keys: str) -> None:
    """keys: "of beams", found by ancestors, or "of beams, grouped" by four heads; "shared" by beams; "split" among
    several programs; of one query in many sequences, "own"; "one" of one sequence."""
    sizes = {"split": (1, 1, 2, 1024), "own": (32, 1, 8, 64), "one": (1, 1, 1, 1)}
    given = dict(zip(("batch", "queries", "heads", "positions"), sizes.get(keys, (32, 5, 8, 64)), strict=True))
    given |= {"heads_k": 2 if "grouped" in keys else given["heads"], "rows": None if "of beams" in keys else 1}
    given |= {"ancestors": "of beams" in keys, "lengths": [0] * given["batch"], "head_dim": head_dim}
    if "written" not in keys:
        return solve("decode_attention", given, dtype)
    p = cases.decode_attention(**given, dtype=getattr(torch, dtype))
    (query, key, value), (B, W, H, D) = p.tensors.values(), p.tensors["query"].shape
    query, *new = query.new_zeros(B, W, 3 * H * D).unflatten(2, (3 * H, D)).split(H, 2)
    lengths, ancestors = p.options["lengths"], p.options.get("ancestors")
    write_and_attend(query, key, value, *new, lengths, lengths, ancestors, scale=1.0, backend="triton")


def layer_norm(dtype: str, hidden: int, **options: Any) -> None:
    rows = 2 * precompile.MULTIPROCESSORS * max(4096 // hidden, 1)
    solve("add_layer_norm", {"rows": (rows,), "hidden": hidden, "dropout_p": 0.1} | options, dtype)


def layer_norm_under_autocast(x_dtype: torch.dtype, hidden: int, dropout_p: float) -> None:
    """What a layer's residual connection launches: x, its gradient and what products read of 16 bits, all else
    float32."""
    from fastattn.kernels.add_layer_norm import add_layer_norm_bwd, add_layer_norm_fwd

    residual, weight = torch.zeros(2 * precompile.MULTIPROCESSORS * 4096 // hidden, hidden), torch.zeros(hidden)
    rng = torch.zeros(2, dtype=torch.int64) if dropout_p > 0 else None
    call = NormCall(residual.to(x_dtype), residual, weight, weight, weight, rng, 1e-6, dropout_p, False)
    add_layer_norm_fwd(call, out_dtype=x_dtype)
    out, z, statistics = add_layer_norm_fwd(call, read=call.x)
    add_layer_norm_bwd(out, None, call._replace(x=z), statistics, True, x_dtype)


def feed_forward(
    dtype: str, activation: str, p: float = 0.1, tokens: int = 512, d: int = 512, d_ff: int = 2048
) -> None:
    """Few tokens, as in decoding, are cut smaller."""
    sizes = {"tokens": (tokens,), "d": d, "d_ff": d_ff, "d_out": d}
    solve("feed_forward", {"activation": activation, "dropout_p": p, **sizes}, dtype)


def cross_entropy(dtype: str, classes: int, backward: bool = True) -> None:
    sizes = {"tokens": (8,), "d": 64, "classes": classes}
    solve("linear_cross_entropy", {"has_bias": False, "label_smoothing": 0.1, **sizes}, dtype, backward)


def search(dtype: str, num_beams: int, n_vocab: int) -> None:
    """A step of it; with 0 beams of greedy search. All beams become sentences."""
    cache = DecoderCache(2, num_beams or 1, 64, CPU)
    logits = torch.zeros(2, cache.rows, n_vocab, dtype=getattr(torch, dtype))
    this = beams._Beams(cache, 1, 2, 0.7, num_beams) if num_beams else sampling._Greedy(cache, 1, 2)
    cache.make_ancestors()
    choose(logits, this.state, cache, 2)


# A kernel takes a second or two to compile, so each flag, dtype, size and architecture is there, not every product.
# Each line: architectures; the function; its arguments.
GROUPS: dict[str, list[tuple[Any, ...]]] = {
    "attention": [
        ("sm_90a sm_80", attention, "bfloat16", 64, "causal"),
        ("sm_90a", attention, "bfloat16", 128, "causal"),
        ("sm_90a", attention, "bfloat16", 256, "causal"),
        ("sm_90a", attention, "float16", 128, "tensors, dropout, bias"),
        ("sm_90a", attention, "float32", 64, "tensors, bias, dlse"),
        ("sm_80", attention, "bfloat16", 64, "tensors, dropout, bias, dlse"),
        ("sm_80", attention, "float16", 128, "causal"),
        ("sm_90a", attention, "bfloat16", 64, "relative bias"),
        ("sm_90a", attention, "bfloat16", 128, "relative bias, softcap"),
        ("sm_80", attention, "bfloat16", 128, "relative bias"),
        ("sm_80", attention, "bfloat16", 64, "softcap"),
        ("sm_90a", attention, "bfloat16", 128, "causal, dropout", False),
        ("sm_80", attention, "bfloat16", 128, "tensors, bias", False),
    ],
    "attention of short sequences": [
        ("sm_90a", attention, "bfloat16", 64, "padding, dropout", True, (2, 4, 32, 32)),
        ("sm_90a", attention, "bfloat16", 64, "padding, dropout", True, (2, 4, 64, 64)),
        ("sm_90a", attention, "bfloat16", 64, "padding, dropout", True, (2, 4, 20, 50)),
        ("sm_90a", attention, "bfloat16", 64, "tensors, dropout, bias, dlse", True, (2, 4, 64, 64)),
        ("sm_90a sm_80", attention, "bfloat16", 128, "padding, dropout", True, (2, 4, 64, 64)),
        ("sm_90a", attention, "bfloat16", 128, "padding, dropout", True, (2, 4, 32, 32)),
        ("sm_90a", attention, "float32", 64, "padding, dropout", True, (2, 4, 32, 32)),
        ("sm_90a", attention, "float32", 128, "padding, dropout", True, (2, 4, 32, 32)),
        ("sm_80", attention, "float16", 64, "padding, dropout", True, (2, 4, 64, 64)),
    ],
    # A size of 1 is a constant for Triton: where a kernel has it as an argument, the code is another.
    "sizes of 1": [
        ("sm_90a", attention, "bfloat16", 1, "least dropout", True, (1, 1, 1, 1)),
        *(
            ("sm_90a", attention, "bfloat16", 64, words, True, sizes)
            for sizes in ((1, 1, 1, 80), (1, 1, 80, 1))
            for words in ("causal", "tensors, dropout, bias", "relative bias, softcap")
        ),
        ("sm_90a", attention, "bfloat16", 64, "key bias", True, (2, 4, 80, 80)),
        ("sm_90a", decode_attention, "bfloat16", 1, "one"),
        ("sm_90a", layer_norm, "bfloat16", 1),
        ("sm_90a", partial(layer_norm, rms=True), "bfloat16", 1),
        *(("sm_90a", feed_forward, "bfloat16", activation, 0.1, 1, 1, 1) for activation in ("relu", "swiglu")),
        ("sm_90a", feed_forward, "bfloat16", "gelu", 0.1, 512, 512, 1),
        *(("sm_90a", cross_entropy, dtype, 1) for dtype in ("bfloat16", "float32")),
    ],
    # What needs the most shared memory, or tensor memory. No machine of the project has them.
    "other GPUs": [
        ("sm_89 sm_100a sm_120a", *call)
        for call in (
            (attention, "bfloat16", 64, "causal"),
            (attention, "bfloat16", 256, "causal"),
            (attention, "bfloat16", 128, "tensors, dropout, bias"),
            (attention, "bfloat16", 128, "relative bias, softcap"),
            (decode_attention, "float32", 256, "of beams"),
            (layer_norm, "bfloat16", 16384),
            *((feed_forward, "bfloat16", "relu"), (feed_forward, "bfloat16", "swiglu"), (feed_forward, "tf32", "silu")),
            (cross_entropy, "bfloat16", 32000),
        )
    ],
    "the most shared memory": [  # In float32 all devices have the same tiles, in 16 bits sm_80 has its own.
        ("sm_120a", attention, "float32", 256, "tensors, bias"),
        ("sm_80 sm_86 sm_120a", attention, "bfloat16", 256, "tensors, dropout, bias"),
    ],
    "mask": [
        # Tiles of the CUDA kernels.
        *(("sm_90a", partial(prepare_mask, has_classes=True), "packed matrix, padding", *tile)
          for tile in ((192, 128), (128, 128), (128, 64))),
        ("sm_90a", prepare_mask, "matrix", 128, 64),
        ("sm_90a", prepare_mask, "padding", 128, 64),
        ("sm_90a", prepare_mask, "packed, padding", 0, 0),
        ("sm_80", prepare_mask, "packed matrix, padding", 16, 16),
        ("sm_80", prepare_mask, "matrix, padding", 0, 0),
    ],
    "decode_attention": [
        *(
            ("sm_80 sm_90a", decode_attention, dtype, head_dim, keys)
            for dtype in ("bfloat16", "float32")
            for head_dim in (64, 128, 256)
            for keys in ("of beams", "shared", *(("of beams, grouped", "own") if dtype == "float32" else ()))
        ),
        ("sm_80", decode_attention, "bfloat16", 64, "split"),
        *(("sm_80 sm_90a", decode_attention, dtype, 64, "of beams, written") for dtype in ("bfloat16", "float32")),
        ("sm_90a", decode_attention, "float16", 128, "split"),
        ("sm_90a", decode_attention, "float32", 256, "split"),
    ],
    "norms": [
        *(("sm_90a", layer_norm, "bfloat16", hidden) for hidden in (64, 512, 4096, 8192, 16384)),
        ("sm_90a", layer_norm, "float32", 1024),
        ("sm_90a", partial(layer_norm, dropout_p=0.0), "bfloat16", 1024),
        ("sm_90a", partial(layer_norm, rms=True), "bfloat16", 1024),
        ("sm_90a", partial(layer_norm, eps_on_std=True), "bfloat16", 512),
        ("sm_80", partial(layer_norm, x_bias=True), "bfloat16", 4096),
        ("sm_90a", layer_norm_under_autocast, BFLOAT16, 512, 0.1),
        ("sm_80", layer_norm_under_autocast, torch.float16, 1024, 0.0),
    ],
    "feed_forward": [
        *(("sm_90a", feed_forward, "bfloat16", activation) for activation in ("relu", "gelu", "silu", "geglu")),
        *(("sm_80", feed_forward, "bfloat16", activation) for activation in ("relu", "swiglu")),
        ("sm_80", feed_forward, "float16", "gelu"),
        ("sm_90a", feed_forward, "bfloat16", "swiglu", 0.0),
        *(("sm_90a", feed_forward, dtype, "silu") for dtype in ("float32", "tf32")),
        ("sm_90a sm_80", feed_forward, "bfloat16", "geglu", 0.1, 64),
    ],
    "search": [
        ("sm_90a sm_80", search, "bfloat16", 5, 32000),
        ("sm_90a", search, "float32", 5, 262144),
        ("sm_80 sm_90a", search, "float16", 16, 10007),
        *(("sm_90a", search, "float32", num_beams, n_vocab) for num_beams, n_vocab in ((0, 32000), (1, 1))),
    ],
    "cross_entropy": [
        *(("sm_90a", cross_entropy, "bfloat16", classes) for classes in (1000, 10007, 32000)),
        ("sm_90a", cross_entropy, "bfloat16", 32000, False),
        ("sm_90a", cross_entropy, "float32", 32000),
        ("sm_80", cross_entropy, "float16", 32000),
    ],
}  # fmt: skip


def compile_case(arch: str, function: Any, *arguments: Any) -> None:
    """Prints what the launches of a case compile."""
    from machine_code import kernels_of

    found = {}

    def keep(compiled: Any) -> None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            (kernel,) = kernels_of(Path(cubin.name), arch)
        dots = re.findall(r"(?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma) .*", compiled.asm["ttgir"])
        on_tensor_cores = [dot for dot in dots if re.search(r"^ttng\.tc_gen5|-> tensor<[^>]*#mma\d*>", dot)]
        counts = {"dots": len(dots), "on_tensor_cores": len(on_tensor_cores)}
        counts["tensor_memory"] = compiled.metadata.tmem_size
        found[compiled.hash] = {"kernel": kernel._replace(shared=compiled.metadata.shared), **counts}

    with precompile.compiling(int(re.search(r"\d+", arch)[0]), keep):
        function(*arguments)
    for line in found.values():
        print(json.dumps({"case": " ".join(map(str, arguments))} | line), flush=True)


if __name__ == "__main__":
    for archs, *case in GROUPS[sys.argv[1]]:
        for each in archs.split():
            compile_case(each, *case)
