"""recompute=True: the same step, and less is saved between forward and backward."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import skip_without_triton
from model_checks import DEVICE, PAD_SRC, PAD_TRG, VOCAB, fused
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastattn import use_backend
from fastattn.models.padding import KEEP_PADDING
from fastattn.nn.recompute import is_recomputing, recomputed

VARIANTS = {"public": {}, "beyond": dict(norm_first=True, activation="swiglu", n_head_kv=1)}


def build_model(recompute, **changes):
    torch.manual_seed(5)
    options = dict(d_inner=128, n_head=2, d_k=16, d_v=16, n_position=40, dropout=0.2, attn_dropout=0.3)
    return fused(recompute=recompute, **options | changes)


def random_batch(rows, length):
    """src_seq, trg_seq and gold (rows, length), two of them padded at the end."""
    tokens = torch.randint(3, VOCAB, (rows, 2 * length + 1), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    src_seq, trg_seq, gold = tokens[:, :length].clone(), tokens[:, length:-1].clone(), tokens[:, length + 1 :].clone()
    src_seq[1, length - 2 :], trg_seq[2, length - 3 :], gold[2, length - 3 :] = PAD_SRC, PAD_TRG, PAD_TRG
    return src_seq, trg_seq, gold


def train_step(model, batch, backend, autocast=False):
    """The loss, and each parameter's gradient."""
    torch.manual_seed(9)
    with use_backend(backend), torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = model.loss(*batch, 0.1)
    loss.backward()  # outside of use_backend, as a user may have it
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", ["reference", "aten", pytest.param("triton", marks=pytest.mark.full)])
def test_equal_bit_for_bit(backend, variant, packing):
    options = VARIANTS[variant]
    if backend == "triton":
        skip_without_triton()
        options = dict(n_layers=1, n_head=1, d_k=32, d_v=32) | options
    (loss, grads), (same_loss, same_grads) = (
        train_step(build_model(recompute, pack_padding=packing, **options), random_batch(3, 7), backend)
        for recompute in (False, True)
    )
    assert torch.equal(loss, same_loss)
    for name, grad in grads.items():
        assert torch.equal(grad, same_grads[name]), name


def test_autocast_is_as_exact():
    """Norms are computed again from rounded sums: other roundings, no larger error."""
    batch = random_batch(3, 7)
    loss, grads = train_step(build_model(False), batch, "aten", autocast=True)
    same_loss, again = train_step(build_model(True), batch, "aten", autocast=True)
    _, truth = train_step(build_model(False), batch, "aten")
    assert torch.equal(loss, same_loss)
    for name, grad in truth.items():
        assert (again[name] - grad).norm() <= 2 * (grads[name] - grad).norm(), name


class Allocations(TorchDispatchMode):
    """Notes the storages allocated within it. kept() is how many of their bytes are still held."""

    def __enter__(self):
        self.storages = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                reference = StorageWeakRef(t.untyped_storage())
                self.storages[reference.cdata] = reference, t.untyped_storage().nbytes()
        return out

    def kept(self, parameters):
        own = {p.untyped_storage()._cdata for p in parameters}
        return sum(size for cdata, (ref, size) in self.storages.items() if cdata not in own and not ref.expired())


def saved_bytes(recompute, autocast, **options):
    """On a CPU, whose fused attention keeps no mask for each layer."""
    src_seq, trg_seq, _ = (t.cpu() for t in random_batch(12, 32))
    model = build_model(recompute, dropout=0.0, attn_dropout=0.0, **options).cpu()
    precision = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with use_backend("aten"), precision, Allocations() as allocations:
        dec_output, _ = model.decoder_output(src_seq, trg_seq, KEEP_PADDING)
        saved = allocations.kept(model.parameters())
    dec_output.sum().backward()
    return saved


@pytest.mark.parametrize(
    ("variant", "autocast", "share"),
    [("public", False, 0.65), ("public", True, 0.75), ("beyond", False, 0.35), ("beyond", True, 0.45)],
)
def test_less_is_saved(variant, autocast, share):
    """With d_inner = 4 d_model, hidden layers and norms are 13 of the 30 d_model numbers that an encoder and a decoder
    layer save for each token, and more with gated activations. Under autocast they have half the bytes of the sums."""
    options = {"autocast": autocast} | VARIANTS[variant]
    assert saved_bytes(True, **options) < share * saved_bytes(False, **options)


def test_the_context_holds_for_its_thread_until_its_end():
    with recomputed(), ThreadPoolExecutor(1) as pool:
        assert is_recomputing() and not pool.submit(is_recomputing).result()
    with pytest.raises(KeyError), recomputed():
        raise KeyError
    with recomputed(False):
        assert not is_recomputing()
    with torch.no_grad(), recomputed():
        assert not is_recomputing()
