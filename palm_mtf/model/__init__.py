# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The graph of PaLM in Mesh TensorFlow: layers, the whole model and its loss."""
