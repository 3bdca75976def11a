# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf generate`: what the newest checkpoint adds to texts."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from palm_mtf import layout
from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.checkpoints import (
  Checkpoint,
  check_same_model,
  newest_checkpoint,
)
from palm_mtf.config import AdafactorConfig, DataConfig, PalmConfig, RunConfig
from palm_mtf.console import say
from palm_mtf.data.vocabulary import Vocabulary, load_vocabulary
from palm_mtf.decode_config import DecodeConfig
from palm_mtf.disk import check_model_dir
from palm_mtf.errors import UserError
from palm_mtf.layout import MeshLayout
from palm_mtf.machine.activation_dtype import resolved
from palm_mtf.prompts import check_prompts, check_room, read_prompts

if TYPE_CHECKING:  # imports TensorFlow, which the checks do not need
  from palm_mtf.generation import Continuation, Generator


def generate(
  *,
  model_dir: str,
  model: PalmConfig,
  mesh: MeshLayout,
  optimizer: AdafactorConfig,
  data: DataConfig,
  run: RunConfig,
  decode: DecodeConfig,
  prompts: Sequence[str] | None = None,
  input_file: str | None = None,
  interactive: bool = False,
  as_json: bool = False,
) -> None:
  """Prints continuations of texts.

  The texts are `prompts`, the lines of `input_file`, `run.prompts`, or what is
  typed at a terminal: the first of these that there are.

  Args:
    model_dir: of a training run.
    model: the architecture.
    mesh: devices and layout rules.
    optimizer: unused; a recipe is the same for every command.
    data: the vocabulary is read.
    run: prompts, sample_tokens and seed are read.
    decode: how tokens are chosen.
    prompts: texts.
    input_file: of prompts, one a line.
    interactive: ask for prompts, whatever else there is.
    as_json: print one JSON object a continuation instead of text for people.

  Raises:
    UserError: there is no checkpoint or no prompt, the checkpoint is of another
      model, or a prompt is too long.
  """
  del optimizer
  check_model_dir(model_dir)
  layout.check(mesh, model)
  model = resolved(model, mesh)
  texts, origin = _find_prompts(prompts, input_file, run)
  asks = interactive or (not texts and sys.stdin.isatty())
  if asks and (prompts or input_file):
    raise UserError(
      "--interactive: asks for prompts; leave out --prompt and --input."
    )
  if not asks and not texts:
    raise UserError(
      "PROMPTS = []: give at least one text to continue, such as "
      "--prompt 'def main(', or --input FILE."
    )
  shapes = parameter_shapes(model)
  checkpoint = newest_checkpoint(model_dir, shapes)
  vocabulary = load_vocabulary(model_dir, data, vocab_size=model.vocab_size)
  check_same_model(checkpoint, shapes, vocabulary.sha256)
  check_room(model, run)

  def check(texts):
    check_prompts(texts, vocabulary, model, run, origin)

  if not asks:
    check(texts)
  # All input is known to be good; TensorFlow takes seconds.
  from palm_mtf.dtype_speed import warn_if_slow
  from palm_mtf.loaded_decoder import step_session_config

  warn_if_slow(
    model, mesh, step_session_config(model, mesh, decode.weight_dtype)
  )
  with _generator(checkpoint, model, mesh, vocabulary, decode, run) as loaded:
    is_one = decode.rows_per_prompt == 1 and not as_json
    if asks:
      _answer(loaded, check, is_one, as_json)
    elif is_one and len(texts) == 1:
      _print_stream(loaded, texts[0])
    else:
      _print_all(loaded, texts, as_json)


def continue_prompts(
  checkpoint: Checkpoint,
  model: PalmConfig,
  mesh: MeshLayout,
  vocabulary: Vocabulary,
  run: RunConfig,
) -> list[str]:
  """Returns what the model of `checkpoint` adds to each of `run.prompts`."""
  if not run.prompts:
    return []
  decode = DecodeConfig()
  with _generator(checkpoint, model, mesh, vocabulary, decode, run) as loaded:
    return [each.text for (each,) in loaded.continuations(run.prompts)]


def _find_prompts(
  prompts: Sequence[str] | None, input_file: str | None, run: RunConfig
) -> tuple[Sequence[str], str]:
  """Returns the texts to continue and what the user calls them."""
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


@contextlib.contextmanager
def _generator(
  checkpoint: Checkpoint,
  model: PalmConfig,
  mesh: MeshLayout,
  vocabulary: Vocabulary,
  decode: DecodeConfig,
  run: RunConfig,
) -> Iterator["Generator"]:
  from palm_mtf.generation import Generator
  from palm_mtf.loaded_decoder import LoadedDecoder

  with LoadedDecoder(
    checkpoint, model, mesh, decode.weight_dtype, for_steps=True
  ) as loaded:
    yield Generator(
      loaded,
      vocabulary,
      decode,
      sample_tokens=run.sample_tokens,
      seed=run.seed,
    )


def _print_stream(loaded: "Generator", prompt: str) -> None:
  print(f"--- {prompt!r}\n{prompt}", end="", flush=True)
  for piece in loaded.stream(prompt):
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
        print(json.dumps(_record(prompt, number, result)))
      else:
        sample = f" ({number + 1})" if len(results) > 1 else ""
        print(f"--- {prompt!r}{sample}\n{prompt}{result.text}\n")


def _record(prompt: str, number: int, result: "Continuation") -> dict:
  record = {"prompt": prompt, "continuation": result.text, "sample": number}
  fields = dataclasses.asdict(result)
  for name in ("num_tokens", "ended", "score"):
    if fields[name] is not None:
      record[name] = fields[name]
  return record


def _answer(
  loaded: "Generator",
  check: Callable[[Sequence[str]], None],
  streams: bool,
  as_json: bool,
) -> None:
  """Continues each line of stdin until it ends."""
  say("type a text to continue; an empty line or Ctrl-D ends")
  while True:
    print("> ", end="", file=sys.stderr, flush=True)
    prompt = sys.stdin.readline().rstrip("\n")
    if not prompt:
      return
    try:
      check([prompt])
    except UserError as error:
      say(str(error))
      continue
    if streams:
      _print_stream(loaded, prompt)
    else:
      _print_all(loaded, [prompt], as_json)
