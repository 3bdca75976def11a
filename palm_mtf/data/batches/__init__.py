# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Packs documents into rows of tokens; mixes, shuffles and batches the rows."""
