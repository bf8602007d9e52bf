"""Faults of a checkpoint that can be mended without its source: what is found, and what it becomes."""
