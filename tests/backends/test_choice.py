"""Which backend is chosen, and the reasons against the others."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from helpers import autograd_nodes, run_python, skip_without_triton

import fastattn
from fastattn import backends


def _call(**changes: object) -> dict[str, object]:
    q = torch.randn(1, 2, 4, 8)
    return {"query": q, "key": q, "value": q} | changes


def _attention(**changes: object) -> torch.Tensor:
    return fastattn.scaled_dot_product_attention(**_call(**changes))


def test_order_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTN_BACKEND", "reference")
    assert backends.requested(None) == ("reference", "FASTATTN_BACKEND")
    with fastattn.use_backend("aten"):
        assert backends.requested(None) == ("aten", "use_backend()")
        assert backends.requested("triton") == ("triton", "backend=")
        with fastattn.use_backend("reference"):
            assert backends.requested(None)[0] == "reference"
        with fastattn.use_backend(None):
            assert backends.requested(None)[0] == "reference"  # that of the environment
        assert backends.requested(None)[0] == "aten"
    monkeypatch.setenv("FASTATTN_BACKEND", "attention=reference, feed_forward=triton")
    assert backends.requested(None, "attention") == ("reference", "FASTATTN_BACKEND")
    assert fastattn.explain("attention", **_call()).chosen == "reference"
    assert backends.requested(None, "feed_forward")[0] == "triton"
    assert backends.requested("aten", "attention")[0] == "aten"
    assert backends.requested(None, "add_layer_norm") == backends.requested(None) == (None, "automatic choice")
    monkeypatch.setenv("FASTATTN_BACKEND", "aten,attention=reference")
    assert [backends.requested(None, op)[0] for op in ("attention", "linear", None)] == ["reference", "aten", "aten"]


def test_use_backend_holds_only_for_its_thread() -> None:
    """Also for compiled code: each thread gets the graph of the backend that it requested. A nested one, or one that
    ends with an exception, leaves the outer one as it was."""
    q, others = torch.randn(1, 2, 8, 8, requires_grad=True), []
    compiled = torch.compile(lambda q: _attention(query=q, key=q, value=q), backend="eager", fullgraph=True)

    def asked() -> tuple[str | None, str]:
        """The backend that is requested here, and the one that compiled code uses."""
        is_aten = any("ScaledDotProduct" in name for name in autograd_nodes(compiled(q)))
        return backends.requested(None)[0], "aten" if is_aten else "reference"

    def other() -> None:
        others.append(asked())
        with fastattn.use_backend("aten"):
            others.append(asked())

    assert asked() == (None, "aten")
    with fastattn.use_backend("reference"):
        assert asked() == ("reference", "reference")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(KeyError), fastattn.use_backend("aten"):
            raise KeyError
        assert asked() == ("reference", "reference")
    assert asked() == (None, "aten") and others == [(None, "aten"), ("aten", "aten")]


def test_use_backend_holds_only_for_its_async_task() -> None:
    async def ask(name: str) -> None:
        with fastattn.use_backend(name):
            for _ in range(3):
                await asyncio.sleep(0)  # the other task's turn
                assert backends.requested(None)[0] == name
        assert backends.requested(None)[0] is None

    async def both() -> None:
        await asyncio.gather(ask("aten"), ask("reference"))

    asyncio.run(both())
    assert backends.requested(None)[0] is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cudnn", "must be one of reference, aten, triton, cuda, got 'cudnn'"),
        ("feed_forward=cudnn", "must be one of reference, aten, triton, cuda, got 'cudnn'"),
        ("atention=cuda", "the op before = must be one of attention, .*, got 'atention'"),
    ],
)
def test_what_the_environment_requests_is_known(text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for another op than the one that is called."""
    monkeypatch.setenv("FASTATTN_BACKEND", text)
    with pytest.raises(ValueError, match=said):
        _attention()


