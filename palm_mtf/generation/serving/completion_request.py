# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the body of a request for completions, or for an answer.

A conversation in OpenAI's form is answered as the completion of one prompt.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf.config import DecodeConfig
from palm_mtf.data.vocabulary.chat import (
  MESSAGES_FORM,
  ChatTemplate,
  read_message,
)
from palm_mtf.errors import (
  UserError,
  are_texts,
  check_count,
  check_real,
  did_you_mean,
  shorten,
)
from palm_mtf.generation.inference.constraint import Grammar
from palm_mtf.generation.serving.adapters import NamedAdapter
from palm_mtf.generation.serving.structure import read_grammar
from palm_mtf.generation.serving.tools import Tools, take_tools
from palm_mtf.retrieval.passages import Passages

MOST_LOG_PROBS = 5  # as in OpenAI's API
_MOST_STOPS = 4  # as in OpenAI's API
_MOST_STOP_CHARACTERS = 1000  # per text, which is searched after each token
# Fields of OpenAI's API and of vLLM that are not supported. Only these values,
# which have no effect, are accepted.
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
  "add_generation_prompt": (True,),
  "best_of": (1,),
  "chat_template_kwargs": ({},),
  "frequency_penalty": (0,),
  "function_call": ("none", "auto"),
  "functions": ([],),
  "ignore_eos": (False,),
  "logit_bias": ({},),
  "min_p": (0,),
  "modalities": (["text"],),
  "parallel_tool_calls": (True, False),  # no effect without tools
  "presence_penalty": (0,),
  "reasoning_effort": ("none", "medium"),
  "repetition_penalty": (1,),
  "service_tier": ("auto", "default"),
  "skip_special_tokens": (True,),
  "stop_token_ids": ([],),
  "store": (False,),
  "suffix": ("",),
  "tool_choice": ("none", "auto"),
  "tools": ([],),
  "top_logprobs": (0,),
  "verbosity": ("medium",),
}
# Ignored names that clients give to requests. The server checks "model".
_IGNORED = "metadata model prompt_cache_key safety_identifier user".split()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CompletionRequest:
  """A request like OpenAI's /v1/completions; compared by identity."""

  prompts: Sequence[str | Sequence[int]]  # texts, or lists of token ids
  max_tokens: int  # maximum number of tokens per completion; 0 only with `echo`
  temperature: float  # temperature of sampling; 0 takes the likeliest token
  top_p: float  # total probability of the likeliest tokens to draw from
  top_k: int | None  # number of likeliest tokens to draw from; None for all
  n: int  # number of completions per prompt
  stop: Sequence[str]  # a completion ends where the first of these texts begins
  seed: int
  # Number of likeliest tokens whose log-probabilities the answer lists for each
  # token; None to list none.
  logprobs: int | None
  echo: bool  # whether the answer repeats the prompt before its completion
  stream: bool  # whether the text is sent piece by piece
  include_usage: bool  # whether a stream ends with its token counts
  grammar: Grammar | None  # the form of each completion; None for any text
  # Whether `prompts` is one conversation; its ids include any start token.
  is_chat: bool = False
  tools: Tools | None = None  # functions whose calls are read from an answer
  adapter: NamedAdapter | None = None  # None for the base

  @property
  def wants_log_probs(self) -> bool:
    """Whether the answer lists log-probabilities."""
    return self.logprobs is not None

  @property
  def num_rows(self) -> int:
    """Number of completions over all prompts."""
    return len(self.prompts) * self.n

  @property
  def adapter_number(self) -> int:
    """Number of the adapter in a decoder; 0 for none."""
    return self.adapter.adapter.number if self.adapter else 0


