"""Facts that several backends share: the kernels' dtypes, gated activations, the numbers of dropout, TF32, parts of a
batch."""

from __future__ import annotations

import torch

# The first part of all names: of modules, and of operators in torch.library. A copy that tools/export_hub.py makes has
# another name, so it can be in one process with an installed fastattn.
PACKAGE = __name__.partition(".")[0]

# The dtypes that the Triton and CUDA kernels take. csrc/common/dtype_switch.h numbers them in this order.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# How the reason begins where a backend has no kernel for an op, or for what a call returns, whatever the sizes.
NO_KERNEL = "there is no kernel for"

# Gated activations of the feed-forward network, and the function that makes the gate.
GATED = {"reglu": "relu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "swiglu": "silu"}

# The dropout rule (fastattn/backends/reference/philox.py) draws one number below this for each element.
DROPOUT_NUMBERS = 1 << 16


def dropout_threshold(dropout_p: float) -> int:
    """Elements whose number is below it are dropped; DROPOUT_NUMBERS drops all."""
    return round(dropout_p * DROPOUT_NUMBERS)


def dropout_scale(dropout_p: float) -> float:
    """The factor of the elements that are kept."""
    return 0.0 if dropout_p >= 1 else 1 / (1 - dropout_p)


def dropout_constants(dropout_p: float) -> tuple[int, float]:
    """(threshold, scale), as the kernels take them."""
    return dropout_threshold(dropout_p), dropout_scale(dropout_p)


# torch.backends.cuda.matmul.fp32_precision, about 10x faster than by the attribute: every launch in float32 reads it.
_precision = torch._C._get_fp32_precision_getter


def uses_tf32() -> bool:
    """Whether torch multiplies float32 in TF32 on a GPU; the kernels follow it. Not by default."""
    return _precision("cuda", "matmul") == "tf32"


def bias_parts(batch: int, turns: int, programs: int, multiprocessors: int) -> int:
    """Into how many parts of the batch the gradient of a bias that it shares is summed up, each by its own programs.

    turns: loop iterations of one of the `programs` if the batch is not split. About two programs a multiprocessor are
    enough; with few turns the sum of the parts would take longer than they do.
    """
    if turns < 8 or programs == 0:
        return 1
    return max(1, min(batch, 2 * multiprocessors // programs))