def test_a_named_backend_that_is_unsupported_raises_its_reason() -> None:
    x, weight = torch.zeros(2, 4), torch.zeros(4, 4)
    with pytest.raises(RuntimeError, match="'cuda' \\(backend=\\) does not support this call: .* got a CPU tensor"):
        fastattn.feed_forward(x, weight, None, weight, None, backend="cuda")
    explanation = fastattn.explain("feed_forward", x, weight, None, weight, None, backend="cuda")
    assert explanation.chosen is None
    assert str(explanation).startswith("feed_forward on cpu: no backend (backend= requests cuda)\n")
    assert "got a CPU tensor\n" in f"{explanation}\n"


def test_an_op_without_a_kernel_in_the_backend() -> None:
    """It follows the order of a GPU: Triton takes float32 and refuses float64. A kernel that refuses raises."""
    skip_without_triton()
    with fastattn.use_backend("cuda"), pytest.raises(RuntimeError, match="got a CPU tensor"):
        _attention()
    for dtype, instead in ((torch.float32, "triton"), (torch.float64, "aten")):
        given = torch.ones(1, 1, 1, 8, dtype=dtype), *torch.ones(2, 1, 3, 1, 1, 8, dtype=dtype)
        assert fastattn.explain("decode_attention", *given, backend="cuda").chosen == instead
        assert fastattn.decode_attention(*given, backend="cuda").eq(1).all()
        with fastattn.use_backend("cuda"):
            assert fastattn.explain("decode_attention", *given).chosen == instead
            assert fastattn.decode_attention(*given).eq(1).all()


@pytest.mark.full
def test_torch_compile_of_a_model_before_its_first_call() -> None:
    """One graph, though every backend's module is imported while it is traced."""
    program = """
import torch
from fastattn import FusedTransformer
model = FusedTransformer(9, 9, 0, 0, d_word_vec=16, d_model=16, d_inner=32, n_layers=1, n_head=2, d_k=8, d_v=8)
tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
torch.compile(model.loss, backend="aot_eager", fullgraph=True)(tokens, tokens, tokens).backward()
"""
    run_python("-c", program)


MISSING = """
import importlib.metadata, pathlib, sys, torch, types
before = set(sys.modules)
import fastattn
q = torch.randn(1, 1, 2, 8, requires_grad=True)
fastattn.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.1).sum().backward()
print({"triton", "torch._dynamo", "sympy"} & set(sys.modules) - before)
sys.modules["triton"] = None
sys.modules["fastattn._C"] = None
print(fastattn.explain("attention", q, q, q).refusals["triton"])
print(fastattn.scaled_dot_product_attention(q, q, q).shape)
from fastattn.backends import cuda
from fastattn.check import doctor

class Installed:
    files = [pathlib.Path("fastattn/_C.abi3.so")]
    locate_file = staticmethod(lambda file: pathlib.Path("/site") / file)

def print_reason(extension, *distributions):
    sys.modules["fastattn._C"] = extension
    importlib.metadata.distributions = lambda name: distributions
    importlib.reload(cuda)
    print(doctor.versions()["extension"]["reason"])

print_reason(None, Installed)
print_reason(None)
print_reason(types.SimpleNamespace(**dict.fromkeys(cuda.FUNCTIONS[:-1])))
"""


def test_nothing_but_their_backends_needs_triton_and_the_extension() -> None:
    """Neither the import, nor a call: they load nothing of the compilers. What is missing is a reason: Triton; an
    extension that is installed but hidden by a checkout, none, an older one without a function."""
    loaded, triton, shape, hidden, missing, older = run_python("-c", MISSING).splitlines()
    assert loaded == "set()" and triton.startswith("triton is not installed") and shape == "torch.Size([1, 1, 2, 8])"
    assert hidden.startswith("fastattn._C is installed in /site/fastattn, but Python imported")
    assert "no nvcc" in missing and "without feed_forward_fwd: install" in older
