# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Documents of text files and SeqIO tasks: found, read, hashed, held out."""
