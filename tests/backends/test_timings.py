"""`python -m fastattn tune` as a user runs it, and what the dispatcher and explain() make of its record."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import skip_without_triton

import fastattn
from fastattn import backends
from fastattn.backends import cpu_matmul, timings
from fastattn.backends.aten import attention as aten_attention
from fastattn.check import tune

CPU = torch.device("cpu")
Q = torch.randn(1, 2, 200, 16)
CLASS = "float32, up to 1024 keys"  # of a call with Q, for the dispatcher


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    timings.reload_records()
    yield
    timings.reload_records()


def record(**changes: Any) -> dict[str, Any]:
    made = {"format": timings.FORMAT, "device": timings.device_name("cpu"), "versions": timings.versions()}
    made |= {"threads": torch.get_num_threads(), "choices": {"attention": {CLASS: ["reference"]}}}
    return made | changes


def write(content: str, device: str | None = None) -> Path:
    path = timings.user_path(device or timings.device_name("cpu"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    timings.reload_records()
    return path


@contextmanager
def a_gpu(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, tuple[int, int]]) -> Iterator[None]:
    """GPUs of these names and capabilities."""
    names, capabilities = list(kinds), list(kinds.values())
    cached = timings.device_name, timings.compute_capability
    for function in cached:
        function.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: names[index or 0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capabilities[index or 0])
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.full
def test_the_command_measures_and_its_record_is_used(tmp_path: Path) -> None:
    """In new processes, as a user does: first tune, then another program."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run("-OO", "-m", "fastattn", "tune", "--device", "cpu", "--minutes", "0.05")
    path = timings.user_path(timings.device_name("cpu"))
    assert f"The record: {path}" in said and "stopped after 0.05 minutes" in said
    made = json.loads(path.read_text())
    assert made["device"] == timings.device_name("cpu") and made["versions"] == timings.versions()
    first = made["rows"][0]
    assert min(first["ms"].values()) > 0 and first["order"][0] in first["ms"]
    script = "import fastattn, torch; q = torch.randn(1, 2, 200, 16); print(fastattn.explain('attention', q, q, q))"
    assert f"the record {path}: " in run("-c", script)


