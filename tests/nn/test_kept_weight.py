"""Copies of weights for inference: used from the second call, and never after a weight has changed."""

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import linear

from fastattn import FusedTransformer
from fastattn.backends import cpu_matmul, timings
from fastattn.nn.kept_weight import _NAME
from fastattn.nn.leaves import Linear

pytestmark = pytest.mark.skipif(not cpu_matmul.has_onednn(), reason="this PyTorch has no products with packed weights")

DTYPE = torch.float32


@pytest.fixture(autouse=True)
def packed_on_every_processor() -> Iterator[None]:
    with timings.override_choices({"product": {"float32": "oneDNN"}}):
        yield


@pytest.fixture
def module() -> Linear:
    torch.manual_seed(0)
    return Linear(256, 256, dtype=DTYPE).eval()


def is_packed(module: Linear) -> bool:
    return getattr(module.__dict__.get(_NAME), "made", None) is not None


def call(module: Linear, rows: int = 16) -> None:
    """Three calls, which are those of the weight as it is."""
    x = torch.randn(2, rows, 256).to(DTYPE)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(module(x), linear(x, module.weight, module.bias), rtol=2e-2, atol=2e-2)


def test_it_is_packed_at_the_second_call(module):
    x = torch.randn(16, 256).to(DTYPE)
    with torch.inference_mode():
        module(x)
        assert not is_packed(module)
        module(x)
    assert is_packed(module)
    call(module)
    assert module(x).requires_grad


CHANGES = {
    "in place": lambda m, new: m.weight.detach().copy_(new),
    "one element in place": lambda m, new: m.weight.detach()[3].copy_(new[3]),
    "data in place": lambda m, new: m.weight.data.copy_(new),
    "other data": lambda m, new: setattr(m.weight, "data", new),
    "another parameter": lambda m, new: setattr(m, "weight", torch.nn.Parameter(new)),
    "load_state_dict": lambda m, new: m.load_state_dict({"weight": new, "bias": m.bias}),
    "a step of training": lambda m, new: (m.train(), m.weight.data[5].copy_(new[5]), m.eval()),
    "bias": lambda m, new: m.bias.data.add_(3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(module, change):
    call(module)
    assert is_packed(module)
    change(module, torch.randn_like(module.weight) * 3)
    call(module)
    assert is_packed(module)


def test_training_drops_it(module):
    call(module)
    module.train()
    assert _NAME not in module.__dict__
    call(module)
    assert not is_packed(module)


def test_what_it_does_not_compute(module):
    """float32, few rows, autocast, vmap and tensors of inference mode, which have no version."""
    call(module)
    call(module, rows=1)
    x = torch.randn(4, 16, 256).to(DTYPE)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert module(x).dtype is torch.float16
    with torch.no_grad():
        expected = linear(x, module.weight, module.bias)
        torch.testing.assert_close(torch.vmap(module)(x), expected, rtol=2e-2, atol=2e-2)
    with torch.inference_mode():
        of_inference = Linear(256, 256, dtype=DTYPE).eval()
        call(of_inference)
    assert not is_packed(of_inference)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(module, copied):
    call(module)
    other = copied(module)
    other.weight = torch.nn.Parameter(other.weight.detach() * 3)
    for m in (other, module):
        call(m)
    assert [*other.state_dict()] == ["weight", "bias"]


def test_steps_of_decoding_see_every_change():
    torch.manual_seed(0)
    sizes = {"d_word_vec": 16, "d_model": 16, "d_inner": 32, "n_layers": 2, "n_head": 2, "d_k": 8, "d_v": 8}
    model = FusedTransformer(20, 20, 0, 0, **sizes).eval()

    @torch.no_grad()
    def decoded(model: FusedTransformer) -> torch.Tensor:
        cache = model.start_decoding(torch.arange(2, 8)[None], 1, 3)
        return torch.stack([model.next_logits(torch.tensor([[token]]), cache) for token in (2, 5)])

    decoded(model)
    kept = model.decoder.layer_stack[0].enc_attn.__dict__[_NAME]
    before = decoded(model)
    assert model.decoder.layer_stack[0].enc_attn.__dict__[_NAME] is kept
    for name, p in model.decoder.layer_stack.named_parameters():
        p.data.copy_(p.data + torch.randn_like(p))
        found = decoded(model)
        assert not torch.equal(found, before), name
        torch.testing.assert_close(found, decoded(copy.deepcopy(model)))
        before = found
    model.train()
    assert not any(_NAME in module.__dict__ for module in model.modules())
