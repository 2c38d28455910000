"""The Triton kernels as they ship, compiled for GPUs that are not here: Triton and its assembler need none.

A case runs a room's own Python with launches that compile instead of running (`dry_launch`), so tile sizes, warps,
stages and the specialisation of every argument (16-byte aligned pointers, strides divisible by 16, ...) are those of
the launch itself. Tensors lie on the CPU: only their dtype, strides and the alignment of their address are looked at.

Triton decides between compiler and interpreter when @triton.jit runs, and a test session on a CPU is interpreted. So
this file is also a program, `python compiled_triton.py SLICE SLICES`: it compiles every SLICES-th case and prints a
JSON line for each kernel. `kernels()` runs it, in as many processes as there are cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from compiled_sass import Kernel, instruction_mix

ROOT = Path(__file__).resolve().parents[1]
MULTIPROCESSORS = 132  # of the GPU that launches believe in


@dataclass(frozen=True)
class Attention:
    """flags: "causal" needs no tensor; "lists" reads tile lists and element masks; "dropout" and "bias" on top, and
    "dlse", a gradient of lse."""

    arch: str
    dtype: str
    head_dim: int
    flags: str
    backward: bool = True

    def __str__(self) -> str:
        return f"{self.dtype} D{self.head_dim} {self.flags}"

    def launch(self) -> None:
        import torch

        from fastattn import AttentionMask
        from fastattn.kernels import attention

        B, H, L = 2, 4, 1024  # long enough for the largest tiles of the table
        shape = (B, H, L, self.head_dim)
        q, k, v, out, dout = (torch.zeros(shape, dtype=getattr(torch, self.dtype)) for _ in range(5))
        restrictions: dict[str, Any] = {"is_causal": True}
        if "lists" in self.flags:
            restrictions["attn_mask"] = torch.ones(B, 1, L, L, dtype=torch.bool)
            restrictions["key_padding"] = torch.ones(B, L, dtype=torch.bool)
        bias = torch.zeros(1, H, L, L) if "bias" in self.flags else None
        dropout_p, rng_state = _dropout("dropout" in self.flags)
        options = (AttentionMask(**restrictions, bias=bias), self.head_dim**-0.5, dropout_p, rng_state)
        attention.attention_fwd(q, k, v, *options)
        if self.backward:
            lse = torch.zeros(B, H, L)
            dlse = torch.zeros(B, H, L) if "dlse" in self.flags else None
            attention.attention_bwd(dout, dlse, q, k, v, out, lse, *options, bias is not None)
            for wanted in ((range(H),), "argmax"):
                attention.attention_weights(q, k, lse, *options, wanted)


@dataclass(frozen=True)
class MaskLists:
    """A padding mask's intervals and tile lists, 4 x 4096 by 4096, tiles of 128 x 64."""

    arch: str

    def __str__(self) -> str:
        return "padding"

    def launch(self) -> None:
        import torch
        from fastattn.kernels.attention import lists

        from fastattn import AttentionMask

        padding = torch.ones(4, 4096, dtype=torch.bool)
        mask = AttentionMask(key_padding=padding, query_padding=padding, is_causal=True)
        lists.tile_lists(mask, 4096, 4096, 128, 64, padding.device)


@dataclass(frozen=True)
class LayerNorm:
    arch: str
    dtype: str
    hidden: int
    dropout: bool = True
    rms: bool = False
    x_bias: bool = False

    def __str__(self) -> str:
        flags = ", dropout" * self.dropout + ", rms" * self.rms + ", x_bias" * self.x_bias
        return f"{self.dtype} hidden {self.hidden}{flags}"

    def launch(self) -> None:
        import torch

        from fastattn.kernels import add_layer_norm

        rows = torch.empty(2 * MULTIPROCESSORS * max(4096 // self.hidden, 1), self.hidden).to(
            getattr(torch, self.dtype)
        )
        weight = rows[0].clone()
        bias, x_bias, dropout = None if self.rms else weight, weight if self.x_bias else None, _dropout(self.dropout)
        *_, statistics = add_layer_norm.add_layer_norm_fwd(rows, rows, weight, bias, 1e-6, *dropout, x_bias)
        with _multiprocessors():
            add_layer_norm.add_layer_norm_bwd(rows, rows, rows, weight, bias, statistics, *dropout, True, x_bias)


@dataclass(frozen=True)
class EmbedLayerNorm:
    """dtype: of the embedding; the result is bfloat16, as under autocast."""

    arch: str
    dtype: str
    hidden: int
    position: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} hidden {self.hidden}, dropout{', position' * self.position}"

    def launch(self) -> None:
        import torch

        from fastattn.kernels import embed_layer_norm

        embedding = torch.empty(1024, self.hidden).to(getattr(torch, self.dtype))
        tokens, weight = torch.zeros(8192, dtype=torch.int64), torch.empty(self.hidden)
        inputs = (embedding, weight, weight, tokens, torch.empty(256, self.hidden), tokens if self.position else None)
        inputs, dropout = (*inputs, 64, 2.0), _dropout(True)
        out, statistics = embed_layer_norm.embed_layer_norm_fwd(*inputs, 1e-6, *dropout, torch.bfloat16)
        with _multiprocessors():
            embed_layer_norm.embed_layer_norm_bwd(out, *inputs, statistics, *dropout)


