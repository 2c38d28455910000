"""Linear maps of one input as one product: the same numbers as one by one, over parameters that stay apart."""

import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastattn.nn import joint_linear as backend
from fastattn.nn.joint_linear import join, joint_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, D = (12, 8, 20), 16


def make(dtype=torch.float32, joined=True):
    linears = [nn.Linear(D, rows, bias=False, device=DEVICE, dtype=dtype) for rows in ROWS]
    if joined:
        join(linear.weight for linear in linears)
    return linears


@pytest.fixture
def products(monkeypatch):
    """The shapes of the weights that F.linear was called with."""
    seen, linear = [], F.linear

    def spy(x, weight, bias=None):
        seen.append(tuple(weight.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", spy)
    return seen


def results(linears, x, call):
    x = x.detach().requires_grad_()
    out = call(x)
    torch.autograd.backward(out, [torch.cos(torch.arange(t.numel(), device=DEVICE)).view(t.shape).to(t) for t in out])
    grads = [linear.weight.grad for linear in linears]
    for linear in linears:
        linear.weight.grad = None
    return [t.detach() for t in out], [x.grad, *grads]


@pytest.mark.parametrize("shape", [(3, 5, D), (7, D), (2, 0, D)])
def test_same_as_one_by_one(shape, products):
    linears, x = make(torch.float64), torch.randn(shape, dtype=torch.float64, device=DEVICE)
    out, grads = results(linears, x, lambda x: joint_linear(x, linears))
    assert products == [(sum(ROWS), D)]
    want, want_grads = results(linears, x, lambda x: [F.linear(x, linear.weight) for linear in linears])
    torch.testing.assert_close(out, want, rtol=0, atol=1e-14)
    torch.testing.assert_close(grads, want_grads, rtol=0, atol=1e-13)


def test_autocast_casts_and_gives_float32_gradients():
    linears, x = make(), torch.randn(3, 5, D, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        out, grads = results(linears, x, lambda x: joint_linear(x, linears))
        want, want_grads = results(linears, x, lambda x: [linear(x) for linear in linears])
    assert [t.dtype for t in out] == [torch.bfloat16] * 3 and [t.dtype for t in grads] == [torch.float32] * 4
    torch.testing.assert_close(out, want, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(grads, want_grads, rtol=2**-6, atol=2**-4)


def test_weights_stay_parameters_of_their_own(products):
    linears, x = make(), torch.randn(2, D, device=DEVICE)
    before = [t.clone() for t in joint_linear(x, linears)]
    stored = io.BytesIO()
    torch.save([linear.state_dict() for linear in linears], stored)
    assert stored.tell() < 3 * sum(ROWS) * D * 4  # the block once
    with torch.no_grad():
        for linear in linears:
            linear.weight.mul_(2)  # as an optimizer does
    torch.testing.assert_close(list(joint_linear(x, linears)), [2 * t for t in before])
    stored.seek(0)
    for linear, state in zip(linears, torch.load(stored), strict=True):
        linear.load_state_dict(state)
    torch.testing.assert_close(list(joint_linear(x, linears)), before)
    assert set(products) == {(sum(ROWS), D)}


def test_frozen_weights_and_frozen_input_get_no_gradient():
    linears = make()
    linears[1].weight.requires_grad_(False)
    x = torch.randn(2, D, device=DEVICE)
    sum(t.sum() for t in joint_linear(x, linears)).backward()
    assert [linear.weight.grad is None for linear in linears] == [False, True, False]
    for linear in linears:
        linear.weight.requires_grad_(False)
    x.requires_grad_()
    sum(t.sum() for t in joint_linear(x, linears)).backward()
    torch.testing.assert_close(x.grad, sum(linear.weight.sum(0) for linear in linears).expand(2, D))


def test_what_is_not_a_plain_product_is_called_one_by_one(products):
    x = torch.randn(2, D, device=DEVICE)

    def calls(linears, **options):
        products.clear()
        joint_linear(x, linears, **options)
        return len(products)

    hooked, adapted = make(), make()
    fired = []
    hooked[0].register_forward_hook(lambda *_: fired.append(1))

    class Adapted(nn.Linear):
        """As adapters of fine-tuning libraries are: a linear map that adds something."""

    adapted[1].__class__ = Adapted
    assert calls(make()) == 1
    assert calls(make(), backend="reference") == calls(hooked) == calls(adapted) == 3 and fired
    assert calls(make(joined=False)) == calls(copy.deepcopy(make())) == 3
    assert joint_linear(x, []) == ()


def test_neighbours_in_memory_that_are_no_block_are_not_read_as_one():
    block = torch.randn(24, D, device=DEVICE)
    a, b = block[:12], block[12:]
    assert backend._joined([a, b]).shape == (24, D)
    assert backend._joined([b, a]) is None and backend._joined([a, block[13:]]) is None
    assert backend._joined([a.t().contiguous().t(), b]) is None
    memory = np.zeros((24, D), dtype=np.float32)  # two storages side by side
    assert backend._joined([torch.from_numpy(memory[:12]), torch.from_numpy(memory[12:])]) is None


def test_moves_and_casts_join_again():
    module = nn.ModuleList(make(joined=False))
    weights = [linear.weight for linear in module]
    join(weights)
    address = weights[0].data_ptr()
    join(weights)
    assert weights[0].data_ptr() == address  # nothing to do
    module.double()
    assert backend._joined(weights) is None
    join(weights)
    assert backend._joined(weights).dtype == torch.float64
    join([weights[0], nn.Parameter(torch.ones(3, D, device=DEVICE))])  # of another dtype: left alone
    assert backend._joined(weights) is not None
