"""Benchmarks of the packed kernels and of the paged KV cache, on the machine at hand."""
