# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What runs programs: TensorFlow's devices (host), or JAX's devices (xla)."""
