# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Token ids on disk: encoded once, stored in shards, found by a hash."""
