"""torch.compile and torch.export of the model with batches and lengths that are free."""

import io

import pytest
import torch
from model_checks import NO_DROPOUT, PAD_SRC, PAD_TRG, TINY, VOCAB, fused
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend


def tokens(batch, source, target):
    """A batch with padding, and what follows each target token."""
    src, trg = torch.randint(3, VOCAB, (batch, source)), torch.randint(3, VOCAB, (batch, target + 1))
    src[1, source // 2 :], trg[0, target // 2 :] = PAD_SRC, PAD_TRG
    return src, trg[:, :-1].contiguous(), trg[:, 1:].contiguous()


class Loss(nn.Module):
    """torch.export calls forward, and only with tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, src, trg, gold):
        return self.model(src, trg, gold, label_smoothing=0.1)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("what", ["logits", pytest.param("loss", marks=pytest.mark.full)])
def test_export_with_a_free_batch_and_free_lengths(what, strict):
    model = fused(**TINY).cpu().eval()
    module, inputs = (model, 2) if what == "logits" else (Loss(model), 3)
    batch, source, target = (torch.export.Dim(name, min=2, max=30) for name in ("batch", "source", "target"))
    shapes = ({0: batch, 1: source}, {0: batch, 1: target}, {0: batch, 1: target})[:inputs]
    exported = torch.export.export(module, tokens(3, 7, 5)[:inputs], dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for sizes in ((3, 7, 5), (5, 11, 9), (2, 4, 30), (4, 6, 6)):
        given = tokens(*sizes)[:inputs]
        torch.testing.assert_close(loaded(*given), module(*given))


@pytest.mark.bug_class("T22", "T23")
@pytest.mark.full  # the everyday tier has test_one_graph_for_all_sizes of every op, and one compiled graph of a model
@pytest.mark.parametrize("what", ["logits", "loss"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_compiled_graph_for_all_sizes(dynamic, what):
    """Batches that change compile once more, then no more; without a graph break. Gradients are those of eager. With
    dynamic=True the first graph is for all."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    model = fused(**TINY, **NO_DROPOUT).cpu()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=graphs)
    inputs, counts = 2 if what == "logits" else 3, []
    for sizes in ((3, 7, 5), (4, 9, 6), (5, 12, 8), (2, 14, 10), (3, 11, 11)):
        given, found = tokens(*sizes)[:inputs], []
        for call in (compiled, model):
            model.zero_grad()
            result = call(*given)
            result.square().sum().backward()
            found.append((result.detach(), [p.grad.clone() for p in model.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        counts.append(graphs.frame_count)  # the backend may count the first graph twice
    assert counts[0 if dynamic else 1 :] == counts[-1:] * (5 if dynamic else 4)


@pytest.mark.full
def test_compiled_dropout_takes_any_size():
    """The columns of Philox come in eights, so some lengths need their own graph: a few, not one each."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(fused(**TINY).cpu(), fullgraph=True, dynamic=True, backend=graphs)
    for length in range(3, 30, 2):
        assert compiled(*tokens(2, length, length)).isfinite()
    assert graphs.frame_count <= 4
