"""What nvcc makes of attention's Hopper kernels: nothing spills, wgmma is not serialized, and it overlaps as designed.

ptxas may move the wait for a product to before the work that was meant to be done beside it, and says nothing. So the
order of the machine code is read: tensor core products, waits, barriers and exponentials.
"""

from __future__ import annotations

import re
import sys
from functools import cache

import host_build
import pytest

sys.path.insert(0, str(host_build.CSRC.parent / "benchmarks"))

import compiled_cuda  # noqa: E402
from compiled_kernels import cuda_extension, cuda_kernels  # noqa: E402

if reason := compiled_cuda.why_not():
    pytest.skip(reason, allow_module_level=True)

TYPES = ("__half", "__nv_bfloat16")
MARKS = {  # instruction -> its letter; a wait is followed by how many groups it leaves under way
    r"HGMMA": "G",
    r"WARPGROUP\.DEPBAR\S* gsb0, 0x(\d)": "W",
    r"MUFU\.EX2": "x",
    r"BAR\.SYNC": "B",
    r"BAR\.ARV": "b",
}


def order(sass: str) -> str:
    """The marks of a kernel, in the order of its code."""
    found = []
    for instruction in re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.MULTILINE):
        for pattern, letter in MARKS.items():
            if match := re.search(pattern, instruction):
                found.append(letter + (match[1] if match.groups() else ""))
    return "".join(found)


@cache
def kernels(source: str) -> dict[str, str]:
    """Template arguments -> order, of the kernel of a file that multiplies: "forward_sm90" or "backward_sm90"."""
    found = {}
    for arch, symbol, sass in compiled_cuda.functions(cuda_extension()):
        if f"{source}_kernel" in symbol:
            assert arch == "sm_90a", "only a Hopper can run it"
            found[compiled_cuda.demangled(symbol)[1].replace("attention::", "")] = order(sass)
    return found


@pytest.mark.parametrize("source", ["forward_sm90", "backward_sm90"])
def test_no_spills_and_no_serialized_products(source: str) -> None:
    found = [kernel for kernel in cuda_kernels() if source in kernel.name]
    assert found
    for kernel in found:
        assert kernel.spills == 0 and kernel.stack == 0 and not kernel.serialized, kernel


@pytest.mark.parametrize("general", ["false", "true"])
@pytest.mark.parametrize("head_dim, keys", [(64, 128), (96, 128), (128, 128), (256, 64)])
def test_forward_order(head_dim: int, keys: int, general: str) -> None:
    """A step starts Q K^T and the last tile's P V in its turn, and has all exponentials between the waits for them."""
    products = head_dim // 16 + keys // 16
    exponentials = keys // 2 + 2  # of a thread's scores, and the factors of its two rows
    step = f"B{'G' * products}bW1{'x' * exponentials}W0"
    for dtype in TYPES:
        marks = kernels("forward_sm90")[f"{dtype}, Tiles<{head_dim}>, {general}"]
        # With a bias or dropout there is one loop, else one for tiles with a mask and one for those without.
        assert marks.count(step) == (1 if general == "true" else 2), marks
        assert marks.count("W1") == marks.count(step), marks


@pytest.mark.parametrize("dropout", ["false", "true"])
def test_backward_order(dropout: str) -> None:
    """Head dimension 128: the exponentials are beside dP's product, and dq leaves beside dk's."""
    step = rf"{'G' * 8}{'G' * 8}W1{'x' * 32}W0{'G' * 4}B{'G' * 12}W1BBW0"  # S, dP; dv; dq, dk
    for dtype in TYPES:
        marks = kernels("backward_sm90")[f"{dtype}, Tiles<128>, {dropout}"]
        assert marks.count(step) == 2, marks


@pytest.mark.parametrize("dropout", ["false", "true"])
def test_backward_products_of_narrow_heads(dropout: str) -> None:
    """Head dimension 64: S and dP leave too few registers for that; the products still go together."""
    for dtype in TYPES:
        marks = kernels("backward_sm90")[f"{dtype}, Tiles<64>, {dropout}"]
        assert len(re.findall(r"GGGGGGGGW1x*W0x*GGGGGGGGB" + "G" * 16 + "W1BBW0", marks)) == 2, marks
