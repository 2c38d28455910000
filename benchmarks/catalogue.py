"""All benchmarks, and the plan of a report: every case of a table with its benchmark, the most valuable first."""

from __future__ import annotations

import bench_add_layer_norm
import bench_attention
import bench_decoding
import bench_embed_layer_norm
import bench_feed_forward
import bench_linear_cross_entropy
import bench_memory
import bench_transformer
from cases import Case
from harness import Benchmark
from tables import TABLES

_MODULES = (
    bench_transformer,
    bench_attention,
    bench_add_layer_norm,
    bench_feed_forward,
    bench_linear_cross_entropy,
    bench_embed_layer_norm,
    bench_decoding,
    bench_memory,
)
BENCHMARKS: dict[str, Benchmark] = {module.BENCHMARK.name: module.BENCHMARK for module in _MODULES}


def plan(table: str) -> list[tuple[Benchmark, Case]]:
    """Every case of this table with the benchmark that measures it."""
    owner = {type(case): benchmark for benchmark in BENCHMARKS.values() for case in benchmark.cases[table]}
    return [(owner[type(case)], case) for case in TABLES[table]]
