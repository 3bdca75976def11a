# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs lm-evaluation-harness with the model type `palm_mtf`."""

import sys

from palm_mtf.console import configure_logging
from palm_mtf.errors import UserError
from palm_mtf.machine.process import own_process


def _import_harness() -> None:
  try:
    import lm_eval  # noqa: F401 (checks only whether it is installed)
  except ModuleNotFoundError as error:
    if error.name != "lm_eval":
      raise
    raise UserError(
      "lm_eval is not installed; pip install 'palm_mtf[lm_eval]'"
    ) from None


def main() -> int:
  """Runs lm-evaluation-harness's command line; returns the exit code."""
  configure_logging()
  own_process()
  try:
    _import_harness()
    from lm_eval.__main__ import cli_evaluate

    import palm_mtf.lm_eval.model  # noqa: F401 (registers the model type)

    cli_evaluate()
  except UserError as error:
    print(f"palm_mtf: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main())
