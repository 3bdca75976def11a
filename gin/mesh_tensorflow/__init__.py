# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Models that Mesh TensorFlow's own transformer builds."""
