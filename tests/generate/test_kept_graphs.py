"""What decoding on a GPU keeps for the next batch; on a CPU graphs are recorded.

Which changes of a model need another graph: tests/graphs/test_changes.py.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from model_checks import DEVICE, WIDTHS, captioner
from recorded_graph import Recorder, decoding_as_on_a_gpu, recorder  # noqa: F401
from search_cases import SEARCHES, SUBJECTS, make_model
from torch import Tensor

from fastattn import generate, use_backend
from fastattn.generate import kept_graphs
from fastattn.nn import DecoderCache

CUDA = torch.cuda.is_available()
PUBLIC = SUBJECTS["public"]
greedy = partial(SEARCHES["greedy"], subject=PUBLIC, max_len=20)


@pytest.fixture(autouse=True)
def _reference(recorder: Recorder) -> Iterator[None]:  # noqa: F811
    with use_backend(None if CUDA else "reference"):
        yield


def decode(search: Callable[..., Any], *arguments: Any) -> Any:
    with decoding_as_on_a_gpu():
        return search(*arguments)


def captions(model: Any, features: Tensor) -> Any:
    ways = model.beam_search_decode(features, 3, 6)  # others repeat words, in orders of equal scores
    return [found[0].value for way in ways for found in way]


CASES = [(subject, search) for subject in SUBJECTS for search in SEARCHES] + [("captioner", "captions")]
EVERYDAY = ("packed", "Translator"), ("m2m100", "beams"), CASES[-1]


@pytest.mark.parametrize(
    ("subject", "search"), [pytest.param(*case, marks=() if case in EVERYDAY else pytest.mark.full) for case in CASES]
)
def test_a_second_batch_of_the_same_shape(subject: str, search: str, recorder: Recorder) -> None:  # noqa: F811
    """It needs no new stream, pool or graph, and finds what steps without graphs find. Sources may differ in length,
    and weights change. The batch shrinks from 24 sentences; each direction of captions has a graph."""
    if subject == "captioner":
        model, find = captioner("one", "sequence").ours.eval(), captions
        sources = [torch.randn(8, length, WIDTHS["one"], device=DEVICE) for length in (6, 7)]
    else:
        model, find = SUBJECTS[subject].build()[0], partial(SEARCHES[search], subject=SUBJECTS[subject], max_len=12)
        sources = [SUBJECTS[subject].source(24, length).to(DEVICE) for length in (9, 12)]
    plain, made = copy.deepcopy(model.to(DEVICE)), []
    for source in sources:
        found = decode(find, model, source)
        made.append((recorder.pools, recorder.captures))
        assert found == find(plain, source) and len({*map(str, found)}) > 1
        with torch.no_grad():
            for p in (*model.parameters(), *plain.parameters()):
                p.mul_(1.2)
    assert CUDA or made[0] == made[1] and made[0][0] == 1 and 0 < made[0][1] <= 3


def test_what_a_graph_is_for(recorder: Recorder) -> None:  # noqa: F811
    """Other tokens, lengths or kinds of search, and another backend or autocast have their own graphs."""
    model, source = make_model().to(DEVICE), PUBLIC.source(4, 9).to(DEVICE)
    plain, short = copy.deepcopy(model), partial(greedy, subject=PUBLIC._replace(eos=-1), max_len=6)
    ways: dict[str, Callable[..., Any]] = {
        "greedy": short,
        "EOS": partial(short, subject=PUBLIC),
        "length": partial(short, max_len=7),
        "backend": use_backend("aten")(short),
        "autocast": torch.autocast(DEVICE, torch.bfloat16)(short),
        **{name: partial(SEARCHES[name], subject=PUBLIC, max_len=6) for name in ("beams", "Translator")},
    }
    for captures in (1, 0):
        for name, way in ways.items():
            before = recorder.captures
            assert decode(way, model, source) == way(plain, source), name
            assert CUDA or recorder.captures - before == captures, name
        with torch.no_grad():  # of which casts are made again; a large bias of the last norm would decide alone
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                q.copy_(p.add_(torch.randn_like(p) * (2.0 if name.endswith("w_2.bias") else 0.1)))


def test_what_is_kept(recorder: Recorder) -> None:  # noqa: F811
    """No more than the limits, nothing of a deleted model, and nothing after drop_graphs."""
    models = [make_model(n_layers=1).to(DEVICE)]

    def captures(batch: int) -> int:
        before, source = recorder.captures, PUBLIC.source(batch, 12).to(DEVICE)
        decode(partial(greedy, max_len=4, subject=PUBLIC._replace(eos=-1)), models[0], source)
        return recorder.captures - before

    def kept() -> int:
        gc.collect()
        return sum(type(found) is DecoderCache for found in gc.get_objects())

    assert [captures(batch) for batch in range(1, 10)] == [1] * 9 and kept() == kept_graphs.MAX_SEARCHES
    assert captures(9) == 0 and captures(1) == 1 and captures(3) == 0  # 2 was the oldest
    generate.drop_graphs()
    assert not kept() and captures(3) == kept() == 1
    models.clear()
    assert not kept()


@pytest.mark.parametrize("search", SEARCHES)
def test_a_capture_that_fails(search: str, recorder: Recorder) -> None:  # noqa: F811
    """That search goes on eagerly, with a warning. The next one has a graph."""
    model, source = make_model().to(DEVICE), PUBLIC.source(4, 9).to(DEVICE)
    find = partial(SEARCHES[search], subject=PUBLIC, max_len=9)
    expected = find(copy.deepcopy(model), source)
    recorder.failures[1] = torch.ones(1, device=DEVICE).item
    with pytest.warns(RuntimeWarning, match="does the model read values on the host"):
        assert decode(find, model, source) == expected
    assert not recorder.replays
    assert decode(find, model, source) == expected and recorder.replays


def test_a_search_within_a_search() -> None:
    """As on_token or another thread may decode with the same model: a search in use is not used twice."""
    model, inner, endless = make_model(n_layers=1).to(DEVICE), [], partial(greedy, subject=PUBLIC._replace(eos=-1))
    second, first = (PUBLIC.source(24, length).to(DEVICE) for length in (9, 12))
    expected = [endless(copy.deepcopy(model), source) for source in (first, second)]
    for _ in range(2):

        def on_token(step: int, *_: Any) -> None:
            if step == 17:
                inner[:] = [decode(endless, model, second)]

        assert [decode(partial(endless, on_token=on_token), model, first), *inner] == expected


def test_the_device_is_not_read_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only now and then, to see whether all sentences have ended. At the end a copy of each tensor goes to the host."""
    reads: list[str] = []
    for name in ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__"):
        read = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda t, name=name, read=read: reads.append(name) or read(t))
    endless = PUBLIC._replace(eos=-1)
    decode(SEARCHES["beams"], make_model(n_layers=1).to(DEVICE), PUBLIC.source(4, 9).to(DEVICE), endless, 30)
    last_copy = len(reads) - reads[::-1].index("cpu")
    assert last_copy < 20, reads
