"""`python -m fastattn doctor`: what is installed, which backend computes what, and how far each is from float64.

The doctor solves small random problems, forward and backward, with every backend that can compute them. It compares
each output and each gradient with the reference formula in float64, by the rule of tolerance.py. With --time it also
times a few larger calls by every backend, so that you can prefer one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastattn
from fastattn.backends import BACKENDS, cpu_matmul, cuda, request_of_all_ops, requested
from fastattn.backends.reference import philox
from fastattn.check.cases import Problem, expected_results, problems, solve, timed_problems
from fastattn.check.tolerance import ErrorCheck, check_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(problem: Problem, dtype: torch.dtype, backends: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Compare every output and gradient of each backend: one record each. An exception is a record too."""
    rules = ("reference", "aten") if "dropout_p" in problem.options else ("reference",)  # see reference/philox.py
    for rule in rules:
        of_rule = [b for b in backends if len(rules) == 1 or (b == "aten") == (rule == "aten")]
        # On a GPU PyTorch's fused attention drops inside its kernel: there are no equal bits to compare with.
        if rule == "aten" and problem.op == "attention" and problem.tensors["query"].is_cuda:
            continue
        if of_rule:
            with philox.reference_dropout_rule(rule):
                yield from _check(problem, dtype, of_rule)


def _check(problem: Problem, dtype: torch.dtype, backends: Sequence[str]) -> Iterator[dict[str, Any]]:
    expected = expected_results(problem, dtype)
    for backend in backends:
        record = {"op": problem.op, "case": problem.case, "backend": backend, "dtype": _name(dtype)}
        try:
            actual = solve(problem, backend, dtype, dtype)
            for result, comparison in expected.items():
                found = check_error(actual[result], *comparison, computed_in=dtype)
                error = found.error if math.isfinite(found.error) else None  # JSON has no inf
                yield record | {"result": result, "error": error, "bound": found.bound, "ok": found.ok}
        except Exception as error:  # whatever a backend does wrong is the finding, not the end of the report
            yield record | {"failed": _format_error(error), "ok": False}


def examine(device: torch.device, backends: Sequence[str] = BACKENDS, time_calls: bool = False) -> dict[str, Any]:
    """The whole report as one JSON-able dict. Its key "ok" is False when any usable backend is out of bounds, and after
    Ctrl-C, which keeps what was compared before."""
    start = time.perf_counter()
    report: dict[str, Any] = {"versions": versions(), "devices": devices(), "device": str(device)}
    report |= {"cases": [], "checks": [], "times": [], "stopped": False}
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for problem in problems(device):
                for dtype in DTYPES:
                    _examine(problem, dtype, backends, report)
            for problem in timed_problems(device) if time_calls else ():
                for dtype in DTYPES[:2]:
                    report["times"].append(_time(problem, dtype, backends))
    except KeyboardInterrupt:  # what was found so far is worth reading
        report["stopped"] = True
    report["ok"] = not report["stopped"] and all(record["ok"] for record in report["checks"])
    report["seconds"] = round(time.perf_counter() - start, 1)
    return report


def _examine(problem: Problem, dtype: torch.dtype, backends: Sequence[str], report: dict[str, Any]) -> None:
    """Adds what is found to the report's lists `cases` and `checks`."""
    case: dict[str, Any] = {"op": problem.op, "case": problem.case, "dtype": _name(dtype)}
    try:
        explanation = problem.explain(dtype)
    except Exception as error:  # a backend that cannot even be imported: the other ops are still examined
        report["checks"].append(case | {"backend": "any", "failed": _format_error(error), "ok": False})
        return
    case["default"] = explanation.chosen
    refusals = {backend: explanation.refusals[backend] for backend in backends}
    report["cases"].append(case | {"refusals": refusals, "notes": explanation.notes})
    usable = [backend for backend, reason in refusals.items() if reason is None]
    if usable:
        report["checks"] += check(problem, dtype, usable)


