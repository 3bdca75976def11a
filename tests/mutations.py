# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Changes files at random, as damage and attacks do, for fuzz_test.py."""

import random
import re

# Numbers, texts and words of JSON and gin.
_VALUE = re.compile(rb'-?\d[\d.e+-]*|"[^"\n]*"|\b[A-Za-z_]+\b')
_ODD_VALUES = [
  *(b"0", b"-1", b"1.5", b"1e400", b"-0.0", b"NaN", b"Infinity", b"inf"),
  *(b"9" * 5000, b"9" * 400, b"18446744073709551616", b"4294967295"),
  *(b"true", b"null", b"None", b"[]", b"{}", b"[[1]]", b'{"a": 1}', b"()"),
  *(b'""', b'"\\ud800"', b'"\\u0000"', b'"' + b"x" * 5000 + b'"', b"''"),
  *(b"@x()", b"%X", b"%TRAIN_STEPS", b"'a\\nb'", b"1_0", b"0x1f", b"b'1'"),
]
_ODD_BYTES = [b"\0" * 9, b"\xff\xfe", b"\xc3", b"\xef\xbb\xbf", b"\r", b"\x1b["]
_BRACKETS = [b"[", b"{", b'{"a":', b"(", b"]", b"}", b"-", b'"', b"'", b"#"]


def _flip(content: bytes, rng: random.Random) -> bytes:
  at = rng.randrange(len(content))
  flipped = content[at] ^ (1 << rng.randrange(8))
  return content[:at] + bytes([flipped]) + content[at + 1 :]


def _cut(content: bytes, rng: random.Random) -> bytes:
  return content[: rng.randrange(len(content))]


def _drop(content: bytes, rng: random.Random) -> bytes:
  begin, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
  return content[:begin] + content[end:]


def _insert(content: bytes, rng: random.Random) -> bytes:
  at = rng.randrange(len(content) + 1)
  odd = rng.choice([*_ODD_BYTES, *_BRACKETS])
  return content[:at] + odd + content[at:]


def _nest(content: bytes, rng: random.Random) -> bytes:
  """Replaces a value by up to 100,000 opening brackets."""
  deep = rng.choice(_BRACKETS[:4]) * rng.choice([50, 1_000, 100_000])
  return _put(content, rng, lambda value: deep + value)


def _swap_value(content: bytes, rng: random.Random) -> bytes:
  return _put(content, rng, lambda _: rng.choice(_ODD_VALUES))


def _copy_value(content: bytes, rng: random.Random) -> bytes:
  values = _VALUE.findall(content) or [b""]
  return _put(content, rng, lambda _: rng.choice(values))


def _put(content: bytes, rng: random.Random, change) -> bytes:
  places = [*_VALUE.finditer(content)]
  if not places:
    return change(content)
  place = rng.choice(places)
  begin, end = place.span()
  return content[:begin] + change(place[0]) + content[end:]


def _lines(content: bytes, rng: random.Random) -> bytes:
  """Repeats, removes or swaps lines."""
  lines = content.split(b"\n")
  one, other = (rng.randrange(len(lines)) for _ in range(2))
  kind = rng.randrange(3)
  if kind == 0:
    lines.insert(one, lines[other])
  elif kind == 1:
    del lines[one]
  else:
    lines[one], lines[other] = lines[other], lines[one]
  return b"\n".join(lines)


_TEXT = [_swap_value, _swap_value, _copy_value, _nest, _lines]
_ANY = [_flip, _flip, _cut, _drop, _insert]


def mutate(content: bytes, rng: random.Random) -> bytes:
  """Returns `content` with one to three changes."""
  for _ in range(rng.choice([1, 1, 2, 3])):
    if content:
      content = rng.choice(_TEXT + _ANY)(content, rng)
  return content
