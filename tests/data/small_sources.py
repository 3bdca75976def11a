# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sources, stores and token arrays that tests write out by hand."""

import hashlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import hypothesis
import numpy as np
from hypothesis import strategies as st

from palm_mtf.config import DataConfig
from palm_mtf.data.batches.corpus import Corpus, corpus_of_run
from palm_mtf.data.sources.conversation import TEXTS
from palm_mtf.data.sources.document import TRAIN, VALIDATION, Document
from palm_mtf.data.tokens.shard import Shard, TokenArray
from palm_mtf.data.tokens.store import TokenStore, read_store, write_store
from palm_mtf.data.vocabulary.vocabulary import Vocabulary

EOD = 1

Example = tuple[list[int], list[int]]  # inputs and targets, without [eod]


def examples(max_tokens: int = 12) -> st.SearchStrategy[Example]:
  """Draws examples of ids that are neither <pad> nor [eod]."""
  ids = st.lists(st.integers(2, 60_000), max_size=max_tokens)
  return st.tuples(ids, ids)


def repeatable(max_examples: int) -> hypothesis.settings:
  """Returns settings under which hypothesis draws the same every time."""
  return hypothesis.settings(
    max_examples=max_examples,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
  )


def load_corpus(
  model_dir: str,
  data: DataConfig,
  vocabulary: Vocabulary,
  sequence_length: int,
  seed: int,
  objective: str = "causal",
) -> Corpus:
  """Returns `corpus_of_run` for the settings that it reads."""
  config = SimpleNamespace(
    data=data,
    model=SimpleNamespace(
      sequence_length=sequence_length, objective=objective, adapter_length=None
    ),
    run=SimpleNamespace(seed_of_data=seed),
    loss=SimpleNamespace(preference_beta=None),
  )
  return corpus_of_run(model_dir, config, vocabulary)


def shard(documents: Sequence[Example], *, has_inputs: bool) -> Shard:
  """Returns one shard, written out token by token."""
  tokens, targets, ends = [], [], []
  for inputs, text in documents:
    tokens += inputs
    targets.append(len(tokens))
    tokens += [*text, EOD]
    ends.append(len(tokens))
  spans = np.array([targets, ends], np.int64)
  if not has_inputs:
    spans[0, :1], spans[0, 1:] = 0, spans[1, :-1]
  return Shard(np.array(tokens, "<u2"), spans, has_inputs)


def numbered(lengths: Sequence[int], first: int = 0) -> TokenArray:
  """Returns documents of these lengths whose tokens count up from `first`."""
  ends = np.cumsum(lengths)
  tokens = first + np.arange(ends[-1], dtype="<u4")
  return TokenArray([Shard(tokens, np.stack([ends - lengths, ends]))])


def token_array(*shards: Sequence[Example], has_inputs: bool) -> TokenArray:
  """Returns the tokens of shards of documents."""
  return TokenArray([shard(each, has_inputs=has_inputs) for each in shards])


class ListSource:
  """A source of documents that are all in memory."""

  has_inputs = False
  form = TEXTS

  def __init__(
    self,
    training: Sequence[Document | str],
    validation: Sequence[Document | str] = (),
    *,
    name: str = "source",
    rate: float = 1.0,
  ):
    self.name, self.rate = name, rate
    self._documents = [
      (split, each if isinstance(each, Document) else Document(each))
      for split, documents in ((TRAIN, training), (VALIDATION, validation))
      for each in documents
    ]
    self.num_bytes = sum(d.num_bytes for _, d in self._documents)

  def fingerprint(self, digests: object = None) -> str:
    return hashlib.blake2b(repr(self._documents).encode()).hexdigest()

  def documents(self) -> Iterator[tuple[str, Document]]:
    yield from self._documents

  def report_skipped(self) -> None:
    pass


class ExampleSource(ListSource):
  """A source of examples that are all in memory."""

  has_inputs = True


def store_of(
  source: ListSource, vocabulary: Vocabulary, path: object, **settings: object
) -> TokenStore:
  """Returns the tokens of `source`, written to `path` in this process."""
  write_store(
    str(path), source, vocabulary, **({"num_processes": 0} | settings)
  )
  return read_store(str(path))


def corpus_of(
  sources: Sequence[ListSource],
  vocabulary: Vocabulary,
  folder: object,
  *,
  packing: str = "joined",
  sequence_length: int = 16,
  seed: int = 0,
  **settings: object,
) -> Corpus:
  """Returns a corpus with a store below `folder` for each source."""
  return Corpus(
    sources=list(sources),
    stores=[
      store_of(source, vocabulary, f"{folder}/{source.name}", **settings)
      for source in sources
    ],
    packing=packing,
    sequence_length=sequence_length,
    eod_id=vocabulary.eod_id,
    seed=seed,
  )
