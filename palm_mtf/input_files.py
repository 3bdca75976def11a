# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The text of the file that --input names."""

import os

from palm_mtf.errors import UserError


def read_input(path: str, what_is_needed: str) -> str:
  """Returns a file's text, line ends as they are.

  Args:
    path: of a UTF-8 file.
    what_is_needed: what an empty file is told, as in "write one prompt a line".

  Raises:
    UserError: the file cannot be read, or is empty.
  """
  what = f"--input = {path!r}"
  try:
    with open(os.path.expanduser(path), encoding="utf-8", newline="") as file:
      content = file.read()
  except UnicodeDecodeError:
    raise UserError(f"{what}: is no UTF-8 text; convert it.") from None
  except OSError as error:
    raise UserError(f"{what}: {error.strerror}; give a text file.") from None
  if not content:
    raise UserError(f"{what}: is empty; {what_is_needed}.")
  return content
