# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model costs: sizes, FLOPs, bytes and seconds, without TensorFlow."""