def read_completion_request(
  body: object,
  decode: DecodeConfig,
  *,
  sample_tokens: int,
  seed: int,
  tools: Tools | None = None,
) -> CompletionRequest:
  """Reads and checks the fields of a request's body, as parsed from JSON.

  Defaults of fields come from the run: `decode`, `sample_tokens` (max_tokens)
  and `seed`. `tools` are those of a conversation.

  Raises UserError if a field is wrong or unknown.
  """
  if not isinstance(body, Mapping):
    raise UserError('the body is no JSON object: give {"prompt": "..."}.')
  given = {name: x for name, x in body.items() if x is not None}
  _check_names(given)
  values = {
    "max_tokens": sample_tokens,
    "temperature": decode.temperature,
    "top_p": decode.top_p,
    "top_k": decode.top_k,
    "n": 1,
    "stop": list(decode.stop_strings),
    "seed": seed,
    "logprobs": None,
    "echo": False,
    "stream": False,
    "stream_options": {},
  }
  values.update({name: x for name, x in given.items() if name in values})
  if "prompt" not in given:
    raise UserError("prompt is missing: give a text to continue.")
  _check_values(values)
  if "stop" in given:
    values["stop"] = _read_stop(given["stop"])
  grammar = read_grammar(given)
  if tools and grammar:
    raise UserError(f"{grammar.field}: does not go with tools; leave one out.")
  if tools:
    grammar = tools.grammar
  if grammar:
    # A stop string could cut the text, which would not have its form.
    if given.get("stop"):
      raise UserError(
        f"stop: ends a text anywhere; leave it out with {grammar.field}."
      )
    values["stop"] = []
  options = values.pop("stream_options")
  return CompletionRequest(
    **{
      **values,
      "prompts": _read_prompts(given["prompt"]),
      "include_usage": options.get("include_usage", False),
      "grammar": grammar,
      "tools": tools,
    }
  )


def _check_names(given: Mapping[str, object]) -> None:
  for name, value in given.items():
    if name in _WITHOUT_EFFECT:
      if value not in _WITHOUT_EFFECT[name]:
        raise UserError(
          f"{name} = {shorten(value)}: is not supported; leave it out."
        )
    elif name not in _FIELDS and name not in _IGNORED:
      guess = did_you_mean(name, _FIELDS)
      raise UserError(f"unknown field {shorten(name)}{guess}.")


_FIELDS = (
  *(x.name for x in dataclasses.fields(CompletionRequest)[1:-5]),
  "prompt",
  "response_format",
  "stream_options",
  "structured_outputs",
)


def _check_values(values: Mapping[str, object]) -> None:
  for name in ("echo", "stream"):
    if not isinstance(values[name], bool):
      raise UserError(f"{name} = {shorten(values[name])}: give true or false.")
  check_count("max_tokens", values["max_tokens"], 0)
  if not values["max_tokens"] and not values["echo"]:
    raise UserError("max_tokens = 0: give at least 1, or echo = true.")
  check_real("temperature", values["temperature"], 0.0, 100.0)
  check_real("top_p", values["top_p"], 0.0, 1.0)
  if values["top_p"] == 0:
    raise UserError("top_p = 0: give a number above 0, or temperature = 0.")
  if values["top_k"] is not None:
    check_count("top_k", values["top_k"])
  check_count("n", values["n"])
  check_count("seed", values["seed"], 0)
  if values["logprobs"] is not None:
    check_count("logprobs", values["logprobs"], 0, MOST_LOG_PROBS)
  options = values["stream_options"]
  if not (
    isinstance(options, Mapping)
    and set(options) <= {"include_usage", "include_obfuscation"}
    and isinstance(options.get("include_usage", False), bool)
    and not options.get("include_obfuscation")
  ):
    raise UserError(
      f'stream_options = {shorten(options)}: give {{"include_usage": true}}.'
    )


def _read_stop(given: object) -> Sequence[str]:
  # Reads a client's stop strings. The run's STOP_STRINGS, which apply without a
  # field `stop`, are not limited, because no client can choose them.
  stops = [given] if isinstance(given, str) else given
  if not are_texts(stops):
    raise UserError(
      f"stop = {shorten(given)}: give a text, or a list of texts."
    )
  for each in stops:
    try:
      each.encode()
    except UnicodeEncodeError:
      raise UserError(
        f"stop = {shorten(each)}: has half of a surrogate pair, which is not a "
        "character; leave it out."
      ) from None
  if len(stops) > _MOST_STOPS:
    raise UserError(f"stop: {len(stops):,} texts; give at most {_MOST_STOPS}.")
  if max(map(len, stops), default=0) > _MOST_STOP_CHARACTERS:
    raise UserError(
      f"stop: a text of {max(map(len, stops)):,} characters; give at most "
      f"{_MOST_STOP_CHARACTERS:,}."
    )
  return stops


