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
SOURCES = ("forward_sm90", "backward_dq_sm90", "backward_dkdv_sm90", "bias_gradient_sm90")
KINDS = ("false", "true")  # kGeneral
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
def orders() -> dict[str, dict[str, str]]:
    """Source -> template arguments -> order, of the kernels that multiply."""
    found: dict[str, dict[str, str]] = {source: {} for source in SOURCES}
    for _, symbol, sass in compiled_cuda.functions(cuda_extension(), "-arch", "sm_90a"):
        for source in SOURCES:
            if f"{source}_kernel" in symbol:
                found[source][compiled_cuda.demangled(symbol)[1].replace("attention::", "")] = order(sass)
    return found


def kernels(source: str) -> dict[str, str]:
    return orders()[source]


@pytest.mark.parametrize("source", SOURCES)
def test_no_spills_and_no_serialized_products(source: str) -> None:
    found = [kernel for kernel in cuda_kernels() if source in kernel.name]
    assert found and {kernel.arch for kernel in found} == {"sm_90a"}, "only a Hopper can run it"
    for kernel in found:
        assert kernel.spills == 0 and kernel.stack == 0 and not kernel.serialized, kernel
        # setmaxnreg shares out what the launch gives, as csrc/host takes for granted: with fewer, consumers would hang.
        assert kernel.registers == 65536 // (32 * kernel.warps) // 8 * 8, kernel


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


# A step of the backward, without and with a bias or dropout; the latter has exponentials for both. Head dimensions
# beyond 128 have the second kind alone.
def backward_steps(products: int, exponentials: int, rest: str) -> tuple[str, str]:
    """Products to begin with, exponentials a thread beside the last ones, and what follows."""
    return tuple("G" * products + "W1" + "x" * exponentials * n + rest for n in (1, 2))


@pytest.mark.parametrize("head_dim, keys", [(64, 128), (96, 128), (128, 128), (256, 64)])
def test_order_of_dq(head_dim: int, keys: int) -> None:
    """All exponentials are beside dP's product. In masked tiles unseen keys are cleared before dq's, with a barrier."""
    products = "G" * (keys // 16) + "W0"
    plain, _ = backward_steps(2 * head_dim // 16, keys // 2, "W0" + products)
    masked, general = backward_steps(2 * head_dim // 16, keys // 2, "W0B" + products)
    for dtype in TYPES:
        found = kernels("backward_dq_sm90")
        assert found[f"{dtype}, Tiles<{head_dim}>, true"].count(general) == 1
        if head_dim <= 128:
            marks = found[f"{dtype}, Tiles<{head_dim}>, false"]
            assert marks.count(plain) == 1 and marks.count(masked) == 1, marks


DK, DV, DK_DV, DK_DV_DQ = (f"(Makes){i}" for i in range(4))
DKDV = {
    # As many registers as 128 queries take leave none for P beside dP: dv's and dk's products go together.
    (64, DK_DV): backward_steps(8, 64, "W0" + "G" * 16 + "W0"),
    # dv's product is beside the work on dS.
    (96, DK_DV): backward_steps(12, 32, "G" * 4 + "W1" + "G" * 4 + "W0"),
    (128, DK_DV): backward_steps(16, 32, "G" * 4 + "W1" + "G" * 4 + "W0"),
    (256, DK): backward_steps(32, 32, "W0" + "G" * 4 + "W0"),
    (256, DV): ("", "G" * 16 + "W0" + "x" * 64 + "G" * 4 + "W0"),
    # dq leaves for memory beside dk's product.
    (128, DK_DV_DQ): backward_steps(16, 32, "G" * 4 + "W1B" + "G" * 12 + "W1BBW0"),
}


@pytest.mark.parametrize("head_dim, makes", DKDV)
def test_order_of_dk_and_dv(head_dim: int, makes: str) -> None:
    plain, general = DKDV[head_dim, makes]
    for dtype in TYPES:
        found = {
            kind: kernels("backward_dkdv_sm90").get(f"{dtype}, Tiles<{head_dim}>, {kind}, {makes}") for kind in KINDS
        }
        assert (found["true"] is None) == (makes == DK_DV_DQ) and (found["false"] is None) == (head_dim > 128)
        assert found["true"] is None or found["true"].count(general) == 1, found
        assert found["false"] is None or found["false"].count(plain) == 2, found


def test_order_of_narrow_heads_and_a_sum() -> None:
    """Head dimension 64, dq in memory: no registers for exponentials beside a product; products still go together."""
    for dtype in TYPES:
        marks = kernels("backward_dkdv_sm90")[f"{dtype}, Tiles<64>, false, {DK_DV_DQ}"]
        assert len(re.findall("G" * 8 + "W1x*W0x*" + "G" * 8 + "B" + "G" * 16 + "W1BBW0", marks)) == 2, marks


def test_order_of_bias_gradient() -> None:
    """Exponentials, for a bias and for none, are beside the first part of dP's product."""
    for dtype in TYPES:
        marks = kernels("bias_gradient_sm90")[dtype]
        assert marks.endswith("GGGGW1" + "x" * 128 + "GGGGW1W0"), marks
