"""Training in several processes, one for each device, as torchrun starts them; without torchrun it is one.

Every process plans the same batches and computes its share of each. Gradients are averaged over the processes by
DistributedDataParallel, which keeps the whole model in every process ("ddp"), or by fully_shard, which keeps a part of
every weight, gradient and optimizer state in each process and collects a layer when it is needed ("fsdp2").
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from command_line import CommandError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastattn import FusedTransformer


@dataclass(frozen=True)
class Processes:
    """The processes of a run, as one of them sees them. All of them must call the methods that communicate."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0

    def wrap(self, model: FusedTransformer, kind: str) -> nn.Module:
        """Returns the module to call instead of the model. With "fsdp2" this is the model, sharded layer by layer."""
        if self.size == 1:
            return model
        if kind == "ddp":
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        for layer in (*model.encoder.layer_stack, *model.decoder.layer_stack):
            fully_shard(layer)
        return fully_shard(model)

    @contextlib.contextmanager
    def backward(self, call: nn.Module, last: bool) -> Iterator[None]:
        """Exchanges gradients only in the last backward of a step, when all parts have been added up."""
        if isinstance(call, FSDPModule):
            call.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last or not isinstance(call, DistributedDataParallel) else call.no_sync():
            yield

    def add(self, t: Tensor) -> Tensor:
        """The sum of t over the processes, in each of them. Communicates."""
        if self.size > 1:
            t = t.clone()
            dist.all_reduce(t)
        return t

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in one of them. Communicates, without waiting for a GPU."""
        return bool(self.add(torch.tensor(int(flag)))) if self.size > 1 else flag

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in each of them. Communicates."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def in_first(self, work: Callable[[], Any]) -> Any:
        """Calls `work` in the first process, and returns its result there, else None. A CommandError of it is raised in
        all processes. Communicates."""
        result = error = None
        if self.is_first:
            try:
                result = work()
            except CommandError as raised:
                error = raised
        if error := self.gather(error)[0]:
            raise error
        return result

    def share(self, items: list[Any]) -> list[Any]:
        """This process's part of a list: every size-th item."""
        return items[self.rank :: self.size]

    def together(self, mine: list[Any]) -> list[Any]:
        """The whole list, from the shares of all processes. Communicates."""
        shares = self.gather(mine)
        return [shares[n % self.size][n // self.size] for n in range(sum(map(len, shares)))]

    def whole_weights(self, model: FusedTransformer) -> dict[str, Tensor]:
        """The whole state_dict of the model, in every process. Communicates where the model is sharded."""
        return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}

    def seed(self, seed: int, step: int = 0) -> None:
        """Makes dropout differ between the processes. The first one starts as a single process would."""
        if self.rank or step:
            torch.manual_seed(random.Random(f"{seed} {self.rank} {step}").getrandbits(63))


ONE_PROCESS = Processes()


@contextlib.contextmanager
def processes_of_torchrun(device: str) -> Iterator[tuple[Processes, str]]:
    """The processes that torchrun started, or only this one; and its device: each process uses its own GPU."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield Processes(), device
        return
    on_gpus = torch.device(device).type == "cuda"
    if on_gpus:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    try:
        processes = Processes(dist.get_rank(), dist.get_world_size())
        with contextlib.nullcontext() if processes.is_first else contextlib.redirect_stdout(None):
            yield processes, device
    finally:
        dist.destroy_process_group()
