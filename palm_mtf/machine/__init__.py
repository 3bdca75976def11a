# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What this machine's processors compute natively, known without TensorFlow."""
