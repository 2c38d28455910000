"""Writes docs/bug_classes.md, from the marks of the tests: `python docs/bug_classes.py`.

A test that fails where a bug of a class is present is marked with the class: `@pytest.mark.bug_class("T9")`. Marks are
read from the sources, and no test is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "bug_classes.md"
CLASSES = {
    "T1": "An offset or a counter of dropout is computed in 32 bits and wraps, in tensors of more than 2^31 elements.",
    "T2": "A gradient that arrives expanded, transposed or sliced is read as if it were contiguous.",
    "T3": "Inputs of different layouts are read as if they had the same, or gradients lack the promised strides.",
    "T4": "An expanded (stride 0) key, value, mask or bias, or one with a last stride other than 1, is read wrongly.",
    "T5": "A vector load needs 16-byte alignment, and a tensor begins elsewhere or has an odd width.",
    "T6": "A kernel is launched on the current GPU, and the tensors are on another one.",
    "T7": "A kernel reads what another stream, warp or asynchronous copy has not yet written.",
    "T8": "Equal inputs give other bits in the next run.",
    "T9": "A query that may attend to nothing, or a row that is ignored, gives NaN or a gradient.",
    "T10": "NaN or infinity in padding, where it is hidden, reaches a result as 0 * NaN.",
    "T11": "An output that was allocated without being initialised is not written everywhere.",
    "T12": "An empty batch, sequence, packed segment or width crashes, or gives wrong values.",
    "T13": "Lengths around the edges of tiles, or very negative scores, give wrong values.",
    "T14": "A causal mask is aligned to the wrong corner when queries and keys differ in number.",
    "T15": "Dropout repeats its mask, drops other elements in the backward, or has the wrong rate.",
    "T16": "A CUDA graph replays old dropout, or the host waits for the device during a capture.",
    "T17": "Products of float32 are computed in TF32, though PyTorch's setting does not allow it.",
    "T18": "Inputs of different dtypes, or autocast, give the wrong dtype or less accurate results.",
    "T19": "A kernel overwrites an input, a result or a gradient that is still needed.",
    "T20": "Gradients are wrong or missing when only some inputs need one, or a bias is broadcast.",
    "T21": "A launch needs more shared memory than a smaller GPU has.",
    "T22": "torch.compile breaks the graph, or a fake kernel promises another shape or layout.",
    "T23": "Training and eval mode, grad and no_grad, or eager and compiled code compute different things.",
    "T24": "The result of a sample depends on the other samples of its batch or on the amount of padding.",
    "T25": "A mask or another argument is silently ignored.",
}
BACKENDS = ("reference", "aten", "triton", "cuda")
OPS = ("decode_attention", "attention", "add_layer_norm", "feed_forward", "linear_cross_entropy")
EVERY_OP = ("test_every_op", "test_compile", "test_derivatives", "test_traced_for_a_gpu", "test_triton")
ALL_BUT_ATTENTION = ("test_against_float64", "test_kernels")
HEAD = """# Bug classes

Bugs that users of attention kernels report most often, in all packages, and the tests of fastattn that fail where such
a bug is present. `python docs/bug_classes.py` makes this page from the marks of the tests. Without a GPU, the Triton
kernels run in Triton's interpreter, and the CUDA kernels in an emulator. Without a backend, a test uses the default.
"""


class Test(NamedTuple):
    path: str  # below tests/, with the name after ::
    ops: str
    backends: str


def marks(decorators: list[ast.expr]) -> list[str]:
    calls = [node for each in decorators for node in ast.walk(each) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func) == "pytest.mark.bug_class"]
    return [ast.literal_eval(argument) for call in calls for argument in call.args]


def marked() -> Iterator[tuple[str, Test]]:
    """(class, test) in the order of the files."""
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(file.read_text())
        ofs = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for name in marks([*ofs, *node.decorator_list]):
                    yield name, described(file, node)


def described(file: Path, test: ast.FunctionDef) -> Test:
    path = file.relative_to(ROOT / "tests")
    named = [op for op in OPS if op in path.stem or op in test.name][:1]
    all_ops = "all" if path.stem in EVERY_OP else "all but attention" if path.stem in ALL_BUT_ATTENTION else ""
    place = "" if path.parts[0] in ("ops", "cuda", "codegen") else path.parts[0]
    choices = [text for text in map(ast.unparse, test.decorator_list) if "backend" in text.lower()]
    text = " ".join([path.as_posix(), test.name.replace("cuda", ""), ast.unparse(test.args), *choices])
    backends = [b for b in BACKENDS if re.search(rf"(\b|_){b}(\b|_)", text)]
    if re.search(r"EVERY_BACKEND|\bBACKENDS|implemented|backends_of", text):
        backends = ["all"]
    elif "BIAS_BACKENDS" in text:
        backends = ["reference", "aten", "triton"]
    elif re.search(r"\bKERNELS\b", text):
        backends = ["triton", "cuda"]
    elif "'backend', [None" in text:
        backends.insert(0, "default")
    return Test(f"{path}::{test.name}", all_ops or "".join(named) or place, ", ".join(backends))


def page() -> str:
    """The page. ValueError: a mark names no class, or a class has no test."""
    found: dict[str, list[Test]] = {name: [] for name in CLASSES}
    for name, test in marked():
        if name not in found:
            raise ValueError(f"tests/{test.path} is marked with {name}, which is not in docs/bug_classes.py")
        found[name].append(test)
    if missing := [name for name, tests in found.items() if not tests]:
        raise ValueError(f"no test is marked with {missing}")
    lines = ["| | What goes wrong, and the tests | Ops or part | Backends |", "|---|---|---|---|"]
    for name, tests in found.items():
        lines.append(f"| **{name}** | **{CLASSES[name]}** | | |")
        lines += [f"| | `{test.path}` | {test.ops} | {test.backends} |" for test in tests]
    return "\n".join([HEAD, *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
