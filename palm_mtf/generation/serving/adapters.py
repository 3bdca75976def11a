# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters that requests select by their names."""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping

from palm_mtf.errors import UserError, did_you_mean, shorten
from palm_mtf.generation.inference.adapters import Adapter, Factors
from palm_mtf.generation.serving.messages import RefusalError

_NAME = re.compile(r"[\w.:-]{1,100}")


@dataclasses.dataclass(frozen=True, eq=False)
class NamedAdapter:
  """An adapter under its name; a request keeps it until its texts end."""

  name: str
  created: int  # when it was loaded, in seconds since 1970
  adapter: Adapter


class ServedAdapters:
  """The adapters of one base, which may change while texts use them.

  One thread at a time changes them; others may read.
  """

  def __init__(
    self,
    base: str,
    read: Callable[[str, str], Factors],
    keep: Callable[[Factors], Adapter],
  ):
    """Takes the name of the base, and functions for loading.

    `read` returns the factors of an adapter, given its path and what named the
    path; it raises UserError if they cannot be read. `keep` gives factors to
    the decoder.
    """
    self._base, self._read, self._keep = base, read, keep
    self._named: dict[str, NamedAdapter] = {}

  def find(self, name: object) -> NamedAdapter | None:
    """Returns the adapter that has this name now."""
    return self._named.get(name) if isinstance(name, str) else None

  def list_all(self) -> list[NamedAdapter]:
    """Returns all adapters, in the order in which they were loaded."""
    return [*self._named.values()]

  def read(self, paths: Mapping[str, str], given: str) -> dict[str, Factors]:
    """Returns {name: factors} of adapters, {name: path}.

    `given` is the flag or field that has the paths. Raises UserError.
    """
    for name in paths:
      self._check_name(name)
    return {name: self._read(path, given) for name, path in paths.items()}

  def add(self, factors: Mapping[str, Factors]) -> None:
    """Adds adapters, {name: factors}; they replace those of the same names."""
    self._named |= {
      name: NamedAdapter(name, int(time.time()), self._keep(each))
      for name, each in factors.items()
    }

  def load(self, body: object) -> str:
    """Loads the adapter of a request, as vLLM does; returns its name.

    `body` is the request's, parsed from JSON. Raises UserError; then nothing
    has changed.
    """
    needed = {"lora_name": "", "lora_path": ""}
    fields = _read_fields(body, needed, {"load_inplace": False})
    name, path = str(fields["lora_name"]), str(fields["lora_path"])
    if name in self._named and not fields["load_inplace"]:
      raise UserError(
        f"lora_name = {name!r}: is loaded already; give load_inplace = true "
        "to replace it."
      )
    self.add(self.read({name: path}, "lora_path"))
    return name

  def unload(self, body: object) -> str:
    """Removes the adapter of a request; returns its name.

    Texts that have begun with it end with it. Raises RefusalError if there is
    no such adapter.
    """
    name = str(_read_fields(body, {"lora_name": ""}, {})["lora_name"])
    if not self._named.pop(name, None):
      raise RefusalError(404, "lora_name: there is no such adapter.")
    return name

  def _check_name(self, name: str) -> None:
    if not _NAME.fullmatch(name):
      raise UserError(
        f"the adapter's name {shorten(name)}: give at most 100 letters, digits "
        "or _ . : -"
      )
    if name == self._base:
      raise UserError(
        f"the adapter's name {name!r}: is that of the base; give another."
      )


def _read_fields(
  body: object, needed: Mapping[str, object], others: Mapping[str, object]
) -> Mapping[str, object]:
  # `needed` and `others` have fields, with values of their types.
  if not isinstance(body, Mapping):
    raise UserError("the body is no JSON object.")
  known = {**needed, **others}
  for name, value in body.items():
    if name not in known:
      guess = did_you_mean(name, known)
      raise UserError(f"unknown field {shorten(name)}{guess}.")
    if type(value) is not type(known[name]):
      kind = "a text" if isinstance(known[name], str) else "true or false"
      raise UserError(f"{name} = {shorten(value)}: give {kind}.")
  for name in needed:
    if name not in body:
      raise UserError(f"{name} is missing.")
  return {**others, **body}
