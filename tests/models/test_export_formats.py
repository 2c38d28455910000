"""An exported model equals the eager one for other batches and lengths: ONNX in onnxruntime, AOTInductor's package."""

import shutil

import pytest
import torch

from fastattn import FusedTransformer

pytestmark = pytest.mark.full

SIZES = dict(d_model=64, d_inner=128, n_layers=2, n_head=4, d_k=16, d_v=16)
PAD, VOCAB = 0, 100
# Batch, source and target: those of the export, one sentence and its first token, others, and the longest possible.
CALLS = ((3, 9, 7), (1, 5, 1), (5, 24, 19), (4, 200, 200))


def tokens(batch, source, target):
    """A padded batch: no sentence is as long as another."""
    generator = torch.Generator().manual_seed(batch)
    made = []
    for length in (source, target):
        seq = torch.randint(1, VOCAB, (batch, length), generator=generator)
        ends = length - torch.arange(batch)
        made.append(seq.masked_fill(torch.arange(length) >= ends[:, None], PAD))
    return tuple(made)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return FusedTransformer(VOCAB, VOCAB, PAD, PAD, **SIZES).eval()


@pytest.fixture(scope="module")
def free_shapes():
    """The batch and both lengths are free, up to the model's positions."""
    batch, source, target = (torch.export.Dim(name, min=1, max=200) for name in ("batch", "source", "target"))
    return {0: batch, 1: source}, {0: batch, 1: target}


def check(model, exported):
    """exported: a function of source and target that gives logits."""
    for sizes in CALLS:
        src, trg = tokens(*sizes)
        with torch.no_grad():
            torch.testing.assert_close(exported(src, trg), model(src, trg))


def test_onnx(model, free_shapes, tmp_path):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    onnxruntime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(model, tokens(*CALLS[0]), dynamo=True, dynamic_shapes=free_shapes)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    src_name, trg_name = (given.name for given in session.get_inputs())

    def run(src, trg):
        (logits,) = session.run(None, {src_name: src.numpy(), trg_name: trg.numpy()})
        return torch.from_numpy(logits)

    check(model, run)


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_aot_inductor(model, free_shapes, tmp_path):
    exported = torch.export.export(model, tokens(*CALLS[0]), dynamic_shapes=free_shapes)
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    check(model, torch._inductor.aoti_load_package(path))
