"""Calls of doors that repeat earlier ones reach their kernels directly; a stand-in for Triton shows with what."""

from typing import Any

import pytest
import torch
from launchers import Launcher, launcher
from peer_calls import Door
from test_compat_contracts import DOORS, EVERY_CALL
from torch import Tensor

from flashstate.launch.environment import suspended

__all__ = ["launcher"]  # a fixture
