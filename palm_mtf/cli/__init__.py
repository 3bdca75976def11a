# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: the only part of palm_mtf that knows gin."""
