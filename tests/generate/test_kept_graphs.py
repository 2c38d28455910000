"""What decoding on a GPU keeps for the next batch (on a CPU recorded graphs), and how often it reads the device."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorded_graph import RecordedGraphs
from search_cases import BOS, EOS, PAD, make_model, make_source
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn import FusedTransformer, generate, use_backend
from fastattn.generate import kept_graphs
from fastattn.graphs import capture
from fastattn.models import ABDTransformer, Translator
from fastattn.nn import DecoderCache

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LIMITS: dict[str, Any] = {"bos_idx": BOS, "eos_idx": EOS, "max_len": 20}
WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "greedy": lambda model, src: generate.greedy(model, src, **LIMITS),
    "sample": lambda model, src: generate.sample(model, src, top_k=1, **LIMITS),
    "beams": lambda model, src: [
        [h.tokens for h in found] for found in generate.beam_search(model, src, beam_size=3, n_best=2, **LIMITS)
    ],
    "Translator": lambda model, src: Translator(model, 3, 21, PAD, PAD, BOS, EOS).translate(src),
}


class Made:
    """Counts what decoding creates: objects with a stream and a pool, and graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools, self.graphs = 0, 0
        made, kind = self, capture.CudaGraphs if CUDA else RecordedGraphs

        class Counted(kind):  # type: ignore[misc, valid-type]
            def __init__(self, device: torch.device) -> None:
                super().__init__(device)
                made.pools += 1

            def captured(self, *arguments: Any) -> Any:
                made.graphs += 1
                return super().captured(*arguments)

        monkeypatch.setattr(kept_graphs, "CudaGraphs", Counted)

    def now(self) -> tuple[int, int]:
        return self.pools, self.graphs


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Counts for decoding by graphs. Nothing is kept from one test to the next."""
    monkeypatch.setattr(kept_graphs, "_shared", {})
    kept_graphs.drop_graphs()
    with use_backend(None if CUDA else "reference"):
        yield Made(monkeypatch)
    kept_graphs.drop_graphs()


def decode(way: str, model: nn.Module, src_seq: Tensor) -> Any:
    """By graphs, also on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            make = DecoderCache.__init__

            def on_device(self: DecoderCache, *arguments: Any) -> None:
                make(self, *arguments)
                self.on_device = True

            patch.setattr(DecoderCache, "__init__", on_device)
        return WAYS[way](model, src_seq)


def plainly(way: str, model: nn.Module, src_seq: Tensor) -> Any:
    """Without graphs; on a CPU the batch then shrinks at other steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "WARM_UP", 99)
        patch.setattr(kept_graphs, "MAX_TOKENS", 0)
        patch.setattr(kept_graphs, "CudaGraphs", capture.CudaGraphs)
        return WAYS[way](model, src_seq)


def sources(batch: int = 24) -> tuple[Tensor, Tensor]:
    return make_source(batch).to(DEVICE), make_source(batch, 12).to(DEVICE)


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_second_batch_of_the_same_shape(way: str, made: Made) -> None:
    """It needs no new stream, pool or graph, and finds what plain steps find. Sources may differ in length."""
    model = make_model().to(DEVICE)
    first, second = sources()
    assert decode(way, model, first) == plainly(way, model, first)
    before = made.now()
    assert decode(way, model, second) == plainly(way, model, second)
    assert made.now() == before == (1, 2)


def test_changes_of_the_model(made: Made) -> None:
    """The same graph reads weights that changed in place; other changes need another graph."""
    model = make_model().to(DEVICE)
    src_seq, _ = sources(8)

    def change(do: Callable[[], Any], graphs: int, autocast: bool = False) -> None:
        before = made.graphs
        do()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            assert decode("greedy", model, src_seq) == plainly("greedy", model, src_seq)
        assert made.graphs - before == graphs

    def shift() -> None:
        with torch.no_grad():
            for p in model.decoder.parameters():
                p += torch.randn_like(p) / 4

    def shift_projection() -> None:
        with torch.no_grad():
            for p in model.trg_word_prj.parameters():
                p += torch.randn_like(p)

    change(shift, 1)
    change(shift, 0)
    change(shift, 1, autocast=True)
    change(shift, 0, autocast=True)  # the casts of the first context are gone
    change(lambda: setattr(model, "trg_word_prj", nn.Sequential(model.trg_word_prj)), 1, autocast=True)
    change(shift_projection, 0, autocast=True)  # a map that autocast casts
    change(lambda: setattr(model, "trg_word_prj", model.trg_word_prj[0]), 1)
    change(lambda: model.load_state_dict({k: v + 0.01 for k, v in model.state_dict().items()}, assign=True), 1)
    change(lambda: setattr(model, "scale_prj", not model.scale_prj), 1)
    change(lambda: model.decoder.layer_stack[0].pos_ffn.w_1.register_forward_hook(lambda _, x, out: out / 2), 1)
    change(lambda: None, 1)  # a model with a hook gets a new graph at each call


def test_what_is_kept(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the limits, nothing of a deleted model, and nothing after drop_graphs."""
    monkeypatch.setattr(kept_graphs, "MAX_SEARCHES", 2)
    model = make_model().to(DEVICE)

    def sizes(model: nn.Module) -> list[int]:
        return [search.cache.batch for search, _ in kept_graphs._kept[model][1].values()]

    for batch in (3, 4, 5):
        decode("greedy", model, sources(batch)[0])
    assert sizes(model) == [4, 5]
    monkeypatch.setattr(kept_graphs, "MAX_TOKENS", 4 * LIMITS["max_len"])
    before = made.graphs
    decode("greedy", model, sources(5)[0])  # too large
    assert made.graphs == before + 1
    decode("greedy", model, sources(3)[0])
    assert sizes(model) == [3]
    kept_graphs.drop_graphs()
    assert not kept_graphs._kept
    decode("greedy", model, sources(3)[0])
    assert made.graphs == before + 3 and sizes(model) == [3]
    del model
    gc.collect()
    assert not kept_graphs._kept


