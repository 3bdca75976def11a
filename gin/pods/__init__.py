# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Two pods: in one process, in servers on this machine, or in a cluster."""
