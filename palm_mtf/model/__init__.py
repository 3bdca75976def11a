# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM in Mesh TensorFlow: dimensions, layers, the whole model, its loss."""