def test_a_search_within_a_search(made: Made) -> None:
    """on_token may decode with the same model, also after the batch has shrunk: a search in use is not used twice."""
    model = make_model().to(DEVICE)
    second, first = sources()
    expected = [plainly("greedy", model, src) for src in (first, second)]
    for _ in range(2):
        inner = []

        def on_token(step: int, *_: Any, inner: list[Any] = inner) -> None:
            if step == 17:
                inner.append(decode("greedy", model, second))

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(WAYS, "outer", lambda model, src: generate.greedy(model, src, on_token=on_token, **LIMITS))
            assert [decode("outer", model, first), *inner] == expected


@pytest.mark.bug_class("T16")
def test_how_often_the_device_is_read(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read per check for the end, one copy of each tensor when sentences leave; with on_token a read per step."""
    reads: Counter[str] = Counter()
    for name in ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__"):
        read = getattr(Tensor, name)

        def count(self: Tensor, *arguments: Any, name: str = name, read: Any = read) -> Any:
            code = sys._getframe(1).f_code
            on_host = code.co_name in ("result", "history", "<genexpr>")  # they read what was copied
            if "/fastattn/generate/" in code.co_filename and not on_host:
                reads[name] += 1
            return read(self, *arguments)

        monkeypatch.setattr(Tensor, name, count)
    model, (src_seq, _) = make_model().to(DEVICE), sources(32)
    for way, tensors in (("greedy", 5), ("beams", 9), ("Translator", 7)):
        reads.clear()
        decode(way, model, src_seq)
        assert reads["tolist"] <= 3 and reads["cpu"] <= 2 * tensors and set(reads) == {"tolist", "cpu"}, way
    reads.clear()
    with pytest.MonkeyPatch.context() as patch:
        listening: dict[str, Any] = LIMITS | {"on_token": lambda *_: None}
        patch.setitem(WAYS, "listening", lambda model, src: generate.greedy(model, src, **listening))
        decode("listening", model, src_seq)
    assert reads["tolist"] <= LIMITS["max_len"]


class Casts(TorchDispatchMode):
    """Counts casts of a model's weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights, self.count = {p.data_ptr() for p in model.parameters()}, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_cast = function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.weights
        self.count += is_cast and args[0].dtype == torch.float32
        return function(*args, **kwargs or {})


def test_casts_of_weights() -> None:
    """Under autocast only the first step of a cache casts them, also where they are frozen."""
    model = make_model()

    def casts(model: FusedTransformer) -> list[int]:
        counts = []
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), use_backend("reference"):
            cache = model.start_decoding(make_source(), 1, 9)
            for _ in range(3):
                with Casts(model) as mode:
                    model.next_logits(torch.full((5, 1), BOS), cache)
                counts.append(mode.count)
        return counts

    maps = 2 * (4 + 2 + 2) + 1  # of each layer: self-attention, attention to the encoder, feed-forward
    for frozen in (False, True):
        assert casts(model.requires_grad_(not frozen)) == [maps + 4, 0, 0]  # and the feed-forwards' biases


def test_captions_of_both_directions(made: Made) -> None:
    """Each direction has its graph, and a second batch needs no other."""

    class Words:
        n_vocabs, word2idx, idx2word = 30, {"<PAD>": 0, "<S>": 1}, [str(i) for i in range(30)]

    torch.manual_seed(0)
    model = ABDTransformer(Words(), 8, 32, 64, 4, 1, 0.1, "one", n_heads_big=4).eval().to(DEVICE)

    def captions(model: nn.Module, features: Tensor) -> Any:
        ways = model.beam_search_decode(features, 3, 9)  # others repeat words, in orders of equal scores
        return [found[0].value for way in ways for found in way]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WAYS, "captions", captions)
        for length in (6, 7):
            features = torch.randn(8, length, 8, device=DEVICE)
            assert decode("captions", model, features) == plainly("captions", model, features)
    assert made.now() == (1, 2)
