# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates, which turn a conversation into the tokens of a prompt.

A template is a Jinja2 program, as in transformers and llama.cpp, in the file
chat_template.jinja in the vocabulary's folder. A control token's name becomes
the token's id if the template wrote the name. In a message, the name is encoded
like other characters, so that no message can end a turn.

A conversation gets the same ids as in another program:

  tokenizer.json       transformers, where flags of an added token, such as
                       `rstrip`, remove white space next to the token
  SentencePiece model  llama.cpp, which encodes the string after each control
                       token like the start of a text
"""

import collections
import functools
import importlib.util
import itertools
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from palm_mtf.data.sources.document import hash_parts
from palm_mtf.data.vocabulary import byte_pair
from palm_mtf.data.vocabulary.byte_pair import CONFIG, BytePairVocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError, shorten
from palm_mtf.json_text import json_text
from palm_mtf.machine.helper_process import HelperError, HelperProcess
from palm_mtf.model_dir.foreign_files import read_json_object, read_regular

FILE_NAME = "chat_template.jinja"
_MAX_BYTES = 10**6
# Names of the field with a message's reasoning. Clients and templates differ in
# the name, so a template gets the reasoning under several names.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Replaces characters that the template did not write, so that no control token
# is found in them: half of a surrogate pair, which no token's name contains.
_OTHER = "\ud800"
_TEMPLATE, _UNKNOWN = 1, 2
_PROBE = "text of the only part"
# A conversation in which the assistant calls a tool.
_ARGUMENTS = {_PROBE: 1}
_CALLING = (
  {"role": "user", "content": "x"},
  {
    "role": "assistant",
    "content": "",
    "tool_calls": [
      {
        "type": "function",
        "id": "0" * 9,
        "function": {"name": "f", "arguments": _ARGUMENTS},
      }
    ],
  },
)

MESSAGES_FORM = 'give [{"role": "user", "content": "..."}]'
_TOOLS_FORM = (
  'give [{"type": "function", "function": {"name": "...", "parameters": '
  "{...}}}]"
)
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MOST_TOOLS = 128  # as in OpenAI's API
_NO_VALUES: tuple[object, ...] = (None, "", [], {})
_ROLE = re.compile(r"\w{1,64}", re.ASCII)

# {"role": "user", "content": ...}. The content is a string, or a list of parts
# such as {"type": "text", "text": ...}.
Message = Mapping[str, Any]


def read_message(given: object, fields: Set[str]) -> Message:
  """Returns a message in OpenAI's form without fields that have no value.

  `fields` are those that the template reads; see ChatTemplate. Raises UserError
  if the message has another form or other fields.
  """
  message = given if isinstance(given, Mapping) else {}
  role, content = message.get("role"), message.get("content")
  if content is None and role == "assistant":
    content = ""
  if not isinstance(role, str) or not (isinstance(content, (str, list))):
    raise UserError(f"messages: {shorten(given)}: {MESSAGES_FORM}.")
  if not _ROLE.fullmatch(role):
    raise UserError(
      f"role = {shorten(role)}: give at most 64 letters, digits or _."
    )
  for part in content if isinstance(content, list) else ():
    found = part if isinstance(part, Mapping) else {}
    if found.get("type") != "text" or not isinstance(found.get("text"), str):
      raise UserError(
        f"messages: {shorten(part)}: is not supported as a part of a content; "
        'give {"type": "text", "text": "..."}.'
      )
  # Allow what changes nothing: empty fields, and a `name` equal to the role.
  others = {name: x for name, x in message.items() if x not in _NO_VALUES}
  read = {*fields, "role", "content"}
  # Clients number calls; most templates rely on the order of messages.
  ignored = {"tool_call_id", "name"} if role == "tool" else set()
  if others.get("name") == role:
    ignored.add("name")
  for name in ignored - read:
    others.pop(name, None)
  for name in others.keys() - read:
    raise UserError(
      f"messages: {shorten(name)}: the model's chat template does not read "
      "this field; leave it out."
    )
  return {**others, "role": role, "content": content}


def read_tools(
  given: object, variables: Set[str]
) -> dict[str, Mapping[str, Any]]:
  """Returns {name: function} of tools in OpenAI's form, or of None.

  `variables` are those that the template reads; see ChatTemplate. Raises
  UserError if the tools have another form, or the template ignores them.
  """
  tools = [] if given is None else given
  if not isinstance(tools, list) or len(tools) > _MOST_TOOLS:
    raise UserError(
      f"tools = {shorten(tools)}: {_TOOLS_FORM}, with at most {_MOST_TOOLS} "
      "tools."
    )
  functions = {x["name"]: x for x in map(_read_tool, tools)}
  if len(functions) < len(tools):
    raise UserError("tools: two functions have the same name; rename one.")
  if tools and "tools" not in variables:
    raise UserError(
      "tools: the model's chat template does not read them; leave them out."
    )
  return functions


def _read_tool(given: object) -> Mapping[str, Any]:
  """Returns the function of a tool."""
  tool = given if isinstance(given, Mapping) else {}
  found = tool.get("function")
  if (
    tool.get("type") != "function"
    or not isinstance(found, Mapping)
    or not isinstance(found.get("name"), str)
    or not isinstance(found.get("parameters"), Mapping | None)
  ):
    raise UserError(f"tools: {shorten(given)}: {_TOOLS_FORM}.")
  if not _NAME.fullmatch(found["name"]):
    raise UserError(
      f"tools: name = {shorten(found['name'])}: give at most 64 letters, "
      "digits, or any of _.-"
    )
  return found


def read_template(folder: str) -> str:
  """Returns the template in a vocabulary's folder; "" if there is none.

  Without chat_template.jinja, the template is in tokenizer_config.json, either
  as the only template or as the template "default" of several.

  Raises UserError if a file cannot be read.
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
  # JSON can hold half of a surrogate pair, which UTF-8 cannot encode.
  return (
    found.encode(errors="replace").decode() if isinstance(found, str) else ""
  )


