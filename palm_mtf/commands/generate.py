# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf generate`: continues texts with the newest checkpoint."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.commands.adapter import add_adapter
from palm_mtf.config import Config, DecodeConfig, RunConfig, mesh_layout
from palm_mtf.data.batches.packing import prompt_start
from palm_mtf.errors import UserError, check_library
from palm_mtf.generation.inference.kept_decoder import KeptDecoder, can_keep
from palm_mtf.generation.inference.prompts import (
  check_prompts,
  check_room,
  open_generator,
  read_prompts,
  warn_of_spaces,
)
from palm_mtf.json_text import STRICT_DECODER, json_text
from palm_mtf.machine.activation_dtype import is_slow, log_dtype, resolve_dtype
from palm_mtf.model_dir.foreign_files import read_regular
from palm_mtf.user_text import check_text, split_lines

if TYPE_CHECKING:  # the modules import TensorFlow, which takes seconds
  from palm_mtf.data.vocabulary.chat import ChatTemplate
  from palm_mtf.generation.inference.constraint import Grammar
  from palm_mtf.generation.inference.generator import Generator


_MOST_BYTES = 2**20  # of a schema


def generate(
  *,
  model_dir: str,
  config: Config,
  prompts: Sequence[str] | None = None,
  input_file: str | None = None,
  interactive: bool = False,
  chat: bool = False,
  json_schema: str | None = None,
  regex: str | None = None,
  adapter: str | None = None,
  as_json: bool = False,
) -> None:
  """Prints continuations of prompts, or answers in a conversation."""
  mesh, decode, run = config.mesh_layout, config.decode, config.run
  mesh_layout.check_layout(mesh, config.model)
  model = resolve_dtype(config.model, mesh)
  config = dataclasses.replace(config, model=model)
  texts, origin = _find_prompts(prompts, input_file, run)
  asks = interactive or chat or (not texts and sys.stdin.isatty())
  if asks and (prompts or input_file):
    raise UserError(
      f"--{'chat' if chat else 'interactive'}: asks for prompts; leave out "
      "--prompt and --input."
    )
  if chat and (as_json or decode.rows_per_prompt > 1):
    raise UserError(
      "--chat: prints one answer as text; leave out --json, and set "
      "NUM_SAMPLES and NUM_BEAMS to 1."
    )
  if not asks and not texts:
    raise UserError(
      "PROMPTS = []: give at least one text to continue, such as "
      "--prompt 'def main(', or --input FILE."
    )
  grammar = _read_grammar(json_schema, regex, decode)
  with contextlib.ExitStack() as stack:
    kept: list[KeptDecoder] = []

    def begin(checkpoint: Checkpoint) -> None:
      if not (adapter or grammar or is_slow(model, mesh)) and can_keep(config):
        kept.append(stack.enter_context(KeptDecoder(checkpoint, config)))

    checkpoint, vocabulary = open_newest(model_dir, config, begin)
    config, checkpoint = add_adapter(adapter, config, checkpoint)
    check_room(config.model, run)
    start_id = prompt_start(config.data, vocabulary)
    template = None
    if chat:
      from palm_mtf.data.vocabulary.chat import ChatTemplate

      template = ChatTemplate(vocabulary, start_id)

    def check(texts):
      check_prompts(texts, vocabulary, config.model, run, origin)

    def warn(texts):
      warn_of_spaces(texts, vocabulary, origin)

    given = [] if asks else texts
    check(given)
    _log_speed(config)
    warn(given)
    loaded = stack.enter_context(
      open_generator(checkpoint, config, vocabulary, grammar, *kept)
    )
    # If there is only one continuation, print tokens as they are generated.
    is_one = decode.rows_per_prompt == 1 and not as_json
    if template:
      _chat(loaded, template, config.model.text_length - run.sample_tokens)
    elif asks:
      _answer_stdin(loaded, check, warn, is_one, as_json)
    elif is_one and len(texts) == 1:
      _print_stream(loaded, texts[0])
    else:
      _print_all(loaded, texts, as_json)


def _log_speed(config: Config) -> None:
  model, mesh = config.model, config.mesh_layout
  log_dtype(model, mesh)
  if is_slow(model, mesh):  # only then import TensorFlow, which takes seconds
    from palm_mtf.executors.host.step_session import step_session_config
    from palm_mtf.rates.measure import warn_if_slow

    warn_if_slow(
      model, mesh, step_session_config(model, mesh, config.decode.weight_dtype)
    )


def _find_prompts(
  prompts: Sequence[str] | None, input_file: str | None, run: RunConfig
) -> tuple[Sequence[str], str]:
  """Returns prompts, and the flag or macro to name in errors about them."""
  if prompts and input_file:
    raise UserError("--prompt and --input: give one of them.")
  if prompts is not None:
    if not all(prompts):
      raise UserError(
        "--prompt = '': is empty; there has to be a text to continue."
      )
    return prompts, "--prompt"
  if input_file:
    return read_prompts(input_file), f"--input = {input_file!r}"
  return run.prompts, "PROMPTS"


