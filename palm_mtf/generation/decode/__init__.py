# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One decoding step with a cache, and what chooses the next token."""
