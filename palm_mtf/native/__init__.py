# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations in C++, compiled for the CPU at hand when first needed.

Decoding steps, and of training what lies between products and layers.
"""
