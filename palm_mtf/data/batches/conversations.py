# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Opens a run's chat template, and checks that training and chats agree."""

import logging
import os
from collections.abc import Sequence

from palm_mtf.config import DataConfig
from palm_mtf.data.batches.packing import prompt_start
from palm_mtf.data.sources.conversation import (
  MESSAGES,
  PAIRS,
  PLAIN_PAIRS,
  TEXTS,
)
from palm_mtf.data.sources.document import TRAIN, Source, num_repeats
from palm_mtf.data.tokens.store import TokenStore
from palm_mtf.data.vocabulary.answers import ConversationEncoder
from palm_mtf.data.vocabulary.chat import FILE_NAME, check_template
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)

_NUM_CHECKED = 8  # conversations that each start of training renders again


def open_conversations(
  data: DataConfig, sources: Sequence[Source], vocabulary: Vocabulary
) -> ConversationEncoder | None:
  """Returns what encodes conversations; None if no source has any.

  Raises UserError if PACKING would cut them, or there is no chat template.
  """
  named = [source.name for source in sources if source.form != TEXTS]
  if not named:
    return None
  packing = f"PACKING = {data.packing!r}"
  pairs = [x.name for x in sources if x.form in (PAIRS, PLAIN_PAIRS)]
  if pairs and data.packing != "single":
    raise UserError(
      f"{packing}: a row holds one pair of answers of {pairs[0]}; set 'single'."
    )
  if data.packing not in ("packed", "single"):
    raise UserError(
      f"{packing}: cuts the conversations of {named[0]} anywhere; set 'packed' "
      "or 'single'."
    )
  rendered = [x.name for x in sources if x.form in (MESSAGES, PAIRS)]
  if rendered:
    folder = os.path.dirname(os.path.abspath(vocabulary.path))
    check_template(folder, rendered[0])
  start = prompt_start(data, vocabulary)
  return ConversationEncoder(vocabulary, start, is_plain=not rendered)


def check_prompts(
  source: Source, store: TokenStore, conversations: ConversationEncoder
) -> None:
  """Compares the first training conversations with the prompts of a chat.

  Raises UserError unless the stored tokens before each answer are those that
  `generate --chat` and the server make of the messages before it.
  """
  tokens, number = store.train.tokens, 0
  spans, answers = tokens.spans(), tokens.answers()
  for split, document in source.documents():
    if number >= min(_NUM_CHECKED, len(spans)):
      return
    # A document is stored as often as an epoch reads it.
    repeats = num_repeats(document) if split == TRAIN else 0
    if not repeats or not document.conversation:
      continue
    begin, _, end = spans[number]
    stored = tokens.read(begin, end)[0].tolist()
    starts = answers[(begin < answers[:, 0]) & (answers[:, 0] < end), 0] - begin
    # Leave out the rejected answer of a pair, which has the same prompt.
    for i, start in zip(document.conversation.answers, starts, strict=False):
      if stored[:start] == conversations.prompt(document.conversation, i):
        continue
      where = f"{document.conversation.where}: messages[{i}]"
      if conversations.writes_date:
        _logger.warning(
          f"{where}: {FILE_NAME} writes the date, so prompts in chats are not "
          "those of training; write a fixed date into it"
        )
        return
      raise UserError(
        f"{where}: a chat's prompt has other tokens than the text that was "
        f"encoded; remove {store.folder}, so that it is encoded again."
      )
    number += repeats
