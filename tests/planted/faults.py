"""The tables of planted faults, by the part of the package that they are in."""

from __future__ import annotations

from planted import (
    check_faults,
    example_faults,
    generate_faults,
    graph_faults,
    integration_faults,
    kernel_faults,
    mask_faults,
    model_faults,
    nn_faults,
    op_faults,
    tool_faults,
)
from planted.fault import Fault

TABLES: dict[str, list[Fault]] = {
    "ops": op_faults.FAULTS,
    "kernels": kernel_faults.FAULTS,
    "masks": mask_faults.FAULTS,
    "nn": nn_faults.FAULTS,
    "models": model_faults.FAULTS,
    "generate": generate_faults.FAULTS,
    "graphs": graph_faults.FAULTS,
    "integrations": integration_faults.FAULTS,
    "check": check_faults.FAULTS,
    "examples": example_faults.FAULTS,
    "tools": tool_faults.FAULTS,
}
