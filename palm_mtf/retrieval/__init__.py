# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Indexes of texts, whose similar places change what a model predicts."""
