# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One file per command, or per group of commands, of `palm_mtf`."""
