# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Documents packed into rows; rows mixed, shuffled and put into batches."""
