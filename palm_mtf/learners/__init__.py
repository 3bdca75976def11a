# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Learners: pods with their own clocks, whose work a run's client merges."""
