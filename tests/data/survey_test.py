# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from palm_mtf.commands.data_statistics import TextCounts, survey
from palm_mtf.data.ngrams import Examples
from palm_mtf.data.sources.document import TRAIN, VALIDATION, Document
from palm_mtf.data.tokens.encoder import Encoder
from tests.data.processes import peak_memory
from tests.data.small_sources import ListSource


def source(name, training, validation=()) -> ListSource:
  return ListSource(training, validation, name=name)


def test_counts_are_those_of_each_source_and_of_all(code, vocabulary):
  one = source("one", code[:4], code[4:6])
  two = source("two", code[6:9])
  with Encoder(vocabulary) as encoder:
    result = survey([one, two], encoder.count, {})
  tokens = [len(vocabulary.encode(text)) + 1 for text in code]
  sizes = [len(text.encode()) for text in code]
  longest = max(range(6), key=sizes.__getitem__)
  assert result.sources["one"].counts == TextCounts(
    documents=6,
    bytes=sum(sizes[:6]),
    tokens=sum(tokens[:6]),
    held_out_documents=2,
    held_out_bytes=sum(sizes[4:6]),
    longest_bytes=sizes[longest],
    longest_start=code[longest][:60],
  )
  total, second = result.total.counts, result.sources["two"].counts
  assert total.documents == 9
  assert total.tokens == sum(tokens[:9])
  assert second.bytes == sum(sizes[6:9])
  assert total.longest_bytes == max(sizes[:9])
  assert (total.held_out_documents, second.held_out_documents) == (2, 0)


def test_overlap_is_with_the_training_documents_of_all_sources(code):
  mine = Examples()
  for text in (*code[:3], code[5]):
    mine.add(Document(text))
  sources = [
    source("one", code[:2], [code[2], code[9]]),
    source("two", [code[2]], [code[3]]),
  ]
  result = survey(sources, None, {"mine": mine})
  assert list(result.contamination) == ["validation", "mine"]
  held_out, other = result.contamination.values()
  assert (held_out.examples, held_out.contaminated) == (3, 1)
  assert (other.examples, other.contaminated) == (4, 3)


@pytest.mark.slow
def test_memory_is_that_of_the_sketches_and_not_of_the_text():
  class Many(ListSource):
    num_words = 9

    def documents(self):
      rng = np.random.default_rng(0)
      for i in range(200):
        words = rng.integers(0, 1 << 40, self.num_words)
        text = " ".join(map(str, words.tolist()))
        yield (TRAIN, VALIDATION)[i % 50 == 0], Document(text)

  many = Many([])
  survey([many], None, {})  # tables of hashes are made once
  peaks = []
  for many.num_words in (100, 1600):
    peaks.append(peak_memory(lambda: survey([many], None, {})))
  assert peaks[1] < peaks[0] + 1_000_000
  assert peaks[1] < 2_500_000 < 200 * 1600 * 11, "the text"