def _time(problem: Problem, dtype: torch.dtype, backends: Sequence[str]) -> dict[str, Any]:
    """The milliseconds of a call by each backend that can compute it, forward and backward; None if it fails."""
    explanation, ms = problem.explain(dtype), {}
    leaves = {name: t.to(dtype).requires_grad_(problem.differentiable) for name, t in problem.tensors.items()}
    arguments = problem.arguments(leaves)

    def call(backend: str) -> None:
        out = problem.function(**arguments, backend=backend)
        if problem.differentiable:
            torch.autograd.grad(out, list(leaves.values()), out.detach())

    for backend in backends:
        if explanation.refusals[backend] is None and backend not in explanation.notes:
            try:
                ms[backend] = milliseconds(partial(call, backend), next(iter(leaves.values())).is_cuda)
            except RuntimeError:  # too little memory, for one
                ms[backend] = None
    case = {"op": problem.op, "case": problem.case, "dtype": _name(dtype)}
    return case | {"default": explanation.chosen, "ms": ms}


def milliseconds(call: Callable[[], None], on_gpu: bool) -> float:
    """The least of a few samples. On a GPU each is the mean of ten calls that it finds queued, so that it never waits
    for the host."""
    samples = []
    for _ in range(5):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000_000)  # about 10 ms, in which the host queues the calls
            begin.record()
            for _ in range(10):
                call()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / 10)
        else:
            start = time.perf_counter()
            call()
            samples.append((time.perf_counter() - start) * 1e3)
    return min(samples)


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def versions() -> dict[str, Any]:
    """The versions that a result may depend on; None for what is not installed."""

    def installed(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    compiled = cuda._compiled()
    reason, path = (compiled, None) if isinstance(compiled, str) else (None, compiled.__file__)
    extension = {"built": reason is None, "reason": reason, "path": path}
    driver = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0] or None
    return {
        "fastattn": fastattn.__version__,
        "path": str(Path(fastattn.__file__).parent),
        "extension": extension,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "numpy": installed("numpy"),
        "cuda": torch.version.cuda,
        "driver": driver,
    }


