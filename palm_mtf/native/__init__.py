# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations in C++, compiled for this CPU when they are first needed.

They compute decoding steps, and in training the work between matrix products.
"""
