# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How a mesh becomes devices, and Mesh TensorFlow becomes TensorFlow."""
