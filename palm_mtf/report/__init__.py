# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One HTML page of what runs wrote down: `palm_mtf report`.

  runs    reads MODEL_DIRs
  panels  which pictures there are, of which fields
  charts  draws one
  figures has what all pictures share
  page    puts the page together

Only runs.py knows what a MODEL_DIR holds, and it takes what is there: a field
that no line has, or a file that is missing, is a picture less and no error.
"""
