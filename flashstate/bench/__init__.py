"""Measuring: cold slots, CUDA graphs, roofs and peers. docs/measuring.md says how and why."""
