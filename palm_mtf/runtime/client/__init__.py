# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The client process: finds, starts and watches servers; runs graphs there."""
