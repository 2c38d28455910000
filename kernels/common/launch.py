"""How kernels are launched, and what a launch reads of its device and tensors. Nothing waits for the device.

`kernel[grid](...)` binds and specialises its arguments in Python, 11 to 20 us. Here only the first call of a class uses
it. The next ones go to the C launcher of the compiled kernel that it returned (triton 3.5 to 3.9), with addresses in
place of tensors, which saves the launcher a driver call for each. They use the current stream, and a CUDA
graph captures them. Triton's interpreter, and calls while a profiler has hooks in Triton, always use `kernel[grid]`.

Dropped: launches of norms and feed-forward without a key, as attention/rows.py has them. A norm's forward then takes
7.3 us for 7.9, its backward 12.4 for 13.0: at most 0.6 % of a step's host time. Allocations take half of each.
"""

import functools
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, get_type_hints

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from fastattn._tracing import constant_in_traces
from fastattn.backends import constants

from . import INTERPRETED

if hasattr(torch._C, "_cuda_getDevice"):
    current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

DTYPES = constants.DTYPES
_KERNELS = __name__.rpartition(".common.")[0]
LIMIT = 1 << 31  # from here on Triton passes an integer in 64 bits

_runtime = triton.knobs.runtime
_CHAINS = _runtime.launch_enter_hook, _runtime.launch_exit_hook  # or what a profiler put there
_ENTER_CALLS, _EXIT_CALLS = (getattr(chain, "calls", [chain]) for chain in _CHAINS)


def _has_hooks() -> bool:
    enter, leave = _CHAINS
    is_new = _runtime.launch_enter_hook is not enter or _runtime.launch_exit_hook is not leave
    return bool(is_new or _ENTER_CALLS or _EXIT_CALLS)


class Launches(dict[tuple[Any, ...], "Launch"]):
    """The launches of one kernel, by class of call: Launches(kernel, *kinds).

    A key holds everything that chooses the compiled kernel and its constants: the device; the dtypes of the tensors,
    and which are None; what the tile follows from; and what Triton specialises, see specialization(). So calls with
    equal keys differ in addresses, floats and integers of the same specialization only.

    kinds: of the kernel's first arguments: Tensor, or the NamedTuple that the kernel reads by names. Its type hints
    show which of its fields are tensors.
    """

    all: "list[Launches]" = []

    def __init__(self, kernel: Any, *kinds: type) -> None:
        super().__init__()
        self.kernel, self.kinds = kernel, kinds
        self.all.append(self)

    def add(self, key: tuple[Any, ...], tile: Any = None, **named: Any) -> "Launch":
        """A new class. named: the kernel's constants, num_warps and num_stages. tile: kept for the caller."""
        self[key] = launch = Launch(self, tile, named)
        return launch


def forget() -> None:
    """Forget all classes: for those who replace tables of tiles, or what a launch is."""
    for launches in Launches.all:
        launches.clear()


_in_order: set[int] = set()


def hash_in_order(names: dict[str, Any]) -> None:
    """Have Triton hash the functions of a module, by its globals, each after those that it calls.

    Before Triton 3.9 the hash of a caller has the constants of the functions that were hashed before it. So the place
    of a kernel in the cache on disk would depend on what the process ran before.
    """
    if id(names) not in _in_order:
        _in_order.add(id(names))
        for value in list(names.values()):
            if isinstance(value, ModuleType) and value.__name__.startswith(_KERNELS):
                hash_in_order(vars(value))
            elif isinstance(value, triton.JITFunction):
                hash_in_order(value.__globals__)
                _ = value.cache_key


def c_launcher(compiled: Any) -> tuple[Any, Any, Any]:
    """What launches a compiled kernel, the kernel's handle on the current device, and what the launcher reads of it."""
    return compiled.run, compiled.function, compiled.packed_metadata


class Launch:
    """One class of calls. tile: as given to Launches.add()."""

    __slots__ = ("constants", "function", "hooks", "kernel", "kinds", "launcher", "metadata", "named", "tile")

    def __init__(self, launches: Launches, tile: Any, named: dict[str, Any]) -> None:
        self.kernel, self.kinds, self.tile, self.named = launches.kernel, launches.kinds, tile, named
        self.hooks = getattr(self.kernel, "pre_run_hooks", [])  # the interpreter of Triton 3.5 has none
        self.launcher: Any = None  # until the first call

    def run(
        self,
        device: int,
        programs: int,
        arguments: tuple[Any, ...],
        tensors: Iterable[Tensor | None],
        programs_y: int = 1,
    ) -> None:
        """Launch on the device's current stream. device: the index of a GPU; -1 with tensors on a CPU.

        arguments: what the kernel takes before its constants: addresses, numbers, and tuples of them. tensors: those at
        the addresses, in the same order. Tensors that are None may be left out.
        """
        if device >= 0 and device != current_device():
            with torch.cuda.device(device):
                self.run(device, programs, arguments, tensors, programs_y)
        elif self.launcher is None or self.hooks or _has_hooks():
            self._run_by_triton((programs, programs_y), arguments, tensors)
        else:
            self.launcher(
                programs, programs_y, 1, current_stream(device), self.function, self.metadata, None, None, None,
                *arguments, *self.constants,
            )  # fmt: skip

    def _run_by_triton(
        self, grid: tuple[int, int], arguments: tuple[Any, ...], tensors: Iterable[Tensor | None]
    ) -> None:
        hash_in_order(self.kernel.fn.__globals__)
        given = _with_tensors(self.kinds, arguments, iter([t for t in tensors if t is not None]))
        compiled = self.kernel[grid](*given, **self.named, enable_fp_fusion=True)
        if compiled is None or self.hooks or _has_hooks():  # interpreted, or perhaps compiled with a profiler's probes
            return
        self.constants = tuple(self.named[name] for name in self.kernel.arg_names[len(arguments) :])
        launcher, self.function, self.metadata = c_launcher(compiled)
        self.launcher = launcher  # the last: with it, run() in another thread uses all of them


