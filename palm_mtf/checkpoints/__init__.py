# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads, checks and writes a run's checkpoints and its initial weights."""
