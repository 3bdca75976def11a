# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Lists the files of a run's documents, with hashes and licences."""

import fnmatch
import os
from collections.abc import Mapping

from palm_mtf.config import DataConfig
from palm_mtf.data.sources.files import FileDigests, find_files, writable_folder
from palm_mtf.data.sources.text_files import open_sources
from palm_mtf.model_dir.paths import ModelDir


def list_files(
  model_dir: str, data: DataConfig, sequence_length: int | None = None
) -> dict[str, dict[str, object]]:
  """Returns {path: source, size in bytes, BLAKE2b hash and licence}.

  The licence is None if LICENSES has none for the path or the source. Remote
  files, which only SeqIO reads, are left out.

  Raises UserError if a file cannot be read.
  """
  found: dict[str, dict[str, object]] = {}
  folder = writable_folder(data.cache_folder, ModelDir(model_dir).tokens)
  with FileDigests(os.path.join(folder, "digests.json")) as digests:
    sources = {x.name: x for x in open_sources(data, sequence_length)}
    for name in [*sources, "DECONTAMINATE_FILES"]:
      globs = data.filters.decontaminate_files
      if name in sources:
        sources[name].fingerprint(digests)  # which hashes all its files
      elif globs:
        digests.read(find_files(globs, name))
      for path, (num_bytes, digest) in digests.take().items():
        found[path] = {
          **{"source": name, "bytes": num_bytes, "blake2b": digest},
          "license": _find_license(data.licenses or {}, name, path),
        }
  return found


def _find_license(
  licenses: Mapping[str, str], name: str, path: str
) -> str | None:
  for pattern, given in licenses.items():
    full = os.path.abspath(os.path.expanduser(pattern))
    if pattern == name or fnmatch.fnmatch(path, full):
      return given
  return None