def _read_prompts(given: object) -> list[str | list[int]]:
  if isinstance(given, str) or _are_ids(given):
    return [given]
  if (
    isinstance(given, list)
    and given
    and all(isinstance(x, str) or _are_ids(x) for x in given)
  ):
    return given
  raise UserError(
    "prompt: give a text, a list of token ids, or a list of such prompts."
  )


def _are_ids(x: object) -> bool:
  return isinstance(x, list) and bool(x) and all(type(i) is int for i in x)


def make_completion_body(
  body: object,
  template: ChatTemplate,
  passages: Passages | None = None,
  *,
  default_tokens: int = 0,
  most_messages: int,
  most_characters: float,
) -> tuple[object, Tools | None]:
  """Returns the body of the completion that answers a conversation; its tools.

  Raises UserError if messages are missing or wrong, or are more than
  `most_messages`, or have more than `most_characters` characters; or if a field
  is not supported.
  """
  if not isinstance(body, Mapping):
    return body, None
  for name in ("prompt", "echo", "logprobs"):
    if body.get(name):
      raise UserError(f"{name}: is not supported here; leave it out.")
  fields = {name: x for name, x in body.items() if name != "logprobs"}
  messages, most = (
    fields.pop(name, None) for name in ("messages", "max_completion_tokens")
  )
  if not isinstance(messages, list) or not messages:
    raise UserError(f"messages = {shorten(messages)}: {MESSAGES_FORM}.")
  messages = [read_message(x, template.fields) for x in messages]
  tools = take_tools(fields, template)
  described = tools and tools.described
  measured = [*messages, {"tools": described}]
  size = sum(len(text) for each in measured for text in _texts(each))
  # Each message takes at least one token, so SEQUENCE_LENGTH limits both.
  if len(messages) > most_messages or size > most_characters:
    raise UserError("messages: are longer than SEQUENCE_LENGTH; shorten them.")
  fields |= {} if most is None else {"max_tokens": most}
  *earlier, last = messages
  if (
    passages and isinstance(last.get("content"), str) and last["role"] == "user"
  ):
    tokens = fields.get("max_tokens") or default_tokens
    room = most_messages - (tokens if isinstance(tokens, int) else 0)

    def fits(text: str) -> bool:
      asked = [*earlier, {**last, "content": text}]
      return len(template.encode(asked, described)) <= room

    content = passages.put_before(last["content"], fits)
    messages = [*earlier, {**last, "content": content}]
  return {**fields, "prompt": template.encode(messages, described)}, tools


def _texts(message: Mapping[str, object]) -> Iterator[str]:
  """Yields a message's texts that may become tokens, to measure its length."""
  found = [x for name, x in message.items() if name != "role"]
  while found:
    each = found.pop()
    if isinstance(each, str) and each not in ("type", "text"):
      yield each
    elif isinstance(each, Mapping):
      found += (x for field in each.items() for x in field)
    elif isinstance(each, list):
      found += each


def as_message(
  choice: Mapping[str, object],
  calls: Sequence[Mapping[str, object]] = (),
  *,
  is_part: bool,
  is_first: bool,
) -> dict[str, object]:
  """Converts an element of "choices" to the form of a chat completion.

  Args:
    choice: a completion's text and fields or, in a stream, a part of them.
    calls: calls of tools that end the answer.
    is_part: whether `choice` is such a part, which the API calls "delta".
    is_first: whether the text begins the answer; then the role is given, too.
  """
  role = {"role": "assistant"} if is_first else {}
  others = {name: x for name, x in choice.items() if name != "text"}
  message = {**role, "content": choice["text"]}
  if calls:
    message["content"] = choice["text"] or None
    message["tool_calls"] = [
      {"index": i, **x} if is_part else x for i, x in enumerate(calls)
    ]
    others["finish_reason"] = "tool_calls"
  return {**others, "delta" if is_part else "message": message}
