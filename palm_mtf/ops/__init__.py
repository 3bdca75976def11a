# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products, each computed with what the device at hand can multiply."""
