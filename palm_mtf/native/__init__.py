# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""C++ operations for decoding, and for training between matrix products.

The operations are compiled for this CPU when they are first used.
"""
