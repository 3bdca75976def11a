# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""HTTP server: reads requests, batches them, and writes answers."""