def devices() -> list[dict[str, Any]]:
    """The CPU, then every GPU that torch finds."""
    cpu = {"device": "cpu", "name": cpu_matmul.cpu_name(), "threads": torch.get_num_threads()}
    found: list[dict[str, Any]] = [cpu | {"float32_products": cpu_matmul.choice()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpu = {"device": f"cuda:{index}", "name": properties.name}
        gpu["capability"] = f"{properties.major}.{properties.minor}"
        found.append(gpu | {"memory_gib": round(properties.total_memory / 2**30, 1)})
    return found


def render(report: dict[str, Any]) -> str:
    """The report as text for people."""
    installed, extension = report["versions"], report["versions"]["extension"]
    bad = [record for record in report["checks"] if not record["ok"]]
    lines = [
        f"fastattn {installed['fastattn']} from {installed['path']}",
        ", ".join(f"{name} {installed[name] or 'none'}" for name in ("python", "torch", "triton", "numpy")),
        f"CUDA of torch: {installed['cuda'] or 'none'}; driver: {installed['driver'] or 'none'}",
        f"CUDA kernels: {extension['path'] if extension['built'] else extension['reason']}",
        *(", ".join(f"{key} {value}" for key, value in device.items()) for device in report["devices"]),
        f"\nBackends on {report['device']} (* is {_starred()})",
        *_render_backends(report),
        "\nLargest error against float64 and, in brackets, its share of the bound (1 is the limit)",
        *_render_checks(report),
        *_render_times(report),
        "",
        *["stopped before the end"] * report["stopped"],
        *(f"{'FAILED' if 'failed' in record else 'OUT OF BOUNDS'}  {_where(record)}" for record in bad),
        f"{len(bad)} of {len(report['checks'])} comparisons failed or out of bounds ({report['seconds']} s)"
        if report["checks"]
        else "nothing was compared: no backend supports these calls here",
    ]
    return "\n".join(lines)


def _starred() -> str:
    name, text = request_of_all_ops()
    if name is None and not text:
        return "the default"
    return f"the choice, as {'FASTATTN_BACKEND' if name is None else 'use_backend()'} requests {name or text}"


def _where(record: dict[str, Any]) -> str:
    where = f"{record['op']}, {record['case']}, {record['backend']}, {record['dtype']}: "
    if "failed" in record:
        return where + record["failed"]
    error = "not finite" if record["error"] is None else f"{record['error']:.2e}"
    return where + f"error of {record['result']} is {error}, bound {record['bound']:.2e}"


def _render_backends(report: dict[str, Any]) -> Iterator[str]:
    """For each op and backend: the dtypes it supports, and each distinct reason for a refusal with its cases."""
    for op in _distinct(case["op"] for case in report["cases"]):
        cases = [case for case in report["cases"] if case["op"] == op]
        yield f"  {op}"
        for backend in cases[0]["refusals"]:
            supported = [case for case in cases if case["refusals"][backend] is None]
            refused = [case for case in cases if case["refusals"][backend] is not None]
            if supported:
                star = "*" if any(case["default"] == backend for case in supported) else " "
                notes = [f" ({case['notes'][backend]})" for case in supported if backend in case["notes"]]
                dtypes = ", ".join(_distinct(case["dtype"] for case in supported))
                yield f"  {star} {backend:<10} supports {dtypes}{''.join(_distinct(notes))}"
            for reason in _distinct(case["refusals"][backend] for case in refused):
                which = _distinct(case["case"] for case in refused if case["refusals"][backend] == reason)
                yield f"    {backend:<10} refuses{' ' + ', '.join(which) if supported else ''}: {reason}"


def _render_checks(report: dict[str, Any]) -> Iterator[str]:
    """A row for each op, case and backend; a column for each dtype: the comparison that came closest to its bound."""
    worst: dict[tuple[str, str, str], dict[str, tuple[float, str]]] = {}
    for record in report["checks"]:
        row = worst.setdefault((record["op"], record["case"], record["backend"]), {})
        ratio, cell = math.inf, "failed"
        if record.get("error") is not None:
            ratio = ErrorCheck(record["error"], record["bound"]).ratio
            cell = f"{record['error']:.1e} ({ratio:.2f})"
        row[record["dtype"]] = max(row.get(record["dtype"], (-1.0, "")), (ratio, cell))
    yield f"  {'':<60}" + "".join(f"{_name(dtype):<17}" for dtype in DTYPES)
    for (op, case, backend), row in worst.items():
        cells = "".join(f"{row.get(_name(dtype), (0, '-'))[1]:<17}" for dtype in DTYPES)
        yield f"  {op:<21}{case:<27}{backend:<12}{cells}".rstrip()


def _render_times(report: dict[str, Any]) -> Iterator[str]:
    """A row for each call and dtype, with the time of each backend."""
    if report["times"]:
        yield f"\nMilliseconds of a call, forward and backward (* is {_starred()})"
        yield f'To prefer a backend: FASTATTN_BACKEND="attention={BACKENDS[-1]}", or fastattn.use_backend(name)'
    for row in report["times"]:
        cells = [
            f"{'*' if backend == row['default'] else ' '}{backend} {'failed' if ms is None else f'{ms:.3g}'}"
            for backend, ms in row["ms"].items()
        ]
        yield (
            f"  {row['op']:<21}{row['case']:<27}{row['dtype']:<10}" + "".join(f"{cell:<18}" for cell in cells).rstrip()
        )


def _distinct(items: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(items))


# Types of command-line arguments, also of the other commands: argparse.ArgumentTypeError where one cannot be used.


def usable_device(name: str) -> torch.device:
    """The CPU or GPU of that name."""
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be used: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{name!r} cannot be used: it must be cpu or cuda")
    return device


def positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Prints the report; returns 0, or 1 when a usable backend is out of bounds or fails."""
    parser = argparse.ArgumentParser(prog="python -m fastattn doctor", description=__doc__, allow_abbrev=False)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", type=usable_device, default=default, help=f"where to solve the problems (here: {default})"
    )
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only this backend; may be repeated")
    parser.add_argument("--time", action="store_true", help="also time a few calls by every backend")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args(argv)
    try:
        requested(None)
    except ValueError as error:  # of FASTATTN_BACKEND
        parser.error(str(error))
    report = examine(arguments.device, arguments.backend or BACKENDS, arguments.time)
    print(json.dumps(report, indent=1, allow_nan=False) if arguments.json else render(report))
    return 0 if report["ok"] else 1
