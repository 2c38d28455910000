"""GraphedStep against the same step in a plain loop (recorded graphs on a CPU)."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from families import FAMILIES, tiers
from graph_twins import Steps, adam, small
from model_checks import DEVICE, PAD_SRC, PAD_TRG, Batch, batch
from recorded_graph import Recorder, recorder  # noqa: F401
from torch import Tensor

from fastattn import GraphedStep, accelerate

UNTIL_REPLAY = Steps.until_replay


pytestmark = pytest.mark.usefixtures("recorder")


class LabelSteps(Steps):
    """Of a model of transformers."""

    def __init__(self, name: str, **options: Any) -> None:
        model = FAMILIES[name].build().train()
        plain = copy.deepcopy(model)
        super().__init__(model, plain, lr=2**-3, loss=accelerate(model).loss, **options)

    def plain_loss(self, given: Any) -> Tensor:
        return self.plain(**given).loss

    def tokens(self, given: Any) -> Tensor:
        return (given["labels"] != -100).sum()

    def batch(self, seed: int, rows: int) -> dict[str, Tensor]:
        inputs, _ = FAMILIES["marian"].inputs(self.model)
        ids, mask = (inputs[name].roll(seed, 0)[:rows] for name in ("input_ids", "attention_mask"))
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids == 1, -100)}


def sentences(seed: int, rows: int = 3) -> Batch:
    """Of one bucket for each number of rows."""
    return batch(seed, rows, 5 + seed % 4, 8 - seed % 3)


def nothing() -> Batch:
    """A batch of padding alone."""
    empty = torch.full((3, 5), PAD_TRG, device=DEVICE)
    return torch.full_like(empty, PAD_SRC), empty, empty


CASES: dict[str, partial[Steps]] = {
    "clipped": partial(Steps, max_grad_norm=0.05, of_step=dict(label_smoothing=0.1, smooth_over="others")),
    "accumulated": partial(Steps, max_grad_norm=0.05, accumulate=3),
    "bfloat16": partial(Steps),
    "packed": partial(Steps, max_grad_norm=0.05, accumulate=2),
    "marian": partial(LabelSteps, "marian", max_grad_norm=0.05),
    "t5": partial(LabelSteps, "t5", max_grad_norm=0.05, accumulate=2),
}


@pytest.mark.parametrize("case", tiers(CASES, "clipped", "accumulated", "bfloat16"))
def test_updates_are_those_of_a_plain_loop(case: str, recorder: Recorder) -> None:  # noqa: F811
    """Shapes change. A rate is set as a number or as a tensor, or by a scheduler, and the groups keep what was set.
    torch.autocast is open over several steps, and no step uses casts of older weights."""
    twins = CASES[case](small(pack_padding=True)) if case == "packed" else CASES[case]()
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 2.0 ** -(i % 3)) for o in twins.optimizers]
    make, count = getattr(twins, "batch", sentences), twins.step.accumulate
    with torch.autocast(DEVICE, torch.bfloat16, enabled=case == "bfloat16"):
        for number in range(UNTIL_REPLAY + 4):
            groups = [o.param_groups for o in twins.optimizers]
            if number % 4 == 3:
                groups[0][0]["lr"], groups[1][0]["lr"] = torch.tensor(0.3), 0.3
            elif number % 4 == 2:
                groups[0][1]["lr"] = groups[1][1]["lr"] = 0.6
            kept = [group["lr"] for group in groups[0]]
            given = [make(number + i, 3 - number % 2) for i in range(count)]
            if case == "accumulated" and number % 3 == 0:
                given[1] = nothing()
            twins.update(given, tolerance=3e-3 if case == "bfloat16" else 1e-4)
            assert all(a is group["lr"] for a, group in zip(kept, groups[0], strict=True))
            for scheduler in schedulers:
                scheduler.step()
    shapes = 1 if case == "packed" else 2
    assert twins.stats.captures == shapes and recorder.captures == 2 * shapes + 1  # the update has one graph for all
    if case == "accumulated":
        for _ in range(count):
            twins.step(*nothing())
        assert all(p.isfinite().all() for p in twins.model.parameters())


def test_a_later_batch() -> None:
    """A smaller one leaves nothing of a larger one, and the loss of that stays. Its tokens may have another integer
    dtype, be on the CPU, and its gold flat."""
    twins, losses = Steps(), []
    for number in range(UNTIL_REPLAY + 1):
        src, trg, gold = batch(number, 3, 8 - number, 8 - number)
        loss = twins.step(src.int().cpu(), trg.int().cpu(), gold.int().cpu().flatten())
        losses.append((loss, twins.plain.loss(src, trg, gold)))
        losses[-1][1].backward()
        twins.optimizers[1].step()
        twins.plain.zero_grad()
    assert twins.stats.replays > 1
    for loss, expected in losses:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)


def test_what_cannot_be_captured() -> None:
    model = small()
    with pytest.raises(ValueError, match="Adam keeps its step count in Python.*capturable=True"):
        GraphedStep(model, adam(model, capturable=False))
    with torch.autocast(DEVICE, torch.float16), pytest.raises(ValueError, match="float16 needs a GradScaler"):
        GraphedStep(model, adam(model))(*sentences(0))
    (hooked := adam(model)).register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="optimizer has a hook"):
        GraphedStep(model, hooked)