def _with_tensors(kinds: Iterable[type], arguments: tuple[Any, ...], tensors: Iterator[Tensor]) -> list[Any]:
    """The arguments with tensors in place of their addresses, and with the kinds' tuples in place of plain ones."""

    def tensor_at(address: int | None) -> Tensor | None:
        if address is None:
            return None
        t = next(tensors)
        assert t.data_ptr() == address, "the tensors of a launch are not in the order of its arguments"
        return t

    given = list(arguments)
    for i, kind in enumerate(kinds):
        if kind is Tensor:
            given[i] = tensor_at(given[i])
        elif given[i] is not None:
            hints = get_type_hints(kind).values()
            fields = (tensor_at(a) if "Tensor" in str(hint) else a for a, hint in zip(given[i], hints, strict=True))
            given[i] = kind(*fields)
    assert next(tensors, None) is None, "a tensor of a launch is not in its arguments"
    return given


def addresses(*tensors: Tensor | None) -> tuple[list[int | None], Any]:
    """The tensors' addresses, None for None, and their specialization(): True where all are divisible by 16."""
    found: list[int | None] = []
    bits = 0
    for t in tensors:
        if t is None:
            found.append(None)
        else:
            address = t.data_ptr()
            bits |= address
            found.append(address)
    return found, not bits & 15 or tuple([address is None or not address & 15 for address in found])


def specialization(*numbers: int) -> tuple[int, ...]:
    """What Triton specialises of integers and addresses: whether 16 divides them, whether they are 1, their 32 or 64
    bits."""
    return tuple([2 if n == 1 else 4 * (not -LIMIT <= n < LIMIT) + (not n & 15) for n in numbers])


def unsupported_tensors(op: str, **tensors: Tensor | None) -> str | None:
    """Why an op's kernels cannot take these tensors, all on one device, or None. It reads dtype and device only."""
    for name, t in tensors.items():
        if t is not None and t.dtype not in DTYPES:
            return f"{op} in Triton takes float32, bfloat16 and float16, got {name} in {t.dtype}"
    return unsupported_device(next(iter(tensors.values())))


def unsupported_device(x: Tensor) -> str | None:
    """Why the kernels cannot run on x's device, or None."""
    if INTERPRETED:
        return None
    if not x.is_cuda:
        return f"Triton runs on a GPU (on a CPU only under TRITON_INTERPRET=1), got tensors on {x.device}"
    return _constant_gpu_problem(x.device.index)


@constant_in_traces  # torch.compile would put the question into its graph
def _constant_gpu_problem(index: int) -> str | None:
    return _gpu_problem(index)


@functools.cache
def _gpu_problem(index: int) -> str | None:
    gpu = _properties(index)
    if torch.version.hip is not None:
        return f"the Triton kernels need an NVIDIA GPU, got {gpu.name}"
    if gpu.major < 8:
        return f"the Triton kernels need compute capability 8.0, got {gpu.major}.{gpu.minor}"
    try:  # Triton now compiles its driver module, unless it is in the cache. A small image may have no compiler.
        driver.active.get_current_target()
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"Triton needs a C compiler, Python.h and libcuda.so, and could not start: {first_line}"
    return None


@functools.cache
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def gpu_arch(x: Tensor) -> int:
    """Compute capability of x's device, 90 for sm_90; 0 in the interpreter. It can be called in a trace."""
    if INTERPRETED:
        return 0
    # Kernels may also be compiled with tensors on a CPU, for a GPU that is not here (tools/precompile.py).
    return _capability(x.device.index) if x.is_cuda else driver.active.get_current_target().arch


@constant_in_traces
def _capability(index: int) -> int:
    gpu = _properties(index)
    return 10 * gpu.major + gpu.minor


def multiprocessors(x: Tensor) -> int:
    """Streaming multiprocessors of x's device; 1 in the interpreter, so that persistent loops run several times."""
    if INTERPRETED:
        return 1
    return _properties(x.device.index).multi_processor_count if x.is_cuda else driver.active.multiprocessors


@functools.cache
def padded_dim(size: int) -> int:
    """The size of a tile along a dimension: tl.dot and tl.arange need a power of two, and at least 16."""
    return max(16, triton.next_power_of_2(size))


def dot_precision(dtype: torch.dtype) -> str:
    """input_precision of tl.dot. float32 is multiplied as torch multiplies it on a GPU: exactly, by default."""
    if dtype != torch.float32:
        return "tf32"  # one name for the 16-bit types, which it does not touch: one compiled kernel
    return "tf32" if constants.uses_tf32() else "ieee"
