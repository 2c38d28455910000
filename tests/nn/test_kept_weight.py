"""No edit of a weight is missed by what is kept between two calls, in whatever way it was made."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from fastattn import FusedTransformer, accelerate, generate, use_backend
from fastattn.backends import cpu_matmul

Found = list[Tensor]


@pytest.fixture(autouse=True)
def packed_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_matmul, "choice", lambda: "oneDNN" if cpu_matmul.has_onednn() else "PyTorch")
    yield
    generate.drop_graphs()


def own_model() -> FusedTransformer:
    sizes = dict(d_word_vec=256, d_model=256, d_inner=1024, n_layers=1, n_head=4, d_k=64, d_v=64)
    return FusedTransformer(20, 20, 0, 0, **sizes)


def layer() -> nn.Module:
    accelerate(model := nn.TransformerDecoderLayer(256, 4, 1024, batch_first=True))
    return model


def t5() -> nn.Module:
    accelerate(model := FAMILIES["t5"].build(vocab_size=4096, tie_word_embeddings=False))
    return model


def steps(rows: int) -> Callable[[Any], Found]:
    @torch.no_grad()
    def run(model: Any) -> Found:
        cache = model.start_decoding(torch.arange(2, 8)[None], rows, 3)
        return [model.next_logits(torch.full((1, rows), token), cache) for token in (2, 5)]

    return run


@torch.no_grad()
def outputs(model: Any) -> Found:
    torch.manual_seed(1)
    return [model(torch.randn(4, 80, 256), torch.randn(4, 80, 256))]


# A model, what is computed of it, and one of its linear maps.
W_VS, W_1 = "decoder.layer_stack.0.slf_attn.w_vs", "decoder.layer_stack.0.pos_ffn.w_1"
READERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Found], str]] = {
    "steps": (own_model, steps(4), W_VS),
    "steps, one row": (own_model, steps(1), W_1),
    "steps in bfloat16": (lambda: own_model().bfloat16(), steps(4), W_VS),
    "an output head": (t5, steps(4), "lm_head"),
    "torch.nn": (layer, outputs, "linear1"),
}


def new(m: nn.Linear) -> Tensor:
    return torch.randn_like(m.weight).detach() / 4


def set_(t: Tensor, value: Any) -> None:
    t.copy_(torch.as_tensor(value))


def optimizer_step(m: nn.Linear) -> None:
    for p in m.parameters():
        p.grad = torch.randn_like(p)
    torch.optim.AdamW(m.parameters(), lr=0.1, fused=True).step()


def swapped_out(m: nn.Linear) -> None:
    """The old memory is edited after the weight has got another of equal values."""
    old, m.weight.data = m.weight.data, m.weight.data.clone()
    old.fill_(3.0)


EDITS: dict[str, Callable[[nn.Linear], Any]] = {
    "an element under no_grad": lambda m: set_(m.weight[3, 5], 1),
    "an element in inference mode": torch.inference_mode()(lambda m: set_(m.weight[3, 5], 1)),
    "an element through .data": lambda m: set_(m.weight.data[3, 5], 1),
    "the last column": lambda m: set_(m.weight.data[:, -1], 1),
    "signs": lambda m: m.weight.data.neg_(),
    "other data": lambda m: setattr(m.weight, "data", new(m)),
    "another language": lambda m: ctypes.memset(m.weight.data_ptr(), 63, 512),
    "old memory": swapped_out,
    "another parameter": lambda m: setattr(m, "weight", nn.Parameter(new(m))),
    "load_state_dict, assign": lambda m: m.load_state_dict({"weight": new(m)}, strict=False, assign=True),
    "an optimizer": optimizer_step,
    "requires_grad_": lambda m: m.weight.requires_grad_(False),
    "prune": lambda m: prune.l1_unstructured(m, "weight", 0.3),
    "parametrize": lambda m: parametrize.register_parametrization(m, "weight", nn.Softmax(0)),
}
CHANGES_NOTHING = ("requires_grad_", "old memory")


@pytest.mark.parametrize("reader", ["steps", *(pytest.param(r, marks=pytest.mark.full) for r in [*READERS][1:])])
def test_every_edit_is_seen(reader: str) -> None:
    make, run, path = READERS[reader]
    torch.manual_seed(0)
    unedited = make().eval()
    before = run(unedited)
    if reader.startswith("steps") and reader != "steps in bfloat16":  # what is packed has the numbers of the formula
        with use_backend("reference"):
            torch.testing.assert_close(before, run(unedited), rtol=1e-4, atol=1e-5)
    for name, edit in EDITS.items():
        model = copy.deepcopy(unedited)
        run(model)
        with torch.no_grad():
            edit(model.get_submodule(path))
        found, expected = run(model), run(copy.deepcopy(model))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)
        assert all(map(torch.equal, found, before)) is (name in CHANGES_NOTHING), name


def test_other_steps_keep_their_own() -> None:
    """A hook in the feed-forward: the attention's steps are no longer straight, and read other rows in one weight."""
    model = own_model().eval()
    steps(4)(model)
    model.get_submodule(W_1).register_forward_hook(lambda m, _, out: 2 * out)
    torch.testing.assert_close(steps(4)(model), steps(4)(copy.deepcopy(model)))


def test_what_is_kept_in_one_dtype_is_not_read_in_another() -> None:
    model, run = own_model().eval(), steps(4)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            torch.testing.assert_close(run(model), run(copy.deepcopy(model)), rtol=0, atol=0)
