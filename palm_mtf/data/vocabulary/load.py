# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Opens the vocabulary of a run; trains a vocabulary if there is no file."""

import logging
import os
from collections.abc import Iterator, Mapping

from palm_mtf.config import DataConfig
from palm_mtf.data.vocabulary.byte_pair import CONFIG, BytePairVocabulary
from palm_mtf.data.vocabulary.vocabulary import (
  GENERATION_CONFIG,
  TRAIN_ONE,
  Vocabulary,
)
from palm_mtf.errors import UserError, shorten, suggest_name
from palm_mtf.model_dir.foreign_files import read_json_object, read_regular
from palm_mtf.model_dir.paths import ModelDir

_logger = logging.getLogger(__name__)

# Larger files are refused. 256,000 pieces take 5 MB in SentencePiece's format,
# and 40 MB in a tokenizer.json.
_MAX_BYTES = 2**30
# Chat templates can read these special tokens, as in transformers.
_SPECIAL_TOKENS = tuple(
  f"{x}_token" for x in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


def open_vocabulary(
  path: str,
  *,
  setting: str = "VOCABULARY",
  source: str = "",
  model_folder: str | None = None,
  extra_ids: int = 0,
) -> Vocabulary:
  """Opens a SentencePiece model or a tokenizer.json, whatever its name is.

  Files of transformers in the same folder say which tokens end a text:
  `eos_token` in tokenizer_config.json, and `eos_token_id`, which may be a list,
  in config.json and generation_config.json.

  Args:
    setting: name of the setting that holds `path`, for messages.
    source: file from which `path` was made, if the user does not know `path`.
    model_folder: a second folder whose files say which tokens end a text, if
      the model is not in the folder of `path`.
    extra_ids: EXTRA_IDS, number of sentinels after the tokens of the file.

  Raises:
    UserError: there is no such file, or its vocabulary cannot be used.
  """
  what = f"{source}: its tokenizer" if source else f"{setting} = {path!r}"
  try:
    content = read_regular(path, _MAX_BYTES)
  except FileNotFoundError:
    raise UserError(
      f"{what}: no such file{suggest_name(path)}; give a SentencePiece model, "
      f"a tokenizer.json, {TRAIN_ONE}."
    ) from None
  except OSError as error:
    raise UserError(f"{what}: {error.strerror}.") from None
  # A SentencePiece model begins with the byte 0x0A, the tag of its first piece.
  is_json = content.lstrip()[:1] == b"{"
  kind: type[Vocabulary] = BytePairVocabulary
  if not is_json:
    from palm_mtf.data.vocabulary.sentencepiece_vocabulary import (
      SentencePieceVocabulary,
    )

    kind = SentencePieceVocabulary
  folders = dict.fromkeys(
    [os.path.dirname(path), model_folder or os.path.dirname(path)]
  )
  ends = [end for folder in folders for end in _read_ends(folder)]
  found = kind(path, content, what=what, extra_ids=extra_ids, ends=ends)
  found.path = source or path
  config = _read_object(os.path.dirname(path), CONFIG)
  named = {name: _read_name(config, name) for name in _SPECIAL_TOKENS}
  found.special_tokens = {name: token for name, token in named.items() if token}
  return found


def _read_object(folder: str, name: str) -> Mapping[str, object]:
  """Returns the object in a folder's JSON file; {} if there is no such file."""
  path = os.path.join(folder, name)
  return read_json_object(path, "copy it again") if os.path.exists(path) else {}


def read_start(vocabulary: Vocabulary, bos_id: int | None) -> int | None:
  """Returns the id that a tokenizer's own files put before each text, or None.

  The files are a tokenizer.json, whose post-processor may add a token, and
  `add_bos_token` and `bos_token` in tokenizer_config.json. A SentencePiece
  model without such a file adds the start token, as in transformers. `bos_id`
  is the start token in the model's configuration.

  Raises UserError if the tokenizer puts several tokens before each text.
  """
  config = _read_object(os.path.dirname(vocabulary.path), CONFIG)
  is_json = isinstance(vocabulary, BytePairVocabulary)
  found = vocabulary.start_ids() if is_json else []
  if len(found) > 1:
    raise UserError(
      f"{vocabulary.path}: puts {len(found)} tokens before each text; a model "
      "of palm_mtf reads one at most."
    )
  if found or config.get("add_bos_token", not is_json) is not True:
    return found[0] if found else None
  name = _read_name(config, "bos_token")
  named = (
    i for i in range(vocabulary.size) if vocabulary.piece(i) == name != ""
  )
  found = next(named, bos_id)
  # A token with text, such as "!" with id 0, cannot be a start token.
  has_it = vocabulary.has_id(found) and vocabulary.is_control(found)
  return found if has_it else None


def load_vocabulary(
  model_dir: str, data: DataConfig, *, vocab_size: int
) -> Vocabulary:
  """Opens VOCABULARY or, if None, opens or trains MODEL_DIR's own vocabulary.

  Raises UserError if the file is not a usable vocabulary, has more than
  `vocab_size` pieces, or cannot be trained or written.
  """
  path = data.vocabulary
  if path is None:
    path = ModelDir(model_dir).vocabulary
    # Do not train the vocabulary again if documents or VOCAB_SIZE change,
    # because checkpoints depend on its ids.
    if not os.path.exists(path):
      from palm_mtf.data.vocabulary.training import train_on_run

      train_on_run(model_dir, data, vocab_size, path=path)
  path = os.path.expanduser(path)
  vocabulary = open_vocabulary(path, extra_ids=data.extra_ids)
  vocabulary.check_size(vocab_size)
  losses = vocabulary.losses()
  if losses:
    why = "" if vocabulary.has_bytes else "has no byte pieces and "
    _logger.warning(
      f"{path} {why}does not keep every text as it is; it loses or changes: "
      f"{', '.join(losses)}"
    )
  return vocabulary


def _read_ends(folder: str) -> Iterator[str | int]:
  """Yields names and ids of tokens that end a text, from files in `folder`."""
  if name := _read_name(_read_object(folder, CONFIG), "eos_token"):
    yield name
  for file in ("config.json", GENERATION_CONFIG):
    given = _read_object(folder, file).get("eos_token_id")
    for each in given if isinstance(given, list) else [given]:
      if type(each) is int:
        yield each
      elif each is not None:
        raise UserError(
          f"{os.path.join(folder, file)}: eos_token_id = {shorten(given)}: is "
          "neither an id nor a list of ids; copy it again."
        )


def _read_name(config: Mapping[str, object], key: str) -> str:
  name = config.get(key)
  # The name may be in a JSON object with flags of the token.
  name = name.get("content") if isinstance(name, Mapping) else name
  return name if isinstance(name, str) else ""
