# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m palm_mtf` is the command `palm_mtf`."""

import sys

from palm_mtf.cli.main import main

if __name__ == "__main__":
  sys.exit(main())
