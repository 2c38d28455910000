"""Repairs of Triton's CPU interpreter (triton 3.5 to 3.9). With them it computes what a GPU computes.

The interpreter keeps bfloat16 as the raw bits in a numpy uint16 array. Without repairs, it
  1. multiplies those bit patterns as integers in tl.dot: the result is silently wrong by orders of magnitude;
  2. cuts float32 -> bfloat16 towards zero, where a GPU rounds to nearest even (half of all elements differ by one ulp);
  3. fails on `range(0, tensor)` with numpy >= 2.4, which no longer turns one-element arrays into Python integers;
  4. lists all members of triton.language at every call of a function, tl.sum and tl.cdiv among them: 50 % of the time;
  5. describes the type of every intermediate result again, which is 30 % of the rest.
Elementwise bfloat16 arithmetic stays wrong, so kernels convert to float32 first, as they should for accuracy anyway.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even, as IEEE 754 and the GPU do; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16).reshape(values.shape)


def _widen(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar == tl.bfloat16:
        return TensorHandle(_bfloat16_to_float32(handle.data), tl.float32)
    return handle


def repair() -> None:
    """Install the five repairs. Called once, by kernels/common/__init__.py, only under TRITON_INTERPRET=1."""
    original_dot = InterpreterBuilder.create_dot
    original_cast = InterpreterBuilder.cast_impl
    original_patch = interpreter._patch_lang_tensor
    original_np_dtype = interpreter._get_np_dtype
    describe_tensor = _made_once(tl.tensor.__init__, lambda handle, type: type.name)
    builtins: dict[Any, list[str]] = {}  # of a module or class of triton.language
    np_dtypes: dict[str, Any] = {}

    def create_dot(self, a, b, *rest):
        return original_dot(self, _widen(a), _widen(b), *rest)

    def cast_impl(self, source, target):
        types = (source.dtype.scalar, target.scalar)
        if types == (tl.bfloat16, tl.float32):
            return TensorHandle(_bfloat16_to_float32(source.data), tl.float32)
        if types == (tl.float32, tl.bfloat16):
            return TensorHandle(_float32_to_bfloat16(source.data), tl.bfloat16)
        return original_cast(self, source, target)

    def patch_lang_tensor(tensor, *scope):
        original_patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    def patch_builtin(package, builder, *scope):
        if package not in builtins:
            builtins[package] = [name for name, t in inspect.getmembers(package) if tl.core.is_builtin(t)]
        for name in builtins[package]:
            if tl.core.is_builtin(member := getattr(package, name)):  # it is not replaced at the moment
                interpreter._patch_attr(package, name, member, builder, *scope)

    def init_tensor(self, handle, type):
        describe_tensor(self, handle, type)
        self.handle = handle

    def get_np_dtype(type):
        if type.name not in np_dtypes:
            np_dtypes[type.name] = original_np_dtype(type)
        return np_dtypes[type.name]

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = get_np_dtype
    tl.tensor.__init__ = init_tensor
    tl.block_type.__init__ = _made_once(tl.block_type.__init__, lambda element, shape: (element.name, str(shape)))


def _made_once(init: Callable[..., None], key_of: Callable[..., Any]) -> Callable[..., None]:
    """An __init__ that gives an object the attributes of the first one with the same key."""
    known: dict[Any, dict[str, Any]] = {}

    def init_once(self, *args):
        key = key_of(*args)
        if key not in known:
            init(self, *args)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    return init_once
