# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs lm-evaluation-harness with the model type `palm_mtf`."""

import importlib.util
import sys

from palm_mtf.console import configure_logging
from palm_mtf.errors import UserError
from palm_mtf.machine.process import own_process


def main() -> int:
  """Runs lm-evaluation-harness's command line; returns the exit code."""
  configure_logging()
  own_process()
  try:
    if importlib.util.find_spec("lm_eval") is None:
      raise UserError(
        "lm_eval is not installed; pip install 'palm_mtf[lm_eval]'"
      )
    from lm_eval.__main__ import cli_evaluate

    import palm_mtf.lm_eval.model  # noqa: F401 (registers the model type)

    cli_evaluate()
  except UserError as error:
    print(f"palm_mtf: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
