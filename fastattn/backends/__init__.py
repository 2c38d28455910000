"""The backends: `reference`, `aten` and `cuda` in folders of these names; `triton` is fastattn.kernels.

choice.py decides which backend computes a call, timings.py reads the records of what is fastest. attention_rows.py,
constants.py, cpu_matmul.py and cross_entropy_chunks.py are what several backends share.
"""

from fastattn.backends.choice import (
    BACKENDS,
    GPU_ORDER,
    OPS,
    REGISTRY,
    Backend,
    Implementation,
    Op,
    automatic_order,
    choose,
    has_kernel,
    implementation,
    import_failure,
    likely_backend,
    load_backend,
    recorded_order,
    register,
    requested,
    unsupported_reason,
    use_backend,
)

__all__ = [
    "BACKENDS",
    "GPU_ORDER",
    "OPS",
    "REGISTRY",
    "Backend",
    "Implementation",
    "Op",
    "automatic_order",
    "choose",
    "has_kernel",
    "implementation",
    "import_failure",
    "likely_backend",
    "load_backend",
    "recorded_order",
    "register",
    "requested",
    "unsupported_reason",
    "use_backend",
]
