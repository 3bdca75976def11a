# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A SavedModel with only TensorFlow's own operations, from text to text."""
