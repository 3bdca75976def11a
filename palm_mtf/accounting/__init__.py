# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model costs, by arithmetic on exact integers, without TensorFlow."""
