"""The table in docs/parallel.md is what its script prints, and counts what there is."""

from pathlib import Path

from translation import sizing

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "parallel.md"


def test_the_table_is_made_by_the_script() -> None:
    assert sizing.table() in DOCUMENT.read_text()


def test_the_formulas() -> None:
    model = sizing.build(dict(d_model=64, d_inner=128, n_layers=2, n_head=4))
    parameters = sum({id(p): p.numel() for p in model.parameters()}.values())
    assert sizing.memory(model, 1, "fsdp2") == sizing.memory(model, 8, "ddp") == 16 * parameters
    assert sizing.communication(model, 1, "ddp") == 0
    layers, rest = sizing.layers_and_rest(model)
    assert len(layers) == 4 and sum(layers) + rest == parameters
    assert sizing.communication(model, 4, "fsdp2") == sizing.communication(model, 4, "ddp") + 3 * sum(layers)
    whole, halves = sizing.memory(model, 2, "fsdp2"), sizing.memory(model, 4, "fsdp2")
    assert whole - halves == 16 * parameters / 4