def _multiprocessors() -> Any:
    """On a CPU there would be one, and fewer partial sums of the weight gradients to add up."""
    from fastattn.kernels.common import norm

    return mock.patch.object(norm, "multiprocessors", lambda x: MULTIPROCESSORS)


@dataclass(frozen=True)
class FeedForward:
    """dtype "tf32": float32 as torch multiplies it with allow_tf32. few: tokens as in decoding, cut smaller."""

    arch: str
    dtype: str
    activation: str
    dropout: bool = True
    few: bool = False

    d, d_ff = 512, 2048

    @property
    def gated(self) -> bool:
        return self.activation in ("geglu", "swiglu")

    def __str__(self) -> str:
        return f"{self.dtype} {self.activation}{', dropout' * self.dropout}{', few tokens' * self.few}"

    def launch(self) -> None:
        import torch

        from fastattn.kernels import feed_forward

        torch.backends.cuda.matmul.allow_tf32 = self.dtype == "tf32"
        x = torch.zeros(64 if self.few else 512, self.d, dtype=getattr(torch, self.dtype.replace("tf32", "float32")))
        width = 2 * self.d_ff if self.gated else self.d_ff
        weight1, bias1, weight2 = x.new_zeros(width, self.d), x.new_zeros(width), x.new_zeros(self.d, self.d_ff)
        options = (x, weight1, bias1, weight2, x.new_zeros(self.d), self.activation, *_dropout(self.dropout))
        _, saved = feed_forward.feed_forward_fwd(*options)
        feed_forward.feed_forward_bwd(x, *options, saved)


@dataclass(frozen=True)
class CrossEntropy:
    """gradient "now": made in the forward; "later": from dloss; "none": of a loss that is only read."""

    arch: str
    dtype: str
    n_class: int
    gradient: str = "now"
    bias: bool = False

    def __str__(self) -> str:
        return f"{self.dtype} classes {self.n_class} gradient {self.gradient}{', bias' * self.bias}"

    def launch(self) -> None:
        import torch

        from fastattn.kernels import linear_cross_entropy

        x = torch.zeros(8, 64, dtype=getattr(torch, self.dtype))
        weight, target = x.new_zeros(self.n_class, 64), torch.zeros(8, dtype=torch.int64)
        options = (x, weight, weight[:, 0].clone() if self.bias else None, target, 0.1, 0, 64**-0.5)
        if self.gradient == "later":
            linear_cross_entropy.linear_cross_entropy_bwd(torch.zeros(8), *options, "none", (True, True, False))
        else:
            linear_cross_entropy.linear_cross_entropy_fwd(*options, "mean", (self.gradient == "now",) * 2 + (False,))


Case = Attention | MaskLists | LayerNorm | EmbedLayerNorm | FeedForward | CrossEntropy

# A kernel takes a second or two to compile, so each flag, dtype, size and architecture is there, not every product.
CASES: tuple[Case, ...] = (
    Attention("sm_90a", "bfloat16", 64, "causal"),
    Attention("sm_90a", "bfloat16", 128, "causal"),
    Attention("sm_90a", "bfloat16", 256, "causal"),
    Attention("sm_90a", "float16", 128, "lists, dropout, bias"),
    Attention("sm_90a", "float32", 64, "causal"),
    Attention("sm_90a", "float32", 64, "lists, bias, dlse"),
    Attention("sm_80", "bfloat16", 64, "lists, dropout, bias, dlse"),
    Attention("sm_80", "float16", 128, "causal"),
    Attention("sm_90a", "bfloat16", 128, "causal, dropout", backward=False),
    Attention("sm_90a", "bfloat16", 128, "lists", backward=False),
    Attention("sm_80", "bfloat16", 128, "lists, dropout, bias", backward=False),
    Attention("sm_80", "bfloat16", 64, "causal, dropout", backward=False),
    *(LayerNorm("sm_90a", "bfloat16", hidden) for hidden in (64, 512, 4096, 8192, 16384)),
    LayerNorm("sm_90a", "bfloat16", 1024, dropout=False),
    LayerNorm("sm_90a", "float32", 1024),
    LayerNorm("sm_80", "bfloat16", 512),
    *(LayerNorm(arch, "bfloat16", hidden, rms=True) for arch, hidden in (("sm_90a", 1024), ("sm_80", 4096))),
    *(LayerNorm(arch, "bfloat16", hidden, x_bias=True) for arch, hidden in (("sm_90a", 512), ("sm_80", 4096))),
    *(MaskLists(arch) for arch in ("sm_90a", "sm_80")),
    EmbedLayerNorm("sm_90a", "float32", 512),
    EmbedLayerNorm("sm_90a", "bfloat16", 1024, position=True),
    EmbedLayerNorm("sm_80", "float32", 4096, position=True),
    *(FeedForward("sm_90a", "bfloat16", activation) for activation in ("relu", "gelu", "silu", "geglu")),
    *(FeedForward("sm_90a", "bfloat16", activation, dropout=False) for activation in ("gelu", "swiglu")),
    *(FeedForward("sm_80", "bfloat16", activation) for activation in ("relu", "swiglu")),
    FeedForward("sm_80", "float16", "gelu"),
    *(FeedForward("sm_90a", dtype, "silu") for dtype in ("float32", "tf32")),
    *(FeedForward(arch, "bfloat16", "geglu", few=True) for arch in ("sm_80", "sm_90a")),
    *(CrossEntropy("sm_90a", "bfloat16", n_class) for n_class in (1000, 10007, 32000)),
    *(CrossEntropy("sm_90a", "bfloat16", 32000, gradient) for gradient in ("later", "none")),
    CrossEntropy("sm_90a", "float32", 32000),
    *(CrossEntropy("sm_90a", "bfloat16", n_class, bias=True) for n_class in (10007, 32000)),
    CrossEntropy("sm_80", "float16", 32000, "later"),
)


