# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""An HTTP endpoint: requests, their batch, and their answers."""