def check_template(folder: str, what: str) -> None:
  """Raises UserError unless a vocabulary's folder has a template.

  `what` is the name of the conversations, for the message.
  """
  if not read_template(folder):
    raise UserError(
      f"{what}: has conversations, which a chat template turns into text; "
      f"write one to {os.path.join(folder, FILE_NAME)}, next to the "
      "vocabulary, or set VOCABULARY to that of an imported chat model."
    )


# Default for a request: so long may a client wait, even on a busy machine. The
# process itself limits its processor time to less.
MOST_SECS = 5.0


class ChatRenderer(HelperProcess):
  """A template, and the process that renders it and can be killed.

  Attributes:
    fields: names of the fields that the template may read in a message.
    variables: names of the variables that the template reads.
  """

  def __init__(self, template: str, most_secs: float = MOST_SECS):
    """Starts the process, which compiles the template.

    A rendering fails if it takes more than `most_secs` seconds. Raises
    HelperError if the template is damaged.
    """
    module = "palm_mtf.data.vocabulary.chat_process"
    super().__init__(module, {"template": template}, most_secs)
    self._most_secs = most_secs
    self.fields, self.variables = (
      frozenset(self.first_answer[x]) for x in ("fields", "variables")
    )

  def render(self, values: Mapping[str, Any]) -> tuple[str, list[list[int]]]:
    """Returns the rendered text, and its runs [origin, number of characters].

    An origin (MESSAGE, TEMPLATE or UNKNOWN) says who wrote the characters.

    Raises HelperError if the template raises an error, or needs too much time
    or memory.
    """
    found = self.ask(values, self._most_secs)
    return found["text"], found["origins"]


