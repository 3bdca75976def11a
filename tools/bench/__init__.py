# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench: `python -m tools.bench CASE` measures one case of `cases/`.

A case is a file with these names; its docstring is its help:

  FLAGS              its flags, see `command.Flag`
  measure(chosen)    checks the flags, then yields records (dicts for --json)
  HEAD, row(record)  the table; without `row`, records are printed as JSON
  BOUNDS             the possible figures of a record, see `find_impossible`
  work(**arguments)  optional: runs in a separate process, which
                     `command.worker_command` starts
  RECIPE             the default --gin_file, in cases with gin flags; `measure`
                     gets `chosen.gin`, which has "files" and "macros"
"""
