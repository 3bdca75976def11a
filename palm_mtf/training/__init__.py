# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The training loop, its checks, its supervisor and its watchdog."""
