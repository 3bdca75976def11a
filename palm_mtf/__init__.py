# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM-style language models on Mesh TensorFlow, driven by gin files."""

__version__ = "0.1.0"
