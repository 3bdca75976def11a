# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains SentencePiece vocabularies, and opens those of other programs."""