def _read_grammar(
  schema_file: str | None, regex: str | None, decode: DecodeConfig
) -> "Grammar | None":
  """Returns the form that --json_schema or --regex asks for; None for any."""
  if schema_file is None and regex is None:
    return None
  given = f"--regex = {regex!r}"
  if schema_file is not None:
    given = f"--json_schema = {schema_file!r}"
  for name, value, off in (
    ("--regex", regex if schema_file is not None else None, None),
    ("NUM_BEAMS", decode.num_beams, 1),
    ("REPETITION_PENALTY", decode.repetition_penalty, 1.0),
  ):
    if value != off:
      raise UserError(
        f"{given} and {name} = {value!r}: cannot be used together; leave one "
        "out."
      )
  from palm_mtf.generation.serving.structure import json_rule, make_grammar

  check_library("llguidance", "json", given)
  if schema_file is None:
    from palm_mtf.generation.inference.grammar_process import regex_rule

    pattern = check_text(regex, given, "give a regular expression")
    return make_grammar(given, f"start: {regex_rule(pattern)}")
  try:
    content = read_regular(os.path.expanduser(schema_file), _MOST_BYTES)
    schema = STRICT_DECODER.decode(content.decode("utf-8-sig"))
  except OSError as error:
    raise UserError(f"{given}: {error.strerror}; give a file.") from None
  except (ValueError, RecursionError) as error:
    raise UserError(f"{given}: is not valid JSON: {error}; mend it.") from None
  if not isinstance(schema, dict | bool):
    raise UserError(f"{given}: is no JSON schema; give an object.")
  return make_grammar(given, f"start: {json_rule(schema)}")


def _print_stream(loaded: "Generator", prompt: str) -> None:
  pieces = loaded.stream(prompt)
  first = next(pieces, "")  # loads the weights; if that fails, prints nothing
  print(f"--- {prompt!r}\n{prompt}{first}", end="", flush=True)
  for piece in pieces:
    print(piece, end="", flush=True)
  print("\n", flush=True)


def _print_all(
  loaded: "Generator", prompts: Sequence[str], as_json: bool
) -> None:
  for prompt, results in zip(
    prompts, loaded.continuations(prompts), strict=True
  ):
    for number, result in enumerate(results):
      if as_json:
        record = {
          "prompt": prompt,
          "continuation": result.text,
          "sample": number,
          "num_tokens": result.num_tokens,
          "ended": result.ended,
          "score": result.score,  # only beam search gives a score
          "activation_dtype": loaded.activation_dtype,
        }
        found = {k: v for k, v in record.items() if v is not None}
        print(json_text(found))
      else:
        sample = f" ({number + 1})" if len(results) > 1 else ""
        print(f"--- {prompt!r}{sample}\n{prompt}{result.text}\n")


def _read_lines(ask: str) -> Iterator[str]:
  """Yields lines of stdin, until the end of stdin or an empty line."""
  while True:
    # Print `ask` to stderr, because stdout gets only what the model says.
    print(ask, end="", file=sys.stderr, flush=True)
    (line,) = split_lines(sys.stdin.readline())
    if not line:
      return
    yield line


def _answer_stdin(
  loaded: "Generator",
  check: Callable[[Sequence[str]], None],
  warn: Callable[[Sequence[str]], None],
  streams: bool,
  as_json: bool,
) -> None:
  """Prints continuations of each line of stdin."""
  print(
    "palm_mtf: type a text to continue; an empty line or Ctrl-D ends",
    file=sys.stderr,
  )
  for prompt in _read_lines("> "):
    try:
      check([prompt])
    except UserError as error:
      print(f"palm_mtf: {error}", file=sys.stderr)
      continue
    warn([prompt])
    if streams:
      _print_stream(loaded, prompt)
    else:
      _print_all(loaded, [prompt], as_json)


def _encode_message(
  template: "ChatTemplate",
  messages: Sequence[Mapping[str, str]],
  line: str,
  loaded: "Generator",
) -> list[int]:
  """Returns the tokens of a conversation and a message, with its passages."""

  def encode(text: str) -> list[int]:
    return template.encode([*messages, {"role": "user", "content": text}])

  return encode(loaded.put_passages(line, encode))


def _chat(loaded: "Generator", template: "ChatTemplate", most: int) -> None:
  """Answers each line of stdin; the model reads the whole conversation first.

  A line is refused if the conversation then has more than `most` tokens.
  """
  messages: list[dict[str, str]] = []
  for line in _read_lines("> " if sys.stdin.isatty() else ""):
    asked = [*messages, {"role": "user", "content": line}]
    try:
      ids = _encode_message(template, messages, line, loaded)
      if len(ids) > most:
        raise UserError(
          f"the conversation is {len(ids):,} tokens, and SEQUENCE_LENGTH less "
          f"SAMPLE_TOKENS is {most:,}: begin again, or set SAMPLE_TOKENS lower."
        )
    except UserError as error:
      print(f"palm_mtf: {error}", file=sys.stderr)
      continue
    answer = ""
    for piece in loaded.stream_tokens(ids):
      print(piece, end="", flush=True)
      answer += piece
    print(flush=True)
    messages = [*asked, {"role": "assistant", "content": answer}]
