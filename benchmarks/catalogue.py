"""All benchmarks, and the plan of a report: every case of a table with its benchmark, the most valuable first."""

from __future__ import annotations

import bench_add_layer_norm
import bench_attention
import bench_decode_attention
import bench_decoding
import bench_embed_layer_norm
import bench_feed_forward
import bench_linear_cross_entropy
import bench_transformer
from cases import Case
from harness import Benchmark
from tables import TABLES

BENCHMARKS: tuple[Benchmark, ...] = (
    bench_transformer.BENCHMARK,
    bench_transformer.MEMORY,
    bench_attention.BENCHMARK,
    bench_add_layer_norm.BENCHMARK,
    bench_feed_forward.BENCHMARK,
    bench_linear_cross_entropy.BENCHMARK,
    bench_embed_layer_norm.BENCHMARK,
    bench_decode_attention.BENCHMARK,
    bench_decoding.BENCHMARK,
)


def plan(table: str) -> list[tuple[Benchmark, Case]]:
    """Every case of this table with the benchmark that measures it."""
    owner = {type(case): benchmark for benchmark in BENCHMARKS for case in benchmark.cases[table]}
    return [(owner[type(case)], case) for case in TABLES[table]]
