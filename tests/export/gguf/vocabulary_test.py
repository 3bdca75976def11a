# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tokenizer in a file is the vocabulary's."""

import pytest
import sentencepiece

from palm_mtf.data.vocabulary.training import learn_model
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.vocabulary import (
  check_vocabulary,
  vocabulary_metadata,
)
from tests.source_files import PACKAGE, text_of

SOURCES = [text_of(path) for path in PACKAGE if text_of(path)][:20]
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Vocabulary:
  path = tmp_path_factory.mktemp("vocabulary") / "code.model"
  path.write_bytes(learn_model(SOURCES, 400))
  return Vocabulary(str(path))


def test_pieces_scores_and_types_are_sentencepieces(vocabulary):
  found = vocabulary_metadata(
    vocabulary, start_id=1, vocab_size=vocabulary.size
  )
  processor = sentencepiece.SentencePieceProcessor(model_file=vocabulary.path)
  ids = range(vocabulary.size)
  assert found["tokenizer.ggml.tokens"] == processor.IdToPiece(list(ids))
  scores = found["tokenizer.ggml.scores"].tolist()
  assert scores == [processor.GetScore(i) for i in ids]
  types = found["tokenizer.ggml.token_type"].tolist()
  assert types[:4] == [CONTROL, CONTROL, UNKNOWN, BYTE]  # <pad> [eod] <unk> 00
  assert [i for i in ids if types[i] == BYTE] == list(range(3, 259))
  assert set(types[259:]) == {NORMAL}


def test_rows_without_a_piece_have_names_of_their_own_and_are_unused(
  vocabulary,
):
  size = vocabulary.size + 3
  found = vocabulary_metadata(vocabulary, start_id=1, vocab_size=size)
  tokens = found["tokenizer.ggml.tokens"]
  assert len(tokens) == len(set(tokens)) == size
  assert found["tokenizer.ggml.token_type"].tolist()[-3:] == [UNUSED] * 3
  assert len(found["tokenizer.ggml.scores"]) == size


def test_what_stands_before_a_text_is_added_and_no_space(vocabulary):
  found = vocabulary_metadata(
    vocabulary, start_id=0, vocab_size=vocabulary.size
  )
  name = "tokenizer.ggml."
  assert found[f"{name}add_bos_token"] is True
  assert found[f"{name}bos_token_id"] == 0
  assert found[f"{name}eos_token_id"] == vocabulary.eod_id
  assert found[f"{name}add_space_prefix"] is False


def test_a_vocabulary_that_llama_cpp_would_follow_otherwise_is_refused(
  tmp_path,
):
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(SOURCES[3].splitlines()),
    model_prefix=str(tmp_path / "foreign"),
    model_type="unigram",
    vocab_size=400,
    byte_fallback=True,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  vocabulary = Vocabulary(str(tmp_path / "foreign.model"))
  with pytest.raises(UserError, match="otherwise: it is no byte-pair encoding"):
    check_vocabulary(vocabulary)
