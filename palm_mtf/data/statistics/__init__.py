# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of a corpus: sizes, near duplicates, contamination."""
