# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of a corpus: size, near duplicates, contamination."""
