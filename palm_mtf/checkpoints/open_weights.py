# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weight files that stay readable by TensorFlow whatever becomes of their path.

A trainer may remove a checkpoint while somebody reads it: an open file stays.
TensorFlow opens files by a prefix, which it takes for a pattern: "[" begins a
set in it. So it gets links to the open files, in a temporary folder.
"""

import contextlib
import os
import tempfile
import weakref

from palm_mtf.model_dir.foreign_files import check_regular

_OPEN_FILES = "/dev/fd"  # names of this process's open files


class OpenWeights:
  """The open files of one prefix, closed with the object.

  Attributes:
    prefix: TensorFlow's prefix of links to them; the files' own prefix where
      there is no temporary folder.
  """

  def __init__(self, prefix: str):
    """Opens the files that begin with `prefix`; raises OSError if one fails.

    A file that is not regular fails too.
    """
    folder, stem = os.path.split(prefix)
    with contextlib.ExitStack() as stack:
      self._paths = {}
      for name in os.listdir(folder or "."):
        if name.startswith(f"{stem}."):
          path = os.path.join(folder, name)
          check_regular(path)
          descriptor = os.open(path, os.O_RDONLY)
          stack.callback(os.close, descriptor)
          self._paths[name] = f"{_OPEN_FILES}/{descriptor}"
      self.prefix = prefix
      with contextlib.suppress(OSError):
        links = stack.enter_context(
          tempfile.TemporaryDirectory(prefix="palm_mtf_weights_")
        )
        for name, path in self._paths.items():
          os.symlink(path, os.path.join(links, name))
        self.prefix = os.path.join(links, stem)
      # Also at the end of the process: the folder does not stay.
      self.close = weakref.finalize(self, stack.pop_all().close)

  def path(self, name: str) -> str:
    """Returns the path of an open file; raises FileNotFoundError."""
    if name not in self._paths:
      raise FileNotFoundError(2, "No such file or directory", name)
    return self._paths[name]
