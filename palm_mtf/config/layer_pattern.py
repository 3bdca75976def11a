# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads LAYERS, the pattern that says which variant each layer is.

"5*window, global"                    5 window layers, then a global layer
"4*(5*window, global), 2*window"      these 6 layers 4 times, then 2 more
"""

import functools
import itertools
import re
from collections.abc import Sequence

from palm_mtf.errors import UserError, shorten

_TIMES = r"(?:(\d+)\s*\*)?\s*"  # how often a name or a list is repeated
_ITEM = re.compile(rf"\s*{_TIMES}([A-Za-z_]\w*)\s*", re.ASCII)
# A list in parentheses that has no further parentheses in it.
_LIST = re.compile(rf"(?<![^,(])\s*{_TIMES}\(([^()]*)\)\s*(?=[,)]|$)", re.ASCII)
_MOST_DIGITS = 40  # because Python refuses to convert thousands of digits


@functools.cache  # because a search over layouts makes thousands of settings
def read_pattern(text: str, maximum: int) -> tuple[str, ...]:
  """Returns the variants that a pattern lists, one per layer of the pattern.

  Raises:
    UserError: the pattern cannot be read, or lists more than `maximum` layers.
  """

  def repeat(times: str | None, item: str) -> list[str]:
    times = times or "1"
    is_short = len(times) <= _MOST_DIGITS
    count = int(times) if is_short else maximum + 1
    num_layers = count * (item.count(",") + 1)
    check(num_layers, f"{num_layers:,}" if is_short else "too many", "an item")
    return [item] * count

  def check(num_layers: int, shown: str, what: str) -> None:
    if not 0 < num_layers <= maximum:
      raise UserError(
        f"LAYERS = {shorten(text)}: {what} has {shown} layers; give it at "
        f"least 1 and at most {maximum:,}."
      )

  flat, previous = text, ""
  while flat != previous:
    previous = flat
    flat = _LIST.sub(lambda x: ",".join(repeat(x[1], x[2])), flat)
  names = []
  for item in flat.split(","):
    match = _ITEM.fullmatch(item)
    if not match:
      raise UserError(
        f"LAYERS = {shorten(text)}: cannot read {shorten(item.strip())}; give "
        "names of VARIANTS (of the letters a to z and A to Z, the digits 0 to "
        '9 and "_", with no digit first) and lists of them, such as '
        '"4*(5*window, global)".'
      )
    names += repeat(match[1], match[2])
    check(len(names), f"over {maximum:,}", "the list")
  return tuple(names)


def repeat_pattern(text: str, num_layers: int, maximum: int) -> tuple[str, ...]:
  """Returns the variant of each layer of a model; the pattern repeats.

  Raises:
    UserError: the pattern's length does not divide the number of layers.
  """
  names = read_pattern(text, maximum)
  times, rest = divmod(num_layers, len(names))
  if rest:
    parts = [f"{times}*({text})" if times > 1 else text] if times else []
    parts.append(_join(names[:rest]))
    raise UserError(
      f"LAYERS = {shorten(text)} and NUM_LAYERS = {num_layers}: a pattern of "
      f"{len(names)} layers does not divide the model's; set LAYERS = "
      f'"{", ".join(parts)}", or another NUM_LAYERS.'
    )
  return names * times


def write_pattern(names: Sequence[str]) -> str:
  """Returns a pattern of the layers with these variants, at best a short one.

  `repeat_pattern` returns `names` for it.
  """
  length = len(names)
  period = next(
    n for n in range(1, length + 1) if names[n:] == names[: length - n]
  )
  times, rest = divmod(length, period)
  if rest and times > 1:
    return f"{times}*({_join(names[:period])}), {_join(names[:rest])}"
  return _join(names[: len(names) if rest else period])


def _join(names: Sequence[str]) -> str:
  # Writes equal neighbours as an item with a number.
  counts = [(name, len([*same])) for name, same in itertools.groupby(names)]
  return ", ".join(f"{n}*{name}" if n > 1 else name for name, n in counts)
