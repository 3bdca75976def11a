# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests run on virtual CPU devices, however many GPUs a machine has."""

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
