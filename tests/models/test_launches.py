"""A training step asks the device for few launches: counted, and compared with what it would take otherwise."""

import torch
from launches import DEVICE, base_model, counted, step_launches
from plain_transformer import PlainTransformer

# Launches of a step by Triton without dropout, to be lowered as they fall. Dropout adds a seed for each of 50 masks. On
# a GPU a few differ, which was never counted: a check of values less, tiles of two sizes.
AT_MOST = 394


def step(backend, dropout):
    return step_launches(base_model(dropout=dropout, attn_dropout=dropout), backend).total


def test_what_counts_as_a_launch():
    """Writing does, in place or not; a view, memory without a value and a number for the host do not."""
    x = torch.ones(4, 4)
    with counted() as launches:
        y = torch.empty_like(x).view(16)[2:].t()
        y.add_(1)
        x.t().unsqueeze(0).expand(3, 4, 4).contiguous()
        (x @ x).sum().item()
    assert launches.by_op == {"add_": 1, "clone": 1, "mm": 1, "sum": 1}


def test_a_place_is_a_line_of_the_package():
    launches = step_launches(base_model(n_layers=1), "reference")
    places = {place.partition(":")[0] for _, place in launches.by_place}
    assert {"fastattn/reference/attention.py", "fastattn/reference/philox.py"} <= places


def test_kernels_take_a_third_of_the_launches_of_the_reference(triton):
    """A kernel counts as one launch, however it runs here; what prepares its masks and gradients counts too."""
    counts = step_launches(base_model(dropout=0.0, attn_dropout=0.0), "triton")
    assert not {"clone", "copy_", "_to_copy"} & set(counts.by_op), "something is copied or transposed in memory"
    launches = counts.total
    assert launches <= step("reference", 0.0) / 3
    assert launches <= AT_MOST or DEVICE == "cuda", "a change made a step longer"
    assert launches < step_launches(base_model(PlainTransformer, dropout=0.0, attn_dropout=0.0)).total


def test_operators_of_pytorch_take_a_third_without_dropout():
    """With dropout, its rule, for which PyTorch has no operator, is most of a step on either side."""
    assert step("aten", 0.0) <= step("reference", 0.0) / 3
    assert step("aten", 0.1) <= 0.8 * step("reference", 0.1)
