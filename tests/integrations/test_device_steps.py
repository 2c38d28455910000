"""Accelerated text models decoded by fastattn's ops, as on a GPU, and by graphs (on a CPU recorded ones)."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import tiers
from helpers import skip_without_triton
from test_kept_graphs import WAYS, Casts, Made, decode, made, plainly  # noqa: F401  made is a fixture
from torch import Tensor, nn

pytest.importorskip("transformers")
from test_huggingface_generate import EOS, N_VOCAB, PAD, TEXT, accelerated, source, untouched

from fastattn import generate, use_backend
from fastattn.generate import kept_graphs
from fastattn.models import Translator
from fastattn.nn import decoding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BEAMS, STEPS = 2, 5
PARENTS = torch.tensor([[1, 1], [0, 0], [1, 0], [0, 1]], device=DEVICE)  # after the third step


def tokens_of_steps() -> Tensor:
    """(STEPS, B, W). M2M100 gives padding no position."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, N_VOCAB, (STEPS, 4, BEAMS), generator=generator)
    tokens[-1, 1] = PAD
    return tokens.to(DEVICE)


def inputs_of(model: Any) -> Tensor:
    return source(model)["input_ids"].to(DEVICE)


@torch.no_grad()
def expected_logits(model: Any, tokens: Tensor) -> Tensor:
    """Those of transformers' forward on all tokens of a beam: (STEPS, B, W, N_VOCAB)."""
    src, logits = inputs_of(model).repeat_interleave(BEAMS, 0), []
    history = tokens.new_empty(4, BEAMS, 0)
    for step, new in enumerate(tokens):
        history = torch.cat([history, new[..., None]], 2)
        out = model(input_ids=src, attention_mask=(src != PAD).long(), decoder_input_ids=history.flatten(0, 1))
        logits.append(out.logits[:, -1].unflatten(0, (4, BEAMS)))
        if step == 2:
            history = history.gather(1, PARENTS[..., None].expand_as(history))
    return torch.stack(logits)


@torch.no_grad()
def logits_of_steps(model: Any, tokens: Tensor, on_device: bool) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "_is_straight", lambda *_: False)
        cache, logits = model.start_decoding(inputs_of(model), BEAMS, 8), []
    cache.on_device = on_device
    if on_device:
        cache.pad_memories(32)
    for step, new in enumerate(tokens):
        logits.append(model.next_logits(new, cache))
        if step == 2:
            cache.reorder(PARENTS)
    return torch.stack(logits)


def check_logits(family: str, backend: Any, on_device: bool) -> None:
    plain, tokens = untouched(family).to(DEVICE), tokens_of_steps()
    for attention in (plain.model.decoder.layers[0].self_attn, plain.model.decoder.layers[1].encoder_attn):
        attention.scaling = 0.2
    expected = expected_logits(plain, tokens)
    with use_backend(backend):
        found = logits_of_steps(accelerated(plain), tokens, on_device)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize("backend", [None, "reference"])
def test_logits(family: str, backend: Any) -> None:
    """Those of transformers, for beams that are reordered."""
    check_logits(family, backend, on_device=True)
    if DEVICE == "cpu":
        check_logits(family, backend, on_device=False)


