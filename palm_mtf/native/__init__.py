# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding steps in C++, compiled for the CPU at hand when first needed."""
