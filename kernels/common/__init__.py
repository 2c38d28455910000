"""What the Triton kernels of two or more ops share.

INTERPRETED is True when Triton runs its kernels on the CPU (TRITON_INTERPRET=1, read when triton decorates a kernel, so
it must be set before the first import). The interpreter is then repaired; see interpreter.py.
"""

import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    from .interpreter import repair

    repair()
