"""Training loops of other libraries: the losses of FusedTransformer are those of the public architecture."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from model_checks import DEVICE, build, check, fused, rows
from recorded_graph import recorded_calls  # noqa: F401
from torch import Tensor, nn

import fastattn
from fastattn.graphs.graphed_call import EAGER, NEW_SHAPE, stats

Loss = Callable[[Any, Any], Tensor]  # of a model and its batch


def optimised(make: Callable[..., torch.optim.Optimizer], model: nn.Module, loss: Loss, batch: Any) -> list[float]:
    """With accumulated and clipped gradients."""
    optimizer, losses = make(model.parameters()), []
    for _ in range(8):
        optimizer.zero_grad()
        for part in zip(*(t.chunk(3) for t in batch), strict=True):
            value = loss(model, part) / 3
            value.backward()
            losses.append(value.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return losses


def scaled(model: nn.Module, loss: Loss, batch: Any) -> list[float]:
    """A scaled loss in float16: the same steps are skipped, and the losses of the others fall equally."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**14, growth_interval=4)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for i in range(12):
        with torch.autocast(DEVICE, torch.float16):
            value = loss(model, batch)
        optimizer.zero_grad()
        scaler.scale(value * (math.inf if i == 6 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(value.item())
    assert scaler.get_scale() >= 2.0**14 and all(p.isfinite().all() for p in model.parameters())
    return losses


def accelerated(model: nn.Module, loss: Loss, batch: Any) -> list[float]:
    """In bfloat16, by Hugging Face's accelerate, which replaces the model's forward."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=DEVICE == "cpu", mixed_precision="bf16")
    return optimised(partial(torch.optim.Adam, lr=3e-3), accelerator.prepare(model), loss, batch)


def adapted(model: nn.Module, loss: Loss, batch: Any) -> list[float]:
    """peft's adapters, of which each is trained."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    targets = ["w_qs", "w_1", "w_2", "fc", "trg_word_prj"]
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False), model)
    losses = optimised(partial(torch.optim.Adam, lr=1e-2), model, loss, batch)
    assert all((p.grad is not None) is ("lora" in n) for n, p in model.named_parameters())
    return losses


LOOPS: dict[str, tuple[Callable[..., list[float]], float]] = {
    "fused": (partial(optimised, partial(torch.optim.Adam, lr=3e-3, fused=True)), 1e-4),
    "GradScaler": (scaled, 1e-2),
    "accelerate": (accelerated, 2e-2),
    "peft": (adapted, 1e-4),
}
EVERYDAY = [("fused", False), ("GradScaler", True), ("accelerate", False)]


@pytest.mark.parametrize(
    ("loop", "graphs"), rows(EVERYDAY, [("GradScaler", False), ("peft", False), ("accelerate", True)])
)
@pytest.mark.usefixtures("recorded_calls")
def test_loops(loop: str, graphs: bool) -> None:
    """By the model's own loss and by its logits."""
    train, tolerance = LOOPS[loop]
    models = build("public", backend="reference" if graphs else None)
    by_logits = copy.deepcopy(models.ours)
    models.ours.graphs = graphs

    def own(model: nn.Module, batch: Any) -> Tensor:
        return model(*batch, batch[1], label_smoothing=0.1)

    def of_logits(model: nn.Module, batch: Any) -> Tensor:
        return models._replace(batch=tuple(batch), targets=(batch[1],)).loss(model)

    found = [train(models.ours, own, models.batch), train(by_logits, of_logits, models.batch)]
    expected = train(models.theirs, of_logits, models.batch)
    for losses in found:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=0)
    assert expected[-1] < expected[0]
    if graphs:
        done = stats(models.ours)
        assert done.replays == len(found[0]) - EAGER and done.eager == {NEW_SHAPE: EAGER}, done.eager


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantisation() -> None:
    models = build("public").train(False)
    low = [torch.ao.quantization.quantize_dynamic(m.cpu(), {nn.Linear}, torch.qint8) for m in models[:2]]
    assert type(low[0].encoder.layer_stack[0].pos_ffn.w_1) is not nn.Linear
    src, trg = (t.cpu() for t in models.batch)
    quantised = models._replace(ours=low[0], theirs=low[1], batch=(src, trg), targets=(trg,))
    check(quantised.solve(low[0], False), quantised.solve(low[1], False), 2e-2)
    torch.testing.assert_close(low[0].loss(src, trg, trg, 0.1), quantised.loss(low[0]))


def test_explain() -> None:
    """It names what is called, and why."""
    model = fused()
    assert not fastattn.explain(model).called and "everything is fused" in str(fastattn.explain(nn.Sequential(model)))
    for module in (model.decoder.layer_stack[1].enc_attn.layer_norm, model.decoder):
        module.register_forward_hook(lambda *_: None)
    explanation = fastattn.explain(model)
    assert explanation.called == {"decoder.layer_stack.1.enc_attn.layer_norm": "has forward hooks"}
    assert explanation.not_stepped == {"decoder": "has forward hooks"}
    assert "enc_attn.layer_norm has forward hooks" in str(explanation)
