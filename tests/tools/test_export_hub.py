"""fastattn as a kernel of Hugging Face's hub, loaded from a folder by the package `kernels`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import export_hub
import pytest
import torch
from families import DEVICE, FAMILIES, check, solve, tiers

import fastattn

kernels = pytest.importorskip("kernels", reason="kernels is not installed: .[test]")
transformers = pytest.importorskip("transformers")

from transformers.integrations import hub_kernels  # noqa: E402

NAME = "someone/fastattn"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    export_hub.export(out)
    return out


@pytest.fixture
def kernel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The copy, as a user loads it. The folder is used in place of the hub."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={folder}")
    return kernels.get_kernel(NAME, version=export_hub.VERSION)


def by_hub(model: Any, kernel: Any) -> Any:
    """The model with the kernel's attention."""
    name = NAME
    if not hub_kernels.is_kernels_available():  # for another version of kernels; it would register these two
        name = "hub"
        transformers.AttentionInterface.register(name, kernel.flash_attn_forward)
        transformers.AttentionMaskInterface.register(name, transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation(name, allow_all_kernels=True)
    return model


EVERYDAY = "bart aten", "llama aten", "t5 aten"


@pytest.mark.parametrize("case", tiers((*EVERYDAY, "llama triton"), *EVERYDAY))
def test_a_model_equals_sdpa(case: str, kernel: Any) -> None:
    """Logits, gradients and generated tokens of padded batches."""
    name, backend = case.split()
    theirs, *_ = models = [FAMILIES[name].build(), by_hub(FAMILIES[name].build(), kernel)]
    theirs.set_attn_implementation("sdpa")
    inputs, real = FAMILIES[name].inputs(theirs, left=not theirs.config.is_encoder_decoder)
    sources = {n: t for n, t in inputs.items() if not n.startswith("decoder")}
    with kernel.use_backend(backend):
        expected, found = (solve(model, inputs, real, is_whole=False) for model in models)
        check(found, expected, FAMILIES[name].tolerance)
        assert torch.equal(*(model.generate(**sources, max_new_tokens=5, do_sample=False) for model in models))
    with kernel.use_backend("cuda"), pytest.raises(RuntimeError, match="this copy of fastattn has no CUDA"):
        models[1](**inputs)


def test_a_layer_is_replaced(folder: Path) -> None:
    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class Norm(transformers.models.llama.modeling_llama.LlamaRMSNorm):
        pass

    ours, theirs, x = Norm(48).to(DEVICE), Norm(48).to(DEVICE), torch.randn(3, 7, 48, device=DEVICE, requires_grad=True)
    repository = kernels.LocalLayerRepository(repo_path=folder, layer_name="RMSNorm")
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping({"RMSNorm": {DEVICE: repository}}, inherit_mapping=False):
        kernels.kernelize(ours, mode=mode, device=DEVICE, use_fallback=kernels.KernelizeFallback.NONE)
    assert ours.forward.__func__.__module__ != theirs.forward.__func__.__module__
    results = []
    for norm in (theirs, ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        out = norm(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, norm.weight])])
        torch.testing.assert_close(results[-1], results[0])


def test_two_fastattns_in_a_process(kernel: Any) -> None:
    q, k, v = (torch.randn(2, 4, 33, 16, device=DEVICE) for _ in range(3))
    found = (library.scaled_dot_product_attention(q, k, v, is_causal=True) for library in (fastattn, kernel))
    assert torch.equal(*found)
    entries = [e for of_op in sys.modules[f"{kernel.__name__}.backends"].REGISTRY.values() for e in of_op.values()]
    assert {entry.path.split(".")[0] for entry in entries} == {kernel.__name__}


def test_the_files_need_torch_and_triton_alone(folder: Path) -> None:
    """transformers calls the first of the two exceptions, and Triton's interpreter needs numpy itself."""
    found = set()
    for variant in ("torch-cpu", "torch-cuda"):
        for path in (folder / "build" / variant).rglob("*.py"):
            assert "fastattn::" not in (text := path.read_text())
            for node in ast.walk(ast.parse(text)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
                found |= {(path.parent.name, name.split(".")[0]) for name in names}
    others = {(place, name) for place, name in found if name not in sys.stdlib_module_names | {"torch", "triton"}}
    assert others == {("integrations", "transformers"), ("common", "numpy")}
