# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The manager of many servers: who serves, who uses which devices."""
