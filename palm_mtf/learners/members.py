# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The file of a run's learners: one line "NAME SHA256", the hash of its token.

A name is OWNER or OWNER/NAME, because an owner may have several learners. A
learner whose line is removed is refused from then on.
"""

import hashlib
import os
import re
import secrets

from palm_mtf.errors import UserError, shorten

_LINE = re.compile(r"([\w.-]{1,100}(?:/[\w.-]{1,100})?) ([0-9a-f]{64})")


def owner_of(member: str) -> str:
  """Returns the owner of a learner."""
  return member.partition("/")[0]


def _hash(token: str) -> str:
  # A token has 256 random bits, so it needs neither a salt nor a slow hash.
  return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class Members:
  """Finds the learner that has a token, in the file as it is now."""

  def __init__(self, path: str):
    """Reads the file; raises UserError if it cannot be used."""
    self._path = path
    self._read: tuple[object, dict[str, str]] = (None, {})
    self._names()

  def find(self, token: str) -> str | None:
    """Returns the name of the learner that has a token; None if none has.

    Raises UserError while the file is missing, wrong or empty, as it may be
    for a moment when it is replaced.
    """
    names = self._names()
    if not names:
      raise UserError(
        f"LEARNER_TOKENS = {self._path!r}: has no learner; add one by "
        "`palm_mtf pods token`."
      )
    return names.get(_hash(token))

  def _names(self) -> dict[str, str]:
    """Returns {hash of a token: name}."""
    what = f"LEARNER_TOKENS = {self._path!r}"
    try:
      about = os.stat(self._path)
      state = about.st_mtime_ns, about.st_size, about.st_ino
      if state != self._read[0]:
        with open(self._path, encoding="utf-8", errors="replace") as file:
          lines = [x.strip() for x in file if x.strip()]
        matches = [_LINE.fullmatch(x) for x in lines]
        if not all(matches):
          raise UserError(
            f"{what}: line {matches.index(None) + 1} is not NAME SHA256, as "
            "`palm_mtf pods token` writes."
          )
        self._read = state, {x[2]: x[1] for x in matches if x}
    except OSError as error:
      raise UserError(
        f"{what}: {error.strerror}; make it by `palm_mtf pods token`."
      ) from None
    return self._read[1]


def add_member(path: str, name: str) -> str:
  """Adds a learner to the file, or makes the file; returns its token."""
  token = secrets.token_urlsafe(32)
  line = f"{name} {_hash(token)}"
  if not _LINE.fullmatch(line):
    raise UserError(
      f"NAME = {shorten(name)}: write OWNER or OWNER/NAME, of letters, digits, "
      '".", "-" and "_".'
    )
  if os.path.exists(path) and name in Members(path)._names().values():
    raise UserError(
      f"NAME = {name!r}: {path} has this name; remove its line, or give "
      "another name."
    )
  try:
    # One write, so that lines of several processes do not mix; 0o600, so that
    # other users cannot read who takes part.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(file, "a", encoding="utf-8") as lines:
      lines.write(f"{line}\n")
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}; name another file.") from None
  return token
