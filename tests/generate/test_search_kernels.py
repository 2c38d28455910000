"""The Triton kernels of searches against PyTorch's operators, their specification: the state after each step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from helpers import skip_without_triton
from model_checks import DEVICE
from recorded_graph import _Recorder, decoding_as_on_a_gpu, recorded_calls  # noqa: F401
from search_cases import SEARCHES, SUBJECTS, make_model
from torch import Tensor

from fastattn import FusedTransformer, generate, use_backend
from fastattn.generate import beams, sampling
from fastattn.generate.loop import Search
from fastattn.nn import DecoderCache

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of inf - inf


class Given(NamedTuple):
    """A model whose logits do not depend on tokens."""

    logits: list[Tensor]

    def next_logits(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        cache.advance()
        return self.logits[cache.length - 1]


def normal(*sizes: int) -> Tensor:
    return 3 * torch.randn(sizes)


def ended(*sizes: int) -> Tensor:
    x = normal(*sizes)
    x[..., 2] += 4
    return x


def few(*sizes: int) -> Tensor:
    """One or four tokens are possible, and equally likely, so that sums are exact and full of ties."""
    scores = torch.rand(sizes)
    count = 1 + 3 * torch.randint(2, (*sizes[:-1], 1))
    return torch.where(scores.argsort(-1).argsort(-1) < count, 0.0, -torch.inf)


def equal(*sizes: int) -> Tensor:
    """Zeros of both signs, and less."""
    return torch.tensor([0.0, -0.0, -1.0])[torch.randint(3, sizes)]


def bad(value: float) -> Callable[..., Tensor]:
    def make(*sizes: int) -> Tensor:
        x = normal(*sizes)
        x[0, -1, -1] = value
        if sizes[0] > 2:
            x[2, 0] = -torch.inf
        return x

    return make


class Case(NamedTuple):
    """of B sentences with W beams, n_best of which are kept."""

    B: int
    W: int
    n_vocab: int
    logits: Callable[..., Tensor] = normal
    n_best: int = 1
    dtype: torch.dtype = torch.float32
    eos: int = 2
    steps: int = 5


CASES = {
    "odd": Case(3, 5, 131, ended, 3),
    "ends at once": Case(2, 4, 5, ended, 4),
    "bfloat16": Case(2, 3, 200, ended, 2, torch.bfloat16),
    "float16": Case(2, 2, 64, normal, 2, torch.float16, eos=-1),
    "ties": Case(4, 5, 70, few, 3),
    "ties that end": Case(3, 5, 6, few, 3),
    "equal": Case(2, 3, 150, equal),
    "more beams than tokens": Case(2, 7, 3, few, 7),
    "one token": Case(1, 2, 1, normal, eos=0),
    "NaN": Case(3, 3, 70, bad(math.nan)),
    "-NaN": Case(3, 3, 70, bad(-math.nan)),
    "inf": Case(3, 3, 70, bad(math.inf)),
    "one beam": Case(3, 1, 90, ended),
    "several parts": Case(1, 2, 5000, normal, steps=2),
    "wide chunks": Case(1, 16, 17000, ended, 16, steps=2),
    "too many beams": Case(1, 17, 9, ended),
    "nothing": Case(0, 3, 9, steps=1),
    "whole capacity": Case(1, 2, 9, ended, steps=140),
}
LONG = ("whole capacity", "wide chunks")


def step_by_both(make: Callable[[DecoderCache], Search], case: Case) -> Any:
    """After each step the searches by kernels and by operators."""
    torch.manual_seed(case.steps * case.n_vocab)
    logits = []
    for _ in range(case.steps):
        memory = case.logits(case.B, case.W, case.n_vocab).to(DEVICE, case.dtype)
        logits.append(memory.transpose(0, 1).contiguous().transpose(0, 1))
    with decoding_as_on_a_gpu():
        both = [make(DecoderCache(case.B, case.W, case.steps, torch.device(DEVICE))) for _ in range(2)]
    for _ in range(case.steps):
        for search, backend in zip(both, ("triton", "reference"), strict=True):
            with use_backend(backend):
                search.step(Given(logits))
        found, expected = both
        assert torch.equal(found.state["broken"], expected.state["broken"])
        is_fine = ~expected.state["broken"]
        yield both, [{name: t[is_fine] for name, t in search.state.items()} for search in both], is_fine


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in LONG else ()) for n in CASES])
def test_beams(name: str) -> None:
    """What has the probability 0 may differ. A sentence with a NaN raises an error."""
    skip_without_triton()
    case = CASES[name]
    for both, (found, expected), is_fine in step_by_both(
        lambda cache: beams._Beams(cache, 1, case.eos, 0.7, case.n_best), case
    ):
        is_alive = expected["log_p"] > -torch.inf
        close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
        close(found["log_p"], expected["log_p"])
        assert torch.equal(found["tokens"][is_alive], expected["tokens"][is_alive])
        assert torch.equal(found["done"], expected["done"])
        close(found["score"], expected["score"])
        has_ended = expected["score"] > -torch.inf
        assert torch.equal(found["length"][has_ended], expected["length"][has_ended])
        length = both[0].cache.length
        histories = []
        for search, state in zip(both, (found, expected), strict=True):
            inside = torch.arange(search.cache.capacity, device=DEVICE) <= state["length"][..., None]
            sentences = state["sentence"].masked_fill(~inside, 0)[has_ended]
            rows = torch.arange(case.W, device=DEVICE)[:, None].expand(case.W, length)
            if search.cache.ancestors is not None:
                assert (search.cache.ancestors[..., length:] == torch.arange(case.W, device=DEVICE)[:, None]).all()
                rows = search.cache.ancestors[is_fine, :, :length].long()
            else:
                rows = rows.expand(len(state["fed"]), -1, -1)
            histories.append((sentences, state["fed"][:, :length].gather(2, rows.mT).mT[is_alive]))
        close(*histories, rtol=0, atol=0)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.W == 1 or n in ("equal", "ties", "bfloat16")])
def test_greedy(name: str) -> None:
    skip_without_triton()
    case = CASES[name]._replace(W=1)
    for _, (found, expected), _ in step_by_both(lambda cache: sampling._Greedy(cache, 1, case.eos), case):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("logits", [bad(math.nan), bad(-math.nan), bad(math.inf)])
def test_greedy_of_nan(logits: Callable[..., Tensor]) -> None:
    skip_without_triton()
    for both, _, _ in step_by_both(lambda cache: sampling._Greedy(cache, 1, 2), Case(3, 1, 70, logits)):
        found, expected = (search.state for search in both)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("search", ["greedy", "beams"])
def test_graphs(search: str, recorded_calls: Any) -> None:  # noqa: F811
    """Kept ones, with the kernels of a whole step."""
    skip_without_triton()
    model, this = make_model().to(DEVICE), SUBJECTS["public"]
    find = partial(SEARCHES[search], subject=this, max_len=4)
    for length in (9, 12):
        source = this.source(3, length).to(DEVICE)
        with use_backend("triton"), decoding_as_on_a_gpu():
            found = find(model, source)
        assert found == find(model, source) and len({*map(str, found)}) > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what is recorded on a CPU")
@pytest.mark.parametrize("beam_size", [0, 5])
def test_a_step_is_few_kernels(
    beam_size: int,
    recorded_calls: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 6 layers: 11 each, and what is before and after. A view that is called unsafe is none, and conftest fills."""
    skip_without_triton()
    steps, undo = [], _Recorder.undo

    def keep(graph: _Recorder) -> None:
        steps.append([call[0] for call in graph.calls if not re.search("_unsafe_view|fill_", str(call[0]))])
        undo(graph)

    monkeypatch.setattr(_Recorder, "undo", keep)
    sizes = dict(d_word_vec=32, d_model=32, d_inner=48, n_layers=6, n_head=2, d_k=16, d_v=16, n_position=9)
    model, options = FusedTransformer(70, 70, 0, 0, **sizes).eval(), {"max_len": 4, "bos_idx": 1, "eos_idx": -1}
    with use_backend("triton"), decoding_as_on_a_gpu():
        if beam_size:
            generate.beam_search(model, torch.full((1, 4), 5), beam_size=beam_size, **options)
        else:
            generate.greedy(model, torch.full((1, 4), 5), **options)
    *_, step = steps
    assert len(step) <= 76, step