@pytest.mark.parametrize("family", tiers(TEXT))
def test_logits_of_triton(family: str) -> None:
    skip_without_triton()
    check_logits(family, "triton", on_device=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", tiers(TEXT, "M2M100"))
def test_16_bits(family: str, dtype: torch.dtype, autocast: bool) -> None:
    """The error is that of transformers' own forward in this dtype, against float64."""
    plain, tokens = untouched(family).to(DEVICE), tokens_of_steps()
    truth = expected_logits(copy.deepcopy(plain).double(), tokens)
    plain = plain if autocast else plain.to(dtype)
    with torch.autocast(DEVICE, dtype, enabled=autocast):
        theirs = expected_logits(plain, tokens)
        found = logits_of_steps(accelerated(plain), tokens, on_device=True)
    assert found.dtype == theirs.dtype
    errors = [(logits.double() - truth).square().mean().sqrt() for logits in (found, theirs)]
    assert errors[0] <= 1.3 * errors[1]


@torch.no_grad()
def test_casts_of_weights() -> None:
    """Under autocast only the first step casts them, those of the output head too."""
    ours, counts = accelerated(untouched("Bart").to(DEVICE)).requires_grad_(False), []
    with torch.autocast(DEVICE, torch.bfloat16), use_backend("reference"):
        cache = ours.start_decoding(inputs_of(ours), BEAMS, 8)
        cache.on_device = True
        for new in tokens_of_steps():
            with Casts(ours) as mode:
                ours.next_logits(new, cache)
            counts.append(mode.count)
    maps = 2 * (4 + 2 + 2) + 1  # of each layer: self-attention, attention to the encoder, feed-forward
    assert counts == [2 * maps - 1, 0, 0, 0, 0]  # and the layers' biases


@pytest.mark.parametrize("family", tiers(TEXT, "MBart"))
def test_searches_by_ops(family: str) -> None:
    """The tokens of other backends than aten, and on a GPU, are those of a CPU."""
    ours = accelerated(untouched(family))
    src, limits = source(ours)["input_ids"], dict(max_len=6, bos_idx=3, eos_idx=37)

    def found(src: Tensor) -> Any:
        beams = generate.beam_search(ours, src, beam_size=3, **limits)
        return generate.greedy(ours, src, **limits), [[h.tokens for h in of_source] for of_source in beams]

    expected = found(src)
    ours.to(DEVICE)
    with use_backend("reference"):
        assert found(src.to(DEVICE)) == expected
    if DEVICE == "cuda":
        assert found(src.to(DEVICE)) == expected
    with pytest.raises(ValueError, match=f"bos_idx must be below {N_VOCAB}"):
        generate.greedy(ours, src.to(DEVICE), max_len=5, bos_idx=N_VOCAB, eos_idx=EOS)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_fingerprint() -> None:
    """Equal for each generation of one model; another where a weight or a number is; None where the head is changed."""
    ours = accelerated(untouched("MBart")).to(DEVICE)
    decoder = ours.model.decoder

    def fingerprint() -> Any:
        with torch.no_grad():
            return None if kept_graphs._kept_searches(ours) is None else kept_graphs._kept[ours][0]

    def replace(module: nn.Module, name: str = "weight") -> None:
        setattr(module, name, nn.Parameter(getattr(module, name).detach().clone()))

    found = [fingerprint()]
    with torch.no_grad():
        for p in ours.parameters():
            p += 1  # the same graph reads it
    assert fingerprint() == found[0]
    changes = [
        lambda: replace(decoder.layers[1].encoder_attn.q_proj),
        lambda: replace(decoder.layers[0].fc1, "bias"),
        lambda: replace(decoder.embed_positions),
        lambda: replace(decoder.layer_norm),
        lambda: replace(ours.lm_head),
        lambda: setattr(ours, "final_logits_bias", ours.final_logits_bias.clone()),
        lambda: setattr(decoder.embed_tokens, "embed_scale", 3.0),
        lambda: setattr(decoder.layers[0].final_layer_norm, "eps", 1e-3),
        lambda: setattr(decoder.layers[0].self_attn, "scaling", 0.1),
        lambda: setattr(decoder.layers[1].fc2.weight, "data", decoder.layers[1].fc2.weight.detach().clone()),
        lambda: ours.to(torch.float64),
    ]
    for change in changes:
        change()
        found.append(fingerprint())
        assert found[-1] is not None
    assert all(other not in found[:n] for n, other in enumerate(found)) and len(found) == len(changes) + 1
    ours.next_logits = ours.next_logits
    assert fingerprint() is None
    del ours.next_logits
    handle = ours.lm_head.register_forward_hook(lambda *_: None)
    assert fingerprint() is None
    handle.remove()
    assert fingerprint() == found[-1]
    ours.lm_head.__class__ = Doubled
    assert fingerprint() is None


LIMITS: dict[str, Any] = {"bos_idx": 3, "eos_idx": 37, "max_len": 20}
SEARCHES: dict[str, Callable[[Any, Tensor], Any]] = {
    "greedy": lambda model, src: generate.greedy(model, src, **LIMITS),
    "sample": lambda model, src: generate.sample(model, src, top_k=1, **LIMITS),
    "beams": lambda model, src: [
        [h.tokens for h in found] for found in generate.beam_search(model, src, beam_size=3, **LIMITS)
    ],
    "Translator": lambda model, src: Translator(model, 3, 21, PAD, PAD, 3, 37).translate(src),
}


def check_graphs(model: Any, search: str, seed: int = 0, batch: int = 20) -> None:
    """By graphs the same as without. Both attend to as many keys, so that 16 bits round equally."""
    src = F.pad(source(model, batch=batch, seed=seed)["input_ids"], (0, 23), value=PAD).to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WAYS, "this", SEARCHES[search])
        found = decode("this", model, src)
        assert found == plainly("this", model, src)
    assert len({*map(str, found)}) > 1


@pytest.mark.few(2)
@pytest.mark.parametrize("family", tiers(TEXT, "M2M100"))
@pytest.mark.parametrize("search", SEARCHES)
def test_a_second_batch_of_the_same_shape(search: str, family: str, made: Made) -> None:  # noqa: F811
    """It needs no other graph."""
    ours = accelerated(untouched(family)).to(DEVICE)
    check_graphs(ours, search)
    before = made.now()
    check_graphs(ours, search, seed=1)
    assert made.now() == before
    assert before[1] > 0


@pytest.mark.full
def test_graphs_of_a_changed_model(made: Made) -> None:  # noqa: F811
    """A graph reads weights that changed in place. Other changes need another graph, with a hook at each call."""
    ours = accelerated(untouched("Marian")).to(DEVICE)
    head, attention = ours.get_output_embeddings(), ours.model.decoder.layers[0].self_attn

    def change(do: Callable[[], Any], needs_graphs: bool, autocast: bool = False) -> None:
        do()
        before = made.graphs
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            check_graphs(ours, "greedy", batch=8)  # too few to become fewer, which needs another graph
        assert (made.graphs > before) is needs_graphs

    @torch.no_grad()
    def shift() -> None:
        for p in (*ours.model.decoder.parameters(), *head.parameters()):
            p += torch.randn(p.shape).to(DEVICE) / 4

    def replace(name: str) -> None:
        setattr(attention.v_proj, name, nn.Parameter(getattr(attention.v_proj, name).detach().flip(0)))

    change(lambda: None, True)
    change(shift, False)
    change(lambda: None, True, autocast=True)
    change(shift, False, autocast=True)  # the casts are made again
    change(lambda: replace("weight"), True)
    change(lambda: replace("bias"), True)
    change(lambda: setattr(attention, "scaling", 0.5), True)
    change(lambda: setattr(ours, "final_logits_bias", ours.final_logits_bias.roll(1, 1)), True)
    change(lambda: None, False)
    change(lambda: head.register_forward_hook(lambda _, x, out: out.roll(1, -1)), True)
    change(lambda: None, True)


def test_graphs_keep_no_model(made: Made) -> None:  # noqa: F811
    ours = accelerated(untouched("Marian")).to(DEVICE)
    check_graphs(ours, "greedy")
    assert [*kept_graphs._kept] == [ours]
    del ours
    gc.collect()
    assert not kept_graphs._kept