def test_out_leaves_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "made" / "here.json"
    monkeypatch.setattr(tune, "tune", lambda *arguments: record(rows=[]))
    assert tune.main(["--device", "cpu", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == record(rows=[])
    assert not timings.user_path(timings.device_name("cpu")).exists()


def once(call: tune.TimedCall, device: torch.device) -> dict[str, float]:
    """In place of tune.measure."""
    times = {}
    for way, context in call.ways.items():
        with context():
            call.step()
        times[way] = 1.0 + len(times)
    return times


@pytest.mark.full
def test_every_call_of_the_table_works(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op is there, and each class gets a way that was measured. On a CPU by interpreted kernels."""
    skip_without_triton()
    monkeypatch.setattr("fastattn.check.explain._ON_A_CPU", {})
    monkeypatch.setattr(tune, "check", lambda problem, dtype, backends: [{"ok": True}])
    monkeypatch.setattr(tune, "measure", once)
    made = tune.tune(device, 5, print, lambda device: tune.calls(device, tiny=True))
    of_a_cpu = {"product", tune.ATEN} if device.type == "cpu" else set()
    assert {row["op"] for row in made["rows"]} == of_a_cpu | backends.OPS.keys() - {"add_rms_norm"}
    for row in made["rows"]:
        chosen = made["choices"][row["op"]][row["class"]]
        assert set([chosen] if isinstance(chosen, str) else chosen) <= row["ms"].keys()
        assert len(row["ms"]) > 1 and "reference" not in row["ms"]


def test_a_record_changes_the_choice_and_explain_names_it() -> None:
    call = ("attention", Q, Q, Q)
    assert fastattn.explain(*call).chosen == "aten"
    path = write(json.dumps(record()))
    explanation = fastattn.explain(*call)
    assert explanation.chosen == "reference"
    assert f"the record {path}: the fastest first: reference" in str(explanation)
    assert fastattn.explain("attention", *[Q[:, :, :128]] * 3).chosen == "aten"  # of another class
    assert fastattn.explain(*call, backend="aten").chosen == "aten"
    with fastattn.use_backend("aten"):
        assert fastattn.explain(*call).chosen == "aten"


def test_a_record_chooses_among_the_ways_of_aten() -> None:
    x, weight = torch.randn(512, 256), torch.randn(256, 256)
    for way in ("oneDNN", "PyTorch"):
        aten_choices = {"float32, up to 256 keys": aten_attention.BLOCKED if way == "oneDNN" else aten_attention.TORCH}
        write(json.dumps(record(choices={"product": {"float32": way}, tune.ATEN: aten_choices})))
        assert cpu_matmul.choice() == way and cpu_matmul.uses_onednn(x, weight) == (way == "oneDNN")
        with torch.no_grad():
            assert aten_attention.algorithm(Q, Q, None, 0.0) == aten_choices["float32, up to 256 keys"]
            expected = fastattn.scaled_dot_product_attention(Q, Q, Q, backend="reference")
            torch.testing.assert_close(fastattn.scaled_dot_product_attention(Q, Q, Q), expected)


def test_a_shipped_record_is_read_after_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds for every GPU of its capability, and every version of PyTorch; no other device mentions it."""
    shipped = tmp_path / "shipped" / "some.json"
    shipped.parent.mkdir()
    made = record(device="another GPU", versions={"fastattn": "0.0", "torch": "1.0"}, capability=[9, 0])
    shipped.write_text(json.dumps(made))
    monkeypatch.setattr(timings, "SHIPPED", shipped.parent)
    timings.reload_records()
    assert timings.load_record("cpu") == timings.Record({}, None, {})
    with a_gpu(monkeypatch, {"this GPU": (9, 0), "an older GPU": (8, 0)}):
        assert timings.load_record("cuda", 1) == timings.Record({}, None, {})
        assert timings.load_record("cuda", 0).source == shipped
        users = write(json.dumps(record(choices={}, device="this GPU")), "this GPU")
        assert timings.load_record("cuda", 0).source == users


@pytest.mark.parametrize("path", sorted(timings.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_shipped(path: Path) -> None:
    """Each class is one that calls have, and each backend has a kernel of the op. The order is that of the rows."""
    shipped = json.loads(path.read_text())
    assert shipped["format"] == timings.FORMAT and len(shipped["capability"]) == 2
    for op_name, of_op in shipped["choices"].items():
        for of_class, order in of_op.items():
            assert all(backends.has_kernel(op_name, name) for name in order)
            rows = [row for row in shipped["rows"] if (row["op"], row["class"]) == (op_name, of_class)]
            assert order == rows[0]["order"] and set(order) == rows[0]["ms"].keys()
    x, weight = torch.randn(2, 2, 70, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    calls = {"attention": (x, x, x, None, 0.1), "feed_forward": (x, weight, None, weight, None, "gelu", 0.0)}
    for op_name, arguments in calls.items():
        assert backends.OPS[op_name].call_class(*arguments) in shipped["choices"][op_name]


def test_each_gpu_has_the_record_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two kinds in one machine, whichever is the current device."""
    with a_gpu(monkeypatch, {"a GPU": (8, 0), "another GPU": (8, 0)}):
        write(json.dumps(record(device="another GPU")), "another GPU")
        for index, order in enumerate(((), ("reference",))):
            assert backends.recorded_order("attention", torch.device("cuda", index), (Q, Q, Q, None, 0.0)) == order


def test_float16_follows_bfloat16_unless_it_was_measured() -> None:
    gpu, of_call = torch.device("cuda"), CLASS.replace("float32", "bfloat16")
    for choices, first in (({of_call: ["cuda"]}, "cuda"), ({of_call: ["cuda"], f"{of_call[1:]}": ["aten"]}, "aten")):
        with timings.override_choices({"attention": choices}):
            assert backends.recorded_order("attention", gpu, (Q.half(), Q.half(), Q.half(), None, 0.0)) == (first,)
            assert backends.recorded_order("attention", gpu, (Q, Q, Q, None, 0.0)) == ()


def test_in_float32_a_gpu_without_a_record_asks_pytorch_first() -> None:
    gpu, halved = torch.device("cuda"), Q.half()
    with timings.override_choices({}):
        for x, first in ((Q, "aten"), (halved, "triton")):
            assert backends.automatic_order("attention", gpu, (x, x, x, None, 0.0))[0] == first
        assert backends.automatic_order("add_layer_norm", gpu, (Q,))[0] == "triton"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda: record(format=0), "has format 0"),
        (lambda: record(device="another processor"), "was made on another processor"),
        (lambda: record(versions={"fastattn": "0.0", "torch": "1.0"}), "was made with"),
        (lambda: record(threads=torch.get_num_threads() + 1), "was made with threads: "),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_record_of_something_else_is_ignored(content: Callable[[], dict[str, Any]], reason: str) -> None:
    path = write(json.dumps(content()))
    explanation = fastattn.explain("attention", Q, Q, Q)
    assert explanation.chosen == "aten"
    assert f"the record {path} is ignored: it {reason}" in str(explanation)


def test_the_number_of_threads_may_change() -> None:
    write(json.dumps(record()))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert fastattn.explain("attention", Q, Q, Q).chosen == "aten"
    finally:
        torch.set_num_threads(threads)
    assert fastattn.explain("attention", Q, Q, Q).chosen == "reference"


def content(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (content("{ torn"), "cannot be read"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "cannot be read"),
        (content('{"choices": ["attention"]}'), "is damaged"),
    ],
    ids=["torn", "bytes", "choices"],
)
def test_a_damaged_record_is_ignored_with_one_warning(make: Callable[[Path], Any], reason: str) -> None:
    path = timings.user_path(timings.device_name("cpu"))
    path.parent.mkdir()
    make(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert fastattn.scaled_dot_product_attention(Q, Q, Q).shape == Q.shape
        explanation = fastattn.explain("attention", Q, Q, Q)
    assert [f"fastattn ignores the record {path}: it {reason}" in str(w.message) for w in caught] == [True]
    assert explanation.chosen == "aten" and f"the record {path} is ignored: it {reason}" in str(explanation)


def _no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for a user without a home folder."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )


def _closed_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """root may enter every folder, so Path.read_text raises the error of the system."""
    read_text = Path.read_text

    def closed(path: Path, **options: Any) -> str:
        if tmp_path in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", closed)


@pytest.mark.parametrize(("place", "reason"), [(_no_home, ""), (_closed_home, "Permission denied")])
@pytest.mark.filterwarnings("error")
def test_a_cache_folder_that_cannot_be_used(
    place: Callable[..., None], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(monkeypatch, tmp_path)
    timings.reload_records()
    assert fastattn.scaled_dot_product_attention(Q, Q, Q).shape == Q.shape
    assert reason in str(fastattn.explain("attention", Q, Q, Q))


def test_the_processors_name_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*arguments: Any, **options: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", closed)
    assert timings._cpu_name()


def test_an_unsupported_choice_is_skipped() -> None:
    write(json.dumps(record(choices={"attention": {CLASS: ["cuda"]}})))
    assert fastattn.explain("attention", Q, Q, Q).chosen == "aten"
    assert fastattn.scaled_dot_product_attention(Q, Q, Q).shape == Q.shape
    write(json.dumps(record(choices={"attention": {CLASS: ["a backend of the future", "aten"]}})))
    assert fastattn.explain("attention", Q, Q, Q).chosen == "aten"


def test_a_wrong_backend_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault on purpose: the doctor finds one wrong. tune reports it and does not measure it."""
    monkeypatch.setattr(tune, "check", lambda problem, dtype, backends: [{"ok": backends != ["cuda"]}])
    ways = {"cuda": fastattn.use_backend, "aten": fastattn.use_backend}
    call = tune.TimedCall("attention", "a class", "a call", torch.float32, lambda: None, {}, "aten")

    def table(device: torch.device) -> Iterator[tune.TimedCall]:
        yield call._replace(ways={name: lambda: fastattn.use_backend(None) for name in ways})

    made = tune.tune(CPU, 1, print, table)
    assert made["choices"] == {"attention": {"a class": ["aten"]}} and made["rows"][0]["wrong"] == ["cuda"]
