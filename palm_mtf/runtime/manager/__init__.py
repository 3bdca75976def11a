# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The manager: tracks many servers, and allocates their devices."""