class ChatTemplate:
  """Encodes conversations with the template in a vocabulary's folder."""

  def __init__(
    self,
    vocabulary: Vocabulary,
    start_id: int | None,
    most_secs: float = MOST_SECS,
  ):
    """Reads the template, and starts the process that renders it.

    `start_id` is the token that starts each prompt; None for no token. A
    conversation may take `most_secs` seconds to be rendered. Raises
    UserError if there is no template, it is damaged, or jinja2 is missing.
    """
    folder = os.path.dirname(vocabulary.path)
    text = read_template(folder)
    if not text:
      raise UserError(
        f"{FILE_NAME}: is missing next to the vocabulary; import a model that "
        "has such a form of conversations, or write the file."
      )
    if importlib.util.find_spec("jinja2") is None:
      raise UserError(
        f"{FILE_NAME}: is rendered by jinja2, which is not installed: pip "
        "install 'palm_mtf[chat]'."
      )
    self.text, self._vocabulary, self._start_id = text, vocabulary, start_id
    pieces = {vocabulary.piece(i): i for i in range(vocabulary.size)}
    self._special = {"eos_token": vocabulary.piece(vocabulary.eod_id)}
    if start_id is not None:
      self._special["bos_token"] = vocabulary.piece(start_id)
    self._special |= vocabulary.special_tokens
    named = {*vocabulary.special_tokens.values()}
    is_json = isinstance(vocabulary, BytePairVocabulary)
    added = vocabulary.added_ids if is_json else frozenset()
    # Some files fail to mark a token such as <|user|> as special. So an added
    # token is a control token too if its name is in the template or has the
    # form <|...|>, unless the name is only words or spaces, as in messages.
    named |= {
      name
      for name, i in pieces.items()
      if i in added and (name in text or re.fullmatch(r"<\|.*\|>", name))
      if re.search(r"[^\w\s]", name)
    }
    self._controls = {
      name: i
      for name, i in pieces.items()
      if name and (name in named or vocabulary.is_control(i))
    }
    names = sorted(self._controls, key=len, reverse=True)
    self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
    self._encode = make_encoder(vocabulary, self._controls)
    try:
      self._renderer = ChatRenderer(text, most_secs)
    except HelperError as error:
      raise _explain(error) from None
    # The server refuses other fields, because the template would ignore them.
    self.fields = self._renderer.fields
    if not self.fields.isdisjoint(_REASONING):
      self.fields |= {*_REASONING}
    self.variables = self._renderer.variables  # that the template reads

  @property
  def fingerprint(self) -> str:
    """A hash of all but the vocabulary's ids that decides what is encoded."""
    ends = self._vocabulary.end_ids
    return hash_parts((self.text, self._start_id, self._special, ends))

  def encode(
    self,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    asks: bool = True,
  ) -> list[int]:
    """Returns the tokens of a conversation.

    With `asks`, the tokens go up to the start of an answer; otherwise, up to
    the end of the last message.

    `tools` are in OpenAI's form; see `read_tools`.

    With a tokenizer.json, only the template adds a start token, as in
    transformers. Otherwise a missing start token is added, as in llama.cpp.

    Raises UserError if the template refuses the messages, or needs too much
    time or memory, or a message holds half of a surrogate pair.
    """
    try:
      text, runs = self._renderer.render(self._values(messages, tools, asks))
    except HelperError as error:
      raise _explain(error) from None
    try:
      text.encode()
    except UnicodeEncodeError:
      raise UserError(
        "messages: hold half of a surrogate pair, which is not Unicode text; "
        "leave it out."
      ) from None
    own = _keep(text, runs, {_TEMPLATE})
    found = [*self._names.finditer(own)]
    traced = _keep(text, runs, {_TEMPLATE, _UNKNOWN})
    if len(self._names.findall(traced)) > len(found):
      raise _explain("it changes the name of a control token")
    ends = [0, *(x for each in found for x in each.span()), len(text)]
    parts: list[str | int] = [
      self._controls[own[begin:end]] if i % 2 else text[begin:end]
      for i, (begin, end) in enumerate(itertools.pairwise(ends))
    ]
    ids = self._encode([x for x in parts if x != ""])
    start = [] if self._start_id is None else [self._start_id]
    is_json = isinstance(self._vocabulary, BytePairVocabulary)
    if not (ids and is_json) and ids[:1] != start:
      ids = [*start, *ids]
    return ids or [
      self._vocabulary.eod_id
    ]  # because the model cannot read an empty prompt

  def _values(
    self,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    asks: bool = True,
  ) -> dict[str, Any]:
    """Returns the variables that transformers passes to a template."""
    return {
      "messages": [*map(self._read_message, messages)],
      "tools": tools,
      "documents": None,
      "add_generation_prompt": asks,
      **self._special,
    }

  def _read_message(self, message: Message) -> dict[str, Any]:
    found = {name: x for name, x in message.items() if x is not None}
    content = found.get("content")
    if isinstance(content, list) and not self._reads_parts:
      found["content"] = "\n".join(x.get("text", "") for x in content)
    if isinstance(found.get("tool_calls"), list):
      found["tool_calls"] = [
        _convert_arguments(x, self._reads_arguments)
        for x in found["tool_calls"]
      ]
    for name in _REASONING:
      if name in found:
        reasoning = found[name]
        return {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found

  @functools.cached_property
  def _reads_parts(self) -> bool:
    """Whether the template reads lists of parts; if not, it gets their text."""
    content = [{"type": "text", "text": _PROBE}]
    return self._reads(content, [{"role": "user", "content": content}])

  @functools.cached_property
  def _reads_arguments(self) -> bool:
    """Whether the template reads tool calls' arguments as objects, not JSON."""
    return self._reads(_ARGUMENTS, _CALLING)

  @functools.cached_property
  def call_example(self) -> str:
    """A conversation with a tool call, as text; "" if it cannot be rendered."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    try:
      return self._renderer.render(self._values(_CALLING, [tool]))[0]
    except HelperError:
      return ""

  def _reads(self, value: object, messages: Sequence[Message]) -> bool:
    """Whether the template takes `value`, a list or an object, apart.

    `value` holds the text _PROBE, and `messages` hold `value`. A template that
    expects a string either fails or writes all of `value` as Python prints it.
    """
    try:
      text, _ = self._renderer.render(
        {**self._values([]), "messages": messages}
      )
    except HelperError:
      return False
    return _PROBE in text and str(value) not in text


def _convert_arguments(call: Any, to_object: bool) -> Any:
  """Makes a tool call's arguments an object or, as OpenAI's clients, JSON."""
  try:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str) and to_object:
      arguments = json.loads(arguments)
  except (KeyError, TypeError, ValueError, RecursionError):
    return call
  if not isinstance(arguments, dict):
    return call
  if not to_object:
    arguments = json.dumps(arguments, ensure_ascii=False)
  return {**call, "function": {**call["function"], "arguments": arguments}}


def _keep(text: str, runs: Sequence[Sequence[int]], kept: set[int]) -> str:
  """Puts _OTHER in place of characters whose origin (writer) is not `kept`."""
  place, found = 0, ""
  for origin, length in runs:
    part = text[place : place + length]
    found += part if origin in kept else _OTHER * length
    place += length
  return found


def _explain(error: object) -> UserError:
  reason = " ".join(str(error).split())
  return UserError(
    f"{FILE_NAME}: cannot be rendered: {shorten(reason)}; correct it, or the "
    "messages."
  )


# A function from strings and ids of control tokens, in order, to token ids.
Encode = Callable[[Sequence[str | int]], list[int]]


def make_encoder(vocabulary: Vocabulary, controls: Mapping[str, int]) -> Encode:
  """Returns a function that encodes strings with control tokens between them.

  `controls` is {name: id} of these tokens. A name that occurs in a string is
  encoded like other characters.
  """
  if isinstance(vocabulary, BytePairVocabulary):
    return _make_byte_pair_encoder(vocabulary, controls)

  def encode(parts: Sequence[str | int]) -> list[int]:
    texts = [x for x in parts if isinstance(x, str)]
    encoded = iter(vocabulary.encode_batch(texts))
    return [
      i for x in parts for i in (next(encoded) if isinstance(x, str) else [x])
    ]

  return encode


def _make_byte_pair_encoder(
  vocabulary: BytePairVocabulary, controls: Mapping[str, int]
) -> Encode:
  import tokenizers

  # The library finds control tokens by their names, also in messages. So give
  # each control token a name that nobody can guess. Keep the name's first and
  # last characters, because the flag single_word depends on them.
  def rename(name: str) -> str:
    return name[0] + secrets.token_hex(16) + name[-1]

  names = {name: rename(name) for name in controls}
  described = json.loads(vocabulary.files()[byte_pair.FILE_NAME])
  model, added = described["model"], described["added_tokens"]
  model["vocab"] = {names.get(x, x): i for x, i in model["vocab"].items()}
  model["merges"] = [
    x for x in model["merges"] if not names.keys() & _merged(x)
  ]
  unknown = model.get("unk_token")
  model["unk_token"] = names.get(unknown, unknown)
  known = {x["content"] for x in added}
  added += [
    {"id": i, "content": name, **byte_pair.PLAIN_TOKEN}
    for name, i in controls.items()
    if name not in known
  ]
  described["added_tokens"] = [
    {**x, "content": names[x["content"]], "special": True}
    if x["content"] in names
    else x
    for x in added
  ]
  # These fields may refer to the old names, and are not needed here.
  described |= dict.fromkeys(("post_processor", "padding", "truncation"))
  made = tokenizers.Tokenizer.from_str(json_text(described))
  made.model.dropout = None  # no random merges
  name_of = {i: name for name, i in controls.items()}

  def encode(parts: Sequence[str | int]) -> list[int]:
    texts = [x if isinstance(x, str) else names[name_of[x]] for x in parts]
    found = made.encode("".join(texts), add_special_tokens=False)
    # The flag single_word may keep the library from finding a control token.
    # Then its real name is encoded as characters, as transformers does.
    pairs = zip(found.ids, found.offsets, strict=True)
    tokens = collections.deque(x for x in pairs if x[0] in name_of)
    changed, end = [*parts], 0
    for place, (part, text) in enumerate(zip(parts, texts, strict=True)):
      begin, end = end, end + len(text)
      while tokens and tokens[0][1][1] <= begin:
        tokens.popleft()
      is_found = tokens and tokens[0][0] == part and tokens[0][1][0] < end
      if not isinstance(part, str) and not is_found:
        changed[place] = name_of[part]
    return found.ids if changed == [*parts] else encode(changed)

  return encode


def _merged(merge: Any) -> set[str]:
  # Returns the three tokens of a merge, which is "a b" or ["a", "b"] in a file.
  parts = merge.split(" ") if isinstance(merge, str) else merge
  return {*parts, "".join(parts)}
