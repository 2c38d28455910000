"""torch.distributed.tensor.parallel divides a model's heads and hidden units: losses and gradients stay the same.
Learned positions that fully_shard has divided start as all weights."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastattn import FusedTransformer

BY_COLUMNS, BY_ROWS = ("w_qs", "w_ks", "w_vs", "w_1"), ("fc", "w_2")


def gradients(model: FusedTransformer, *batch: torch.Tensor) -> list[torch.Tensor]:
    """The loss, and the gradient of every parameter."""
    loss = model(*batch, label_smoothing=0.1)
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    return [loss.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in grads)]


def divide(model: FusedTransformer) -> None:
    for layer in (*model.encoder.layer_stack, *model.decoder.layer_stack):
        names = [name for name, _ in layer.named_modules()]
        plan = {name: ColwiseParallel() for name in names if name.endswith(BY_COLUMNS)}
        plan |= {name: RowwiseParallel() for name in names if name.endswith(BY_ROWS)}
        parallelize_module(layer, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def divide_and_compare(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    options = dict(d_word_vec=32, d_model=32, d_inner=64, n_layers=2, n_head=4, d_k=8, d_v=8)
    model = FusedTransformer(50, 50, 0, 0, **options, dropout=0.0, attn_dropout=0.0, n_head_kv=2)
    src, trg, gold = (torch.randint(1, 50, (4, 9)) for _ in range(3))
    src[1:, 4:] = 0
    expected = gradients(model, src, trg, gold)
    model.zero_grad()
    divide(model)
    torch.testing.assert_close(gradients(model, src, trg, gold), expected, rtol=1e-4, atol=1e-6)
    sharded = fully_shard(FusedTransformer(50, 50, 0, 0, **options, position="learned", device="meta"))
    sharded.to_empty(device="cpu").reset_parameters()
    positions = sharded.decoder.position_enc.pos_table.full_tensor()
    assert 0.9 < positions.abs().max() / (6 / (200 + 32)) ** 0.5 <= 1  # Glorot's
    dist.destroy_process_group()


@pytest.mark.full
def test_heads_and_hidden_units_in_two_processes(tmp_path: Path) -> None:
    mp.spawn(divide_and_compare, (str(tmp_path),), nprocs=2)
