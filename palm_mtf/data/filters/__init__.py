# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Removes documents by length, quality, duplicates and contamination."""
