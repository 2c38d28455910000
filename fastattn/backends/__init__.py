"""The backends: `reference`, `aten` and `cuda` in folders of these names; `triton` is fastattn.kernels.

choice.py decides which backend computes a call. attention_rows.py, constants.py, cpu_matmul.py and
cross_entropy_chunks.py are what several backends share.
"""

from fastattn.backends.choice import (
    BACKENDS,
    GPU_ORDER,
    OPS,
    REGISTRY,
    Backend,
    Implementation,
    automatic_order,
    choose,
    implementation,
    import_failure,
    likely_backend,
    load_backend,
    register,
    request_of_all_ops,
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
    "automatic_order",
    "choose",
    "implementation",
    "import_failure",
    "likely_backend",
    "load_backend",
    "register",
    "request_of_all_ops",
    "requested",
    "unsupported_reason",
    "use_backend",
]
