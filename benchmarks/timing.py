"""How the time and memory of a call are measured, and the ceilings of the machine.

GPU: CUDA events around each call, after the L2 cache was overwritten. When an op is timed, the GPU is kept busy until
the host has queued the call, so the events measure the GPU alone; the host's time is a second figure. A whole model's
step is timed as its user waits for it. CPU: `time.perf_counter`, with torch's number of threads. Warm-up is not
counted; median and quartiles are recorded.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is imported: the profiler's chatter
os.environ.setdefault("KMP_BLOCKTIME", "1")  # CTranslate2's idle threads spin no longer, so others do not become slower
import torch
from cases import label
from torch.profiler import ProfilerActivity, profile

from fastattn.backends import cpu_matmul

Call = Callable[[], Any]
FASTEST_CLOCK = 3e9  # cycles of a GPU in a second
GPU_STATE = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


class Timing(NamedTuple):
    """Quartiles in milliseconds of `samples` calls, and the fastest, which varies least on a busy machine.

    host_us: microseconds that the host of a GPU takes for a call, the median of a few; None on a CPU.
    """

    min_ms: float
    q1_ms: float
    median_ms: float
    q3_ms: float
    samples: int
    host_us: float | None = None


def measure(call: Call, device: torch.device, budget_s: float, hide_host: bool = True) -> Timing:
    """Time one call: three warm-up calls, then at least 7 and at most 200 samples in about budget_s seconds."""
    return measure_in_turn([call], device, budget_s, hide_host)[0]


def measure_in_turn(calls: list[Call], device: torch.device, budget_s: float, hide_host: bool = True) -> list[Timing]:
    """Time several calls. Their samples alternate, in a changing order, so that a disturbance of the machine slows all
    of them.

    hide_host: measure the GPU's time alone. Otherwise a call begins on an idle GPU, and the time is what a user waits.
    """
    for call in itertools.chain(calls, calls):
        call()
    host: list[float | None] = [None] * len(calls)
    if device.type == "cuda":
        host = [statistics.median(seconds(call, device, waits=False) for _ in range(3)) for call in calls]

    def sample(count: int) -> list[list[float]]:
        if device.type == "cuda":
            return _sample_on_gpu(calls, [2 * host_s * hide_host for host_s in host], device, count)
        return _sample_on_cpu(calls, count)

    start = time.perf_counter()
    sample(1)
    turn_s = max(time.perf_counter() - start, 1e-6)
    timings = []
    for samples_ms, host_s in zip(sample(max(7, min(200, int(budget_s * len(calls) / turn_s)))), host, strict=True):
        quartiles = statistics.quantiles(samples_ms, n=4, method="inclusive")
        host_us = None if host_s is None else host_s * 1e6
        timings.append(Timing(min(samples_ms), *quartiles, len(samples_ms), host_us))
    return timings


def _sample_on_cpu(calls: list[Call], count: int) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in calls]
    for place in _order(len(calls), count):
        start = time.perf_counter()
        calls[place]()
        samples[place].append((time.perf_counter() - start) * 1e3)
    return samples


def _order(calls: int, count: int) -> Iterator[int]:
    """Whose turn it is: `count` rounds, each of which begins with another call."""
    for turn in range(count):
        yield from ((turn + place) % calls for place in range(calls))


def _sample_on_gpu(calls: list[Call], busy_s: list[float], device: torch.device, count: int) -> list[list[float]]:
    """busy_s: for how long the GPU is kept busy before each call."""
    cache = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for place in _order(len(calls), count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        if busy_s[place]:
            torch.cuda._sleep(int(busy_s[place] * FASTEST_CLOCK))  # what is queued meanwhile runs without gaps
        else:
            torch.cuda.synchronize(device)
        start.record()
        calls[place]()
        end.record()
        events[place].append((start, end))
    torch.cuda.synchronize(device)
    return [[start.elapsed_time(end) for start, end in pairs] for pairs in events]


def seconds(call: Call, device: torch.device, waits: bool = True) -> float:
    """How long a user waits for one call. Without `waits` how long the host of an idle GPU needs for it: the GPU's time
    counts only if the call waits for it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if waits and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_mib(call: Call, device: torch.device) -> float:
    """Memory that a call needs beyond what was allocated before it.

    On a CPU it is the running sum of the allocations and releases that torch's profiler reports: those of tensors, not
    those inside other libraries.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak / 2**20


def pool_mib(device: torch.device) -> float:
    """Memory reserved for CUDA graphs, of any library. It is no part of `peak_mib`: a replay allocates nothing."""
    segments = torch.cuda.memory_snapshot() if device.type == "cuda" else []
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0)) / 2**20


def waits_for_gpu(call: Call) -> bool:
    """Whether the call waits for the GPU. Then its host's time cannot be hidden, and the GPU's is not known."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    torch.cuda.set_sync_debug_mode(before)
    return any("called a synchronizing" in str(warning.message) for warning in found)


def loop_us() -> float:
    """A fixed Python loop, the median of a few: how fast the host is now. A busy one needs longer."""
    cpu = torch.device("cpu")
    return 1e6 * statistics.median(seconds(lambda: sum(range(100_000)), cpu) for _ in range(7))


def conditions(device: torch.device) -> dict[str, Any]:
    """How fast the host is, whatever is measured. Of a GPU also its clocks in MHz and power in W, by nvidia-smi, while
    it multiplies matrices."""
    found: dict[str, Any] = {"loop_us": loop_us()}
    if device.type == "cuda":
        a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        for _ in range(1000):  # a second and more, and no more launches than its queue has room for
            torch.mm(a, a)
        which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
        command = ["nvidia-smi", which, f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
            found |= dict(zip(GPU_STATE, said.strip().split(", "), strict=False))
    return found


def ceilings(device: torch.device, dtypes: Iterable[torch.dtype]) -> dict[str, Any]:
    """The best of this device: bytes/s of a large copy (read and written), FLOP/s of a large square matrix product, by
    the fastest of the products that fastattn uses.

    Returns {"byte_per_s": ..., "flop_per_s": {dtype's label: ...}}, by the fastest sample.
    """
    on_gpu = device.type == "cuda"
    source = torch.empty(2**30 if on_gpu else 2**28, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, 0.5)
    found: dict[str, Any] = {"byte_per_s": 2 * source.numel() / copy.min_ms * 1e3, "flop_per_s": {}}
    n = 8192 if on_gpu else 1536
    for dtype in dtypes:
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        products = (torch.mm, cpu_matmul.mm)  # the second one is oneDNN's where that is faster
        ms = min(measure(lambda f=f, a=a, b=b: f(a, b), device, 0.25).min_ms for f in products)
        found["flop_per_s"][label(dtype)] = 2 * n**3 / ms * 1e3
    return found
