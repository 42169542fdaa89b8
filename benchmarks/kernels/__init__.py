"""Kernel benchmarks (pytest-benchmark)."""
