# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sweeps: runs that differ in some settings, and their scaling law."""
