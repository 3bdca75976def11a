# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations in C++ for decoding steps, and for training between products.

They are compiled for this CPU at their first use.
"""
