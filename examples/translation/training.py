"""Training: the model, the schedule, the loss, one step, and a loop that can be stopped and resumed at any step."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from command_line import CommandError, progress_bar
from torch import Tensor, nn

from fastattn import FusedTransformer
from translation.data import Batch, Batches, Examples, Step, plan_batches
from translation.parallel import ONE_PROCESS, Processes
from translation.settings import Settings
from translation.tokens import PAD

READ_STEPS = 20  # steps between two reads of the losses; a read waits for the device


def build_model(settings: Settings, vocabulary: int) -> FusedTransformer:
    """The model of `settings`, its weights drawn from `settings.seed`; one embedding matrix for both languages and the
    output, scaled as in the paper."""
    torch.manual_seed(settings.seed)
    d_model, head_dim = settings.d_model, settings.d_model // settings.heads
    widths = {"d_word_vec": d_model, "d_model": d_model, "d_inner": settings.d_inner, "d_k": head_dim, "d_v": head_dim}
    counts = {"n_layers": settings.layers, "n_head": settings.heads, "n_position": settings.max_length}
    dropout = {"dropout": settings.dropout, "attn_dropout": settings.dropout}
    options = widths | counts | dropout | {"scale_emb_or_prj": "emb", "graphs": settings.graph}
    model = FusedTransformer(vocabulary, vocabulary, PAD, PAD, **options)
    # Multiplied by sqrt(d_model), all embeddings start as large as the positions, also those of rare words.
    torch.nn.init.normal_(model.trg_word_prj.weight, std=settings.d_model**-0.5)
    return model.to(settings.device)


def learning_rate(step: int, d_model: int, warmup: int, scale: float = 1.0) -> float:
    """scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), steps counted from 1: it rises linearly for `warmup`
    steps, then falls. Source: Vaswani et al. 2017, arXiv:1706.03762, equation 3."""
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def loss_of(model: nn.Module, batch: Batch, settings: Settings, label_smoothing: float) -> Tensor:
    """The sum of the cross-entropy over the target tokens. model: a FusedTransformer, or its wrapper."""
    with torch.autocast(torch.device(settings.device).type, torch.bfloat16, enabled=settings.amp):
        return model(*batch, label_smoothing, reduction="sum")


def check_loss(loss: float, where: str) -> None:
    """CommandError where it is NaN or infinite: then the weights are lost."""
    if not math.isfinite(loss):
        raise CommandError(f"{where}: the loss is {loss}; begin again with a smaller --lr-scale or more --warmup")


@torch.no_grad()
def validation_loss(
    model: FusedTransformer, examples: Examples, settings: Settings, processes: Processes = ONE_PROCESS
) -> float:
    """Cross-entropy per target token over all `examples`, without dropout and label smoothing; see `check_loss`."""
    model.eval()
    loss_sum, tokens = 0.0, 0
    plan = processes.share(list(plan_batches(examples, settings.batch_tokens)))
    for step in Batches(examples, plan).load(torch.device(settings.device)):
        loss_sum += loss_of(model, step.parts[0], settings, 0.0).item()
        tokens += step.target_tokens
    loss_sum, tokens = processes.add(torch.tensor([loss_sum, tokens], dtype=torch.float64)).tolist()
    check_loss(loss_sum / tokens, "validation")
    return loss_sum / tokens


@dataclass
class Progress:
    """How far a run has come. Resuming needs it, the weights, the optimizer and the random generators."""

    step: int = 0  # updates made
    epoch: int = 0  # epochs finished
    position: int = 0  # batches of the current epoch done
    losses: list[float] = field(default_factory=list)  # of every step, per target token
    target_tokens: list[int] = field(default_factory=list)  # of every step
    tokens: int = 0  # source and target tokens of the current epoch so far
    seconds: float = 0.0  # of the current epoch so far, saving and validation not counted
    epochs: list[dict[str, float]] = field(default_factory=list)  # one entry a finished epoch

    def finish_epoch(self) -> dict[str, float]:
        """Starts the next epoch; returns the entry of `epochs` for the one that ended."""
        weights, losses = (values[-self.position :] for values in (self.target_tokens, self.losses))
        entry = {
            "epoch": self.epoch + 1,
            "step": self.step,
            "train_loss": float(np.average(losses, weights=weights)),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
        }
        self.epochs.append(entry)
        self.epoch, self.position, self.tokens, self.seconds = self.epoch + 1, 0, 0, 0.0
        return entry

    def best(self, settings: Settings) -> dict[str, float] | None:
        """The entry of the best epoch, the first of equals; None before the end of the first epoch."""
        return min(self.epochs, key=settings.cost, default=None)

    def out_of_patience(self, settings: Settings) -> bool:
        """Whether the last --patience epochs were not better than one before."""
        best = self.best(settings)
        return bool(settings.patience and best and self.epoch - best["epoch"] >= settings.patience)

    def at_the_end(self, settings: Settings) -> bool:
        """By --epochs, --steps or --patience, whichever is first."""
        steps = settings.steps or math.inf
        return self.epoch >= settings.epochs or self.step >= steps or self.out_of_patience(settings)


@dataclass
class Training:
    """A model that is trained, and all that a step needs."""

    model: FusedTransformer
    settings: Settings
    processes: Processes = ONE_PROCESS
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        self.call = self.processes.wrap(self.model, self.settings.parallel)  # the model, or its wrapper
        # Adam with the paper's constants (section 5.3).
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
        self._unread: list[Tensor] = []  # losses still on the device
        self._clock = time.perf_counter()

    def step(self, batch: Step, rate: float) -> Tensor:
        """Updates the weights once. Returns this process's part of the loss before the update, per target token, on
        the device, so that nothing waits for a GPU."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, part in enumerate(batch.parts, start=1):
            with self.processes.backward(self.call, last=number == len(batch.parts)):
                loss = loss_of(self.call, part, self.settings, self.settings.label_smoothing) / batch.target_tokens
                (loss * self.processes.size).backward()  # the gradients are averaged over the processes
            losses.append(loss.detach())
        self.optimizer.step()
        return torch.stack(losses).sum()

    def read_losses(self) -> None:
        """Reads the losses and the clock, and adds up the parts of all processes. CommandError where a loss is not
        finite, so that such a run is not saved."""
        losses = self.processes.add(torch.stack(self._unread)).tolist() if self._unread else []
        self._unread.clear()
        for number, loss in enumerate(losses, start=len(self.progress.losses) + 1):
            check_loss(loss, f"step {number}")
        self.progress.losses += losses
        now = time.perf_counter()
        self.progress.seconds += now - self._clock
        self._clock = now

    def plan_epoch(self, examples: Examples) -> list[np.ndarray]:
        """The batches of the current epoch, as `plan_batches` gives them; they depend on the seed."""
        order = np.random.default_rng([self.settings.seed, self.progress.epoch])
        return plan_batches(examples, self.settings.batch_tokens, order, self.settings.length_step)

    def train(
        self,
        examples: Examples,
        end_epoch: Callable[[dict[str, float]], None],
        save: Callable[[], None],
        should_stop: Callable[[], bool] = lambda: False,
        log: Callable[[dict[str, float]], None] = lambda values: None,
    ) -> None:
        """Trains from `progress` to the end. Every process plans and runs the same steps.

        `end_epoch` is called after every epoch with its new entry of `progress.epochs`, which it may add to. `save` is
        called after that, every `settings.save_every` steps, and when training stops. `should_stop` is called after
        every step. `log` is called with the last loss and its learning rate where the losses are read.
        """
        settings, progress, processes = self.settings, self.progress, self.processes
        while not progress.at_the_end(settings):
            plan = self.plan_epoch(examples)
            batches = Batches(examples, plan, processes.rank, processes.size, settings.accumulate)
            title, options = f"epoch {progress.epoch + 1}/{settings.epochs}", {"disable": not processes.is_first}
            bar = progress_bar(total=len(plan), initial=progress.position, desc=title, unit="step", **options)
            self.model.train()
            self._clock = time.perf_counter()
            for batch in batches.load(torch.device(settings.device), progress.position, settings.workers):
                rate = learning_rate(progress.step + 1, settings.d_model, settings.warmup, settings.lr_scale)
                self._unread.append(self.step(batch, rate))
                progress.step += 1
                progress.position += 1
                progress.target_tokens.append(batch.target_tokens)
                progress.tokens += batch.tokens
                bar.update()
                if progress.step % READ_STEPS == 0:
                    self.read_losses()
                    log({"loss": progress.losses[-1], "learning_rate": rate})
                    bar.set_postfix(loss=f"{progress.losses[-1]:.3f}", rate=f"{rate:.1e}")
                if progress.step == settings.steps or should_stop():
                    break
                if progress.step % settings.save_every == 0:
                    save()
                    self._clock = time.perf_counter()
            bar.close()
            if progress.position >= len(plan):
                self.read_losses()
                end_epoch(progress.finish_epoch())
            save()
            if should_stop():
                return
