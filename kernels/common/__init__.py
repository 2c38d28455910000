"""What the Triton kernels of two or more ops share.

INTERPRETED is True if Triton runs its kernels on the CPU (TRITON_INTERPRET=1, which is read when triton decorates a
kernel, so it must be set before the first import). The interpreter is then repaired; see interpreter.py.

Every launch passes enable_fp_fusion=True: a product and a sum become one instruction. The instruction counts in the
kernels' headers assume it. Triton 3.9 warns about launches without it, because 3.10 turns it off for them.
"""

import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    from .interpreter import repair

    repair()
