# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads collectives and cycles from the HLO text that XLA has compiled.

HLO text, for a TPU or GPU, has a line per instruction, in execution order:

  %all-gather.1 = bf16[128,64]{1,0} all-gather(%x), replica_groups={{0,1}}, ...

Instructions form computations. The program begins with the computation ENTRY;
loops, calls and fusions run other computations.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_BYTES = {
  **dict.fromkeys(("pred", "s8", "u8"), 1),
  **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
  **dict.fromkeys(("s32", "u32", "f32"), 4),
  **dict.fromkeys(("s64", "u64", "f64"), 8),
}
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*->.*\{$")
_INSTRUCTION = re.compile(
  r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$"
)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_KINDS = {
  "all-gather": "all_gather",
  "all-reduce": "all_reduce",
  "all-to-all": "all_to_all",
  "collective-permute": "permute",
  "reduce-scatter": "reduce_scatter",
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Instructions whose result equals their operand; `_source` skips them.
_SAME_VALUE = ("bitcast", "copy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """A collective of a compiled program."""

  # "all_gather", "all_reduce", "all_to_all", "permute" or "reduce_scatter".
  kind: str
  # Device numbers of each group; for a permute, (sender, receiver).
  groups: Groups
  # How many times a device runs the collective per run of the program.
  times: int
  sent_bytes: float  # bytes that a device sends each time


class _Instruction(NamedTuple):
  is_root: bool
  name: str
  shape: str
  opcode: str
  rest: str  # the text after the opcode: operands and attributes

  @property
  def operands(self) -> list[str]:
    """Names of the instructions that compute the operands."""
    return _NAME.findall(self.rest.split(")", 1)[0])

  def attribute(self, name: str) -> str:
    """Returns the computation named by an attribute, such as "body"; or ""."""
    found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
    return found[1] if found else ""


class CompiledText:
  """The HLO text of a compiled program, parsed into instructions."""

  def __init__(self, text: str):
    self._computations: dict[str, dict[str, _Instruction]] = {}
    self._entry = ""
    current: dict[str, _Instruction] = {}
    for line in text.splitlines():
      if begin := _COMPUTATION.match(line):
        current = self._computations[begin[2]] = {}
        if begin[1]:
          self._entry = begin[2]
      elif found := _INSTRUCTION.match(line):
        each = _Instruction(bool(found[1]), *found.groups()[1:])
        current[each.name] = each

  @property
  def collectives(self) -> list[Collective]:
    """The program's collectives in execution order, those in loops included."""
    return [
      _read_collective(fused or each, each if fused else None, times)
      for each, times in self._run(self._entry, 1)
      for fused in [*self._fused_collectives(each), None]
      if fused or each.opcode.removesuffix("-start") in _KINDS
    ]

  @property
  def estimated_cycles(self) -> int:
    """The TPU compiler's estimate of cycles per run, without collectives."""
    return sum(
      times * int(found[1])
      for each, times in self._run(self._entry, 1)
      if (found := re.search(r'"estimated_cycles":"(\d+)"', each.rest))
    )

  def _run(
    self, computation: str, times: int
  ) -> Iterator[tuple[_Instruction, int]]:
    """Yields (instruction, how often it runs) for a computation and its loops.

    The computation runs `times` times. The instructions inside a loop or call
    follow the loop or call. Those inside fusions and conditionals are left out.
    """
    for each in self._computations[computation].values():
      yield each, times
      if each.opcode == "while":
        rounds = self._count_rounds(computation, each)
        yield from self._run(each.attribute("body"), times * rounds)
      elif each.opcode == "call":
        yield from self._run(each.attribute("to_apply"), times)
      elif each.opcode == "async-start":
        yield from self._run(each.attribute("calls"), times)

  def _fused_collectives(self, each: _Instruction) -> list[_Instruction]:
    if each.opcode != "fusion":
      return []
    inner = self._computations[each.attribute("calls")].values()
    return [x for x in inner if x.opcode in _KINDS]

  def _count_rounds(self, computation: str, loop: _Instruction) -> int:
    """Returns how often a loop runs its body, and so the body's collectives.

    HLO text for GPUs states the number. HLO text for TPUs does not: there, find
    the loop's counter, and the constant at which the loop ends.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
      return int(known[1])
    condition, body = loop.attribute("condition"), loop.attribute("body")
    test = self._root(condition)
    counter, end = (self._source(condition, x) for x in test.operands)
    place = re.search(r"\bindex=(\d+)", counter.rest)
    if "direction=LT" not in test.rest or not place:
      raise ValueError(f"the loop {loop.name} does not count to a number")
    (values,) = loop.operands
    begin, added = (
      self._source(of, each.operands[int(place[1])])
      for of, each in (
        (computation, self._computations[computation][values]),
        (body, self._root(body)),
      )
    )
    step = self._source(body, added.operands[1])
    numbers = (_constant(x) for x in (begin, end, step))
    return len(range(*numbers))

  def _root(self, computation: str) -> _Instruction:
    found = self._computations[computation].values()
    return next(x for x in found if x.is_root)

  def _source(self, computation: str, name: str) -> _Instruction:
    """Returns the instruction that computes a value, looking through copies."""
    found = self._computations[computation][name]
    if found.opcode in _SAME_VALUE:
      return self._source(computation, found.operands[0])
    return found


def _constant(x: _Instruction) -> int:
  if x.opcode != "constant":
    raise ValueError(f"{x.name} is not a constant")
  return int(x.rest.split(")", 1)[0])


def _read_collective(
  each: _Instruction, fusion: _Instruction | None, times: int
) -> Collective:
  """Makes a `Collective` of an instruction; `fusion` contains it, if given."""
  kind = _KINDS[each.opcode.removesuffix("-start")]
  groups = read_groups(each.rest)
  n = len(groups[0])
  size = sum(_array_bytes(*x) for x in _arrays(each))
  if kind == "reduce_scatter":  # the operands have n times the results' bytes
    size *= n
  elif kind == "all_reduce" and fusion:
    # An all-reduce fused with a slice of its sum runs as a reduce-scatter.
    of_fusion = sum(_array_bytes(*x) for x in _ARRAY.findall(fusion.shape))
    if of_fusion * n <= size:
      kind = "reduce_scatter"
  sent = size
  if kind != "permute":
    sent = (n - 1) / n * size * (2 if kind == "all_reduce" else 1)
  return Collective(kind=kind, groups=groups, times=times, sent_bytes=sent)


def _arrays(each: _Instruction) -> list[tuple[str, str]]:
  """Returns (dtype, sizes), such as ("bf16", "128,64"), of each result."""
  found = _ARRAY.findall(each.shape)
  # These opcodes list the shapes of operands, then the shapes of results.
  if each.opcode in ("all-gather-start", "reduce-scatter-start"):
    return found[len(found) // 2 :]
  if each.opcode == "collective-permute-start":
    return found[:1]  # the operand, whose shape is the result's
  return found


def _array_bytes(dtype: str, sizes: str) -> int:
  return _BYTES[dtype] * math.prod(int(x) for x in sizes.split(",") if x)


def read_groups(attributes: str) -> Groups:
  """Returns the groups of devices in the attributes of a collective.

  XLA writes groups as {{0,1},{2,3}}; or as [2,2]<=[4], the rows of a 2 x 2
  matrix of the numbers 0 to 3; or as [2,2]<=[2,2]T(1,0), its transpose's rows.
  """
  found = re.search(
    r"(?:replica_groups|source_target_pairs)="
    r"(\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)",
    attributes,
  )
  return _parse_groups(found[1] if found else "")


@functools.lru_cache(maxsize=64)
def _parse_groups(text: str) -> Groups:
  if text.startswith("{{"):
    rows = text.strip("{}").split("},{")
    return tuple(tuple(int(x) for x in row.split(",")) for row in rows)
  found = re.match(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
  if not found:
    raise ValueError(f"device groups in an unknown format: {text!r}")
  sizes = [int(x) for x in found[3].split(",")]
  order = [int(x) for x in found[4].split(",")] if found[4] else None
  numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
  rows = numbers.reshape(int(found[1]), int(found[2])).tolist()
  return tuple(map(tuple, rows))


def find_axes(
  collective: Collective, mesh_sizes: Sequence[int]
) -> tuple[int, ...] | None:
  """Returns the numbers of the mesh axes whose links a collective uses.

  The devices of some group differ along these axes. Returns None if a group
  lacks some of the devices along these axes, except for a permute, whose groups
  are always pairs. Device numbers are row-major in the mesh.
  """
  strides = [math.prod(mesh_sizes[i + 1 :]) for i in range(len(mesh_sizes))]
  axes = tuple(
    axis
    for axis, (stride, size) in enumerate(zip(strides, mesh_sizes, strict=True))
    if any(
      len({device // stride % size for device in group}) > 1
      for group in collective.groups
    )
  )
  expected = math.prod(mesh_sizes[axis] for axis in axes)
  sizes = {len(group) for group in collective.groups}
  is_whole = collective.kind == "permute" or sizes == {expected}
  return axes if is_whole else None


def read_excess(message: str) -> tuple[float, float] | None:
  """Parses the compiler's error message for a program that exceeds the memory.

  Returns (bytes needed, bytes available) per device; None for other errors.
  """
  found = re.search(
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    message,
  )
  if not found:
    return None
  needed, unit, available, its_unit = found.groups()
  return float(needed) * _UNITS[unit], float(available) * _UNITS[its_unit]
