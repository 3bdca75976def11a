# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Token ids on disk: a text is encoded once and stored in shards."""
