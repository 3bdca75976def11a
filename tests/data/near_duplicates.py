# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts of which some are near duplicates, and their exact similarity."""

import functools

import numpy as np


@functools.cache
def runs_of(text: str) -> set[tuple[str, ...]]:
  words = text.lower().split()
  n = min(5, len(words))
  return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def similarity(one: str, other: str) -> float:
  """Exact Jaccard similarity of the sets of 5-word runs."""
  a, b = runs_of(one), runs_of(other)
  return len(a & b) / max(1, len(a | b))


def edited(text: str, num_edits: int, rng: np.random.Generator) -> str:
  words = text.split()
  for place in rng.choice(len(words), num_edits, replace=False):
    words[place] = f"edit{rng.integers(1 << 40)}"
  return " ".join(words)


def random_text(rng: np.random.Generator, num_words: int) -> str:
  return " ".join(map(str, rng.integers(0, 5000, num_words)))


def planted(seed: int, num_texts: int = 30) -> list[str]:
  """Returns texts, near copies of a third, and texts with half of another.

  Near copies share more than 0.93 of their runs, which MinHash finds with a
  probability of 0.9999; other texts share less than half.
  """
  rng = np.random.default_rng(seed)
  third = num_texts // 3
  texts = [random_text(rng, 300) for _ in range(num_texts)]
  near = [edited(text, 1, rng) for text in texts[:third] for _ in range(3)]
  halves = [
    " ".join([*text.split()[:150], random_text(rng, 150)])
    for text in texts[third : 2 * third]
  ]
  return [*texts, *near, *halves, texts[0], texts[0], near[-1]]