def _dropout(wanted: bool) -> tuple[float, Any]:
    """dropout_p and rng_state."""
    import torch

    return (0.1, torch.zeros(2, dtype=torch.int64)) if wanted else (0.0, None)


def kernels() -> list[Kernel]:
    """Every kernel of every case, in the order of CASES."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    slices = min(os.cpu_count() or 1, len(CASES))

    def compile_slice(number: int) -> list[tuple[int, Kernel]]:
        command = [sys.executable, __file__, str(number), str(slices)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return [(line.pop("place"), Kernel(**line)) for line in lines]

    with ThreadPoolExecutor(slices) as pool:
        found = [placed for part in pool.map(compile_slice, range(slices)) for placed in part]
    return [kernel for _, kernel in sorted(found, key=lambda placed: placed[0])]


def _tool(name: str, *arguments: str) -> str:
    """Output of one of the tools that come with Triton."""
    import triton

    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([binary, *arguments], capture_output=True, text=True, check=True).stdout


def versions() -> dict[str, str]:
    """Of the compilers of these kernels."""
    import triton

    return {"triton": triton.__version__, "ptxas": re.search(r"V([\d.]+)", _tool("ptxas", "--version"))[1]}


def dissect(compiled: Any, case: Case) -> Kernel:
    """A triton CompiledKernel as a Kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        sass = _tool("nvdisasm", "-c", cubin.name)
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", "-res-usage", cubin.name))
    dots = re.findall(r"= (?:tt\.dot|ttng\.warp_group_dot) .*", compiled.asm["ttgir"])
    return Kernel(
        language="triton",
        arch=case.arch,
        name=compiled.metadata.name,
        case=str(case),
        warps=compiled.metadata.num_warps,
        registers=int(usage[1]),
        stack=int(usage[2]),
        shared=compiled.metadata.shared,
        dots=len(dots),
        tensor_core_dots=sum(re.search(r"-> tensor<[^>]*#mma\d*>", dot) is not None for dot in dots),
        instructions=instruction_mix(sass),
    )


class NoDriver:
    """The few answers Triton's launcher wants from a driver before it compiles. capability: 90 for sm_90."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)  # Triton makes 90 90a

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # each architecture its own device: kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compile_only(each: Callable[[Any], None] = lambda compiled: None) -> Iterator[None]:
    """Inside, `kernel[grid](...)` compiles and launches nothing; each: what to do with a compiled kernel."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def instead(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        each(compiled)
        return compiled

    with mock.patch.object(JITFunction, "run", instead):
        yield


@contextlib.contextmanager
def dry_launch(case: Case) -> Iterator[list[Kernel]]:
    """Inside, launches compile for the case's architecture; yields the growing list of kernels.

    For a process that does nothing else: afterwards Triton still believes in a GPU.
    """
    from triton.runtime.driver import driver

    found: list[Kernel] = []

    def keep(compiled: Any) -> None:
        if (kernel := dissect(compiled, case)) not in found:
            found.append(kernel)

    driver.set_active(NoDriver(int(case.arch.removeprefix("sm_").removesuffix("a"))))
    with compile_only(keep):
        yield found


def main(slice_number: int, slices: int) -> None:
    for place in range(slice_number, len(CASES), slices):
        with dry_launch(CASES[place]) as found:
            CASES[place].launch()
        for kernel in found:
            print(json.dumps({"place": place} | asdict(kernel)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
