# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates, which turn a conversation into the tokens of a prompt.

A template is a text for Jinja2, as in files of transformers and llama.cpp. The
file is chat_template.jinja in the folder of the vocabulary. Names of control
tokens in the template's text become the ids of these tokens. The same names in
a message become the ids of their letters, so that no message can end a turn.
"""

import datetime
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence

from palm_mtf.data.vocabulary.byte_pair import CONFIG
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError, shorten
from palm_mtf.model_dir.foreign_files import read_json_object, read_regular

FILE_NAME = "chat_template.jinja"
_MAX_BYTES = 10**6
# While a message is rendered, this mark splits the names of control tokens in
# the message. No text has the mark, which is half of a surrogate pair.
_MARK = "\ud800"

Message = Mapping[str, str]  # {"role": "user", "content": ...}


def read_template(folder: str) -> str:
  """Returns the template in a vocabulary's folder; "" if there is none.

  Without chat_template.jinja, the template is in tokenizer_config.json, either
  as the only template or as the template "default" of several.

  Raises:
    UserError: a file cannot be read.
  """
  path, config = (os.path.join(folder, x) for x in (FILE_NAME, CONFIG))
  try:
    return read_regular(path, _MAX_BYTES).decode()
  except FileNotFoundError:
    pass
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, "strerror", None) or "is no UTF-8"
    raise UserError(f"{path}: {reason}; copy it again.") from None
  if not os.path.exists(config):
    return ""
  found = read_json_object(config, "copy it again").get("chat_template")
  for each in found if isinstance(found, list) else ():
    if isinstance(each, dict) and each.get("name") == "default":
      found = each.get("template")
  # JSON can hold half of a surrogate pair, which no file of text can.
  return (
    found.encode(errors="replace").decode() if isinstance(found, str) else ""
  )


class ChatTemplate:
  """The template in the folder of a vocabulary."""

  def __init__(self, vocabulary: Vocabulary, start_id: int | None):
    """Reads and compiles the template.

    Args:
      start_id: start token of prompts, from packing.prompt_start.

    Raises:
      UserError: there is no template, the template is damaged, or jinja2 is not
        installed.
    """
    text = read_template(os.path.dirname(vocabulary.path))
    if not text:
      raise UserError(
        f"{FILE_NAME}: is missing next to the vocabulary; import a model that "
        "has such a form of conversations, or write the file."
      )
    try:
      from jinja2 import TemplateError, sandbox
    except ImportError as error:
      raise UserError(
        f"{FILE_NAME}: is rendered by jinja2, which cannot be imported "
        f"({error}): pip install 'palm_mtf[chat]'."
      ) from None

    def raise_exception(message: str) -> None:
      raise TemplateError(message)

    # These settings and functions are those of transformers.
    made = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=["jinja2.ext.loopcontrols"],
    )
    made.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: (
      datetime.datetime.now().strftime(form)
    )
    self._vocabulary, self._start_id = vocabulary, start_id
    ids = filter(vocabulary.is_control, range(vocabulary.size))
    self._controls = {x: i for i in ids if len(x := vocabulary.piece(i)) > 1}
    names = sorted(self._controls, key=len, reverse=True)
    self._names = re.compile("|".join(map(re.escape, names)))
    try:
      self._template = made.from_string(text)
    except TemplateError as error:
      raise self._explain(error) from None

  def encode(self, messages: Sequence[Message]) -> list[int]:
    """Returns the tokens of a conversation up to the start of an answer.

    If the template's first token is no control token, `start_id` stands before
    it, unless `start_id` is None.

    Raises:
      UserError: the template refuses the messages, or a message holds half of a
        surrogate pair.
    """
    names = {"eos_token": self._vocabulary.eod_id}
    if self._start_id is not None:
      names["bos_token"] = self._start_id
    try:
      text = self._template.render(
        messages=[
          {key: self._hide_names(value) for key, value in message.items()}
          for message in messages
        ],
        add_generation_prompt=True,
        **{key: self._vocabulary.piece(i) for key, i in names.items()},
      )
    # A template is a program, which may raise any exception.
    except Exception as error:
      raise self._explain(error) from None
    plain = [x.replace(_MARK, "") for x in self._names.split(text)]
    are_inside = [i > 0 for i in range(len(plain))]
    ids, *others = self._vocabulary.encode_batch(plain, are_inside)
    for name, part in zip(self._names.findall(text), others, strict=True):
      ids += [self._controls[name], *part]
    is_start = bool(ids) and self._vocabulary.is_control(ids[0])
    if is_start or (ids and self._start_id is None):
      return ids
    start = [self._start_id, self._vocabulary.eod_id][self._start_id is None]
    return [start, *ids]

  def _hide_names(self, text: str) -> str:
    text.encode()  # fails for half of a surrogate pair, such as _MARK
    return self._names.sub(lambda x: x[0][:1] + _MARK + x[0][1:], text)

  def _explain(self, error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(
      f"{FILE_NAME}: cannot be rendered: {shorten(reason)}; correct it, or the "
      "messages."
    )
