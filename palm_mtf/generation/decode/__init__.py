# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Graphs for decoding: weights, prefill, steps with a cache, sampling."""
