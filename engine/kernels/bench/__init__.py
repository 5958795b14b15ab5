"""The kernel benchmark: checks, tuning and timing of the GPU kernels on one card; `tools/bench_kernels.py` runs it."""
