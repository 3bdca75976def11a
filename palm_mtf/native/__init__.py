# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""C++ operations: decoding steps, and norms and the like in training.

The operations are compiled for this CPU when they are first used.
"""
