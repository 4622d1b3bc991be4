"""Layers of vLLM on flashstate, driven without its engine, beside the same layers on vLLM's kernels and on models."""

import driving  # first: it prepares vLLM

import pytest
