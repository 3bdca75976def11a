# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which contributions are audited, who has lied, and what an undo needs.

An *audit* computes a contribution again, and compares hashes. The contributions
of a volunteer since the last audit that it passed are *unaudited*. If it lies,
the run goes back to the outer parameters before the first of these.
"""

import contextlib
import hashlib
import hmac
import json
import math
import os
import secrets
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import new_path, write_atomically
from palm_mtf.runtime.manager.slices import WRONG_JSON

Arrays = Mapping[str, np.ndarray]


def hash_arrays(arrays: Arrays) -> str:
  """Returns a hash of names, shapes and bits of float32 arrays."""
  digest = hashlib.sha256()
  for name in sorted(arrays):
    digest.update(json_text([name, arrays[name].shape]).encode())
    digest.update(np.ascontiguousarray(arrays[name]).data)
  return digest.hexdigest()


def norm_of(arrays: Arrays) -> float:
  """Returns the L2 norm over all arrays."""
  squares = (np.sum(np.square(x, dtype=np.float64)) for x in arrays.values())
  return math.sqrt(sum(squares))


def merge_robustly(
  how: str, parts: Sequence[tuple[Arrays, int]]
) -> dict[str, np.ndarray]:
  """Returns one contribution that combines those of several volunteers.

  Args:
    how: "median", of each element over the volunteers, without weights; it
      stays among honest values while fewer than half of the volunteers lie
      (Yin et al. 2018, arXiv:1803.01498). "clipped", the mean by tokens of
      contributions whose L2 norm, over all names, is limited to the median of
      the norms (Karimireddy et al. 2021, arXiv:2012.10333, from v = 0).
    parts: contributions, float32, with their tokens.
  """
  stacked = {x: np.stack([y[x] for y, _ in parts]) for x in parts[0][0]}
  if how == "median":
    found = {x: np.median(y, axis=0) for x, y in stacked.items()}
  else:
    norms = np.array([norm_of(x) for x, _ in parts])
    # A part that is all 0 stays 0.
    factors = np.minimum(1.0, np.median(norms) / np.where(norms, norms, np.inf))
    weights = factors * [x for _, x in parts] / sum(x for _, x in parts)
    found = {
      x: np.tensordot(weights, y.astype(np.float64), 1)
      for x, y in stacked.items()
    }
  return {x: y.astype(np.float32) for x, y in found.items()}


class Audits:
  """Draws audits; keeps its state and old outer parameters in a folder.

  The ledger (ledger.json) has the bans, unaudited rounds and the last undo.

  Attributes:
    undone: round to which the last undo went back. It becomes None at
      `finish_undo`, when no checkpoint has the undone work any more.
  """

  def __init__(self, folder: str, share: float):
    """Reads the folder or makes it; `share` of the tasks is audited."""
    self._folder, self._share = folder, share
    secret = os.path.join(folder, "secret")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not os.path.exists(secret):
      write_atomically(secret, secrets.token_bytes(32))
      os.chmod(secret, 0o600)
    with self._reading("secret", "decides what is audited"):
      with open(secret, "rb") as file:
        self._secret = file.read()
      if len(self._secret) < 32:  # others could guess the draws
        raise ValueError
    with self._reading("ledger.json", "says who is banned"):
      text = "{}"
      with contextlib.suppress(FileNotFoundError):
        with open(self._path("ledger.json"), encoding="utf-8") as file:
          text = file.read()
      ledger = json.loads(text)
      self._generation = int(ledger.get("generation", 0))
      # {volunteer: round of its first unaudited contribution}
      first = ledger.get("first", {}).items()
      self._first = {str(x): int(y) for x, y in first}
      banned = ledger.get("banned", {}).items()
      self.banned = {str(x): str(y) for x, y in banned}  # {volunteer: why}
      undone = ledger.get("undone")
      self.undone: int | None = None if undone is None else int(undone)

  @contextlib.contextmanager
  def _reading(self, name: str, what: str) -> Iterator[None]:
    try:
      yield
    except (OSError, zipfile.BadZipFile, *WRONG_JSON):
      raise UserError(
        f"{self._path(name)}: {what}, and is damaged or missing; restore it, "
        "or begin the run again in another MODEL_DIR."
      ) from None

  def _path(self, name: str) -> str:
    return os.path.join(self._folder, name)

  def draws(self, round_: int, share: int) -> bool:
    """Returns whether the task of a round is audited; nobody can foresee it."""
    # After an undo, volunteers may know which tasks of the rounds that are done
    # again were audited. So the number of undos decides, too.
    text = f"{self._generation} {round_} {share}".encode()
    drawn = hmac.digest(self._secret, text, "sha256")[:8]
    return int.from_bytes(drawn, "big") < self._share * 2**64

  def pass_(self, member: str) -> None:
    """Notes that a volunteer has passed an audit."""
    self._first.pop(member, None)

  def take(self, member: str, round_: int) -> None:
    """Notes a contribution that is accepted without an audit."""
    self._first.setdefault(member, round_)

  def ban(self, member: str, why: str, round_: int) -> int:
    """Bans a liar of a round; returns the round that the run goes back to.

    Both are in one write of the ledger, because this process may be killed.
    """
    self.banned[member] = why
    first = self._first.pop(member, round_)
    if first < round_:
      self._generation += 1
      self.forget(first)
      self.undone = min(first, first if self.undone is None else self.undone)
    self._save()
    return first

  def keep(self, round_: int, parameters: Arrays, momentum: Arrays) -> None:
    """Saves the state before a round's merge, if an undo may need it."""
    wanted = {*self._first.values(), self.undone}
    if round_ in self._first.values():
      path = self._path(f"{round_}.npz")
      size = 2 * sum(x.nbytes for x in parameters.values())
      with new_path(path, size, rename=os.replace) as temporary:
        with open(temporary, "xb") as file:
          named: dict[str, Any] = {f"p/{x}": y for x, y in parameters.items()}
          named |= {f"m/{x}": y for x, y in momentum.items()}
          np.savez(file, **named)
    self._save()
    for name in os.listdir(self._folder):
      stem, extension = os.path.splitext(name)
      is_round = extension == ".npz" and stem.isdecimal()
      if is_round and int(stem) not in wanted:
        os.remove(self._path(name))

  def read(self, round_: int) -> tuple[dict[str, np.ndarray], ...]:
    """Returns parameters and momentum before a round."""
    name = f"{round_}.npz"
    with self._reading(name, "has the parameters before a lie"):
      with np.load(self._path(name)) as file:
        return tuple(
          {x[2:]: file[x] for x in file.files if x.startswith(kind)}
          for kind in ("p/", "m/")
        )
    raise AssertionError

  def forget(self, round_: int) -> None:
    """Forgets contributions from a round on, which are computed again."""
    self._first = {x: y for x, y in self._first.items() if y < round_}

  def finish_undo(self) -> None:
    """Notes that no checkpoint has what was undone."""
    self.undone = None
    self._save()

  def check(self, member: str) -> None:
    """Raises UserError if a volunteer is banned."""
    if member in self.banned:
      raise UserError(f"{member}: is banned: {self.banned[member]}.")

  def _save(self) -> None:
    ledger = {
      "generation": self._generation,
      "first": self._first,
      "banned": self.banned,
      "undone": self.undone,
    }
    write_atomically(self._path("ledger.json"), json_text(ledger).encode())
