"""The table of docs/parallel.md: `python examples/translation/sizing.py` prints it, from the formulas there."""

import torch
from torch import nn

from fastattn import FusedTransformer

MODELS = {
    "base": dict(d_model=512, d_inner=2048, n_layers=6, n_head=8),
    "big": dict(d_model=1024, d_inner=4096, n_layers=6, n_head=16),
    "1 B": dict(d_model=1536, d_inner=6144, n_layers=15, n_head=24),
}
VOCABULARY, GPUS = 37000, (1, 2, 4, 8)
STATE_BYTES, WEIGHT_BYTES = 16, 4  # of a parameter: weight, gradient and Adam's two moments in float32


def build(sizes: dict[str, int]) -> FusedTransformer:
    """The model without its memory: one embedding for all, as in the paper."""
    head = sizes["d_model"] // sizes["n_head"]
    options = sizes | {"d_word_vec": sizes["d_model"], "d_k": head, "d_v": head}
    return FusedTransformer(VOCABULARY, VOCABULARY, 0, 0, **options, device=torch.device("meta"))


def numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def layers_and_rest(model: FusedTransformer) -> tuple[list[int], int]:
    """The parameters of each layer, and those outside of the layers."""
    layers = [numbers(layer) for layer in (*model.encoder.layer_stack, *model.decoder.layer_stack)]
    return layers, numbers(model) - sum(layers)


def memory(model: FusedTransformer, gpus: int, kind: str) -> float:
    """Bytes of weights, gradients and optimizer state in each process, at most."""
    if kind == "ddp" or gpus == 1:
        return STATE_BYTES * numbers(model)
    layers, outside = layers_and_rest(model)
    return STATE_BYTES * numbers(model) / gpus + 2 * WEIGHT_BYTES * (2 * max(layers) + outside)


def communication(model: FusedTransformer, gpus: int, kind: str) -> float:
    """Bytes that each process sends in a step: rings of an all-reduce, or of all-gathers and a reduce-scatter."""
    layers, outside = layers_and_rest(model)
    times = 2 * numbers(model) if kind == "ddp" else 3 * sum(layers) + 2 * outside
    return times * (gpus - 1) / gpus * WEIGHT_BYTES


def table() -> str:
    lines = ["| model | GPUs | DDP: memory | sent | FSDP2: memory | sent |", "|---|---:|---:|---:|---:|---:|"]
    for name, sizes in MODELS.items():
        model = build(sizes)
        for gpus in GPUS:
            title = f"{name}, {numbers(model) / 1e6:,.0f} M parameters" if gpus == GPUS[0] else ""
            cells = [f(model, gpus, kind) / 1e9 for kind in ("ddp", "fsdp2") for f in (memory, communication)]
            lines.append(f"| {title} | {gpus} | " + " | ".join(f"{gigabytes:.2f} GB" for gigabytes in cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
