# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One file a command of `palm_mtf`: it checks input, then does the work."""
