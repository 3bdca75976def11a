# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine and this process, found without TensorFlow."""
