# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The k-shot form of a SeqIO task: exemplars stand before each input.

  few_shot_task("my_task", 2)  registers "my_task_2_shot", which makes of the
  example (inputs "Q: 5 + 4?\\nA:", targets " 9")

  inputs  "Q: 1 + 1?\\nA: 2\\n\\nQ: 3 + 4?\\nA: 7\\n\\nQ: 5 + 4?\\nA:"
  targets " 9"

Double line breaks stand between examples, and the output is cut at the first
one, as PaLM did (6). Features of an example that matter, if a task has them:

  record          the question of several options, which share their exemplars
  is_correct      whether the example may be an exemplar
  exemplar_group  exemplars come from the same group, such as MMLU's subject
  unconditional   whether its targets are scored without exemplars
"""

import bisect
import functools
import hashlib
import heapq
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf.data.sources.seqio_steps import apply_steps, split_at_tokenize
from palm_mtf.data.sources.seqio_task import find_provider, import_seqio
from palm_mtf.errors import UserError, check_count

_logger = logging.getLogger(__name__)

SEPARATOR = "\n\n"
# Examples that exemplars are drawn from, chosen by hash: enough that their
# choice does not matter, and few enough to keep.
_POOL = 1000


def few_shot_task(name: str, num_shots: int, seed: int = 0) -> str:
  """Registers the k-shot form of a SeqIO task or mixture, once.

  Args:
    name: name of a registered task, whose preprocessors end in SeqIO's
      `tokenize` and steps of tokens, or of a mixture of such tasks.
    num_shots: exemplars before each example; with 0 only the output is cut.
    seed: seed of the choice of exemplars.

  Returns:
    The name that is registered: "x_5_shot", or "x_5_shot_seed_7".

  Raises:
    UserError: no such task, a wrong number, or preprocessors that make no text.
  """
  seqio = import_seqio(name, "few_shot_task")
  task = find_provider(name, "few_shot_task")
  check_count("NUM_SHOTS", num_shots, 0)
  new_name = f"{name}_{num_shots}_shot" + (f"_seed_{seed}" if seed else "")
  tasks, mixtures = seqio.TaskRegistry, seqio.MixtureRegistry
  if new_name in {*tasks.names(), *mixtures.names()}:
    return new_name
  if isinstance(task, seqio.Mixture):
    rates = [
      (few_shot_task(each.name, num_shots, seed), float(task.get_rate(each)))
      for each in task.tasks
    ]
    mixtures.add(new_name, rates)
    return new_name
  to_text, to_ids = split_at_tokenize(task, seqio)
  if not to_ids:
    raise UserError(
      f"task {name!r} has no few-shot form: its preprocessors make no text; "
      "let them end in seqio.preprocessors.tokenize."
    )
  # Exemplars are added to texts, before `tokenize`, whatever the vocabulary.
  exemplars = Exemplars(task, to_text, num_shots, seed)
  add = [exemplars.add] if num_shots else []
  tasks.add_provider(
    new_name,
    task.replace(
      name=new_name,
      preprocessors=[*to_text, *add, *to_ids],
      postprocess_fn=functools.partial(_cut_output, task.postprocessor),
    ),
  )
  return new_name


def _ended(inputs: str, targets: str) -> str:
  """Returns inputs ready for targets, parted by white space or a line break."""
  parted = not inputs or inputs[-1].isspace() or targets[:1].isspace()
  return inputs if parted else f"{inputs}\n"


class _Exemplar(NamedTuple):
  key: str  # of its question
  group: str
  text: str  # inputs and targets


class Exemplars:
  """Solved examples of one task, to stand before others."""

  def __init__(
    self,
    task: Any,
    to_text: Sequence[Callable],
    num_shots: int,
    seed: int,
  ):
    """Reads nothing yet.

    Args:
      task: a `seqio.Task`.
      to_text: its preprocessors that make texts `inputs` and `targets`.
      num_shots: exemplars of each example.
      seed: seed of the choice.
    """
    self._task = task
    self._to_text = to_text
    self._num_shots = num_shots
    self._seed = seed

  def add(
    self,
    dataset: Any,
    sequence_length: Mapping[str, int] | None,
    output_features: Mapping[str, Any],
  ) -> Any:
    """Returns a tf.data.Dataset whose inputs begin with exemplars.

    Args:
      dataset: dataset of examples with texts `inputs` and `targets`.
      sequence_length: tokens by feature; "inputs" gives the context, of inputs
        and targets together; None for no limit.
      output_features: `seqio.Feature` by feature; "inputs" gives the vocabulary
        that counts tokens.
    """
    from palm_mtf._tf import tf

    limit = (sequence_length or {}).get("inputs")
    encode = output_features["inputs"].vocabulary.encode if limit else None

    def fits(inputs: str, targets: str) -> bool:
      return limit is None or len(encode(inputs) + encode(targets)) <= limit

    return tf.data.Dataset.from_generator(
      lambda: self._with_exemplars(dataset, fits, limit),
      output_signature=dataset.element_spec,
    )

  def _with_exemplars(
    self, dataset: Any, fits: Callable[[str, str], bool], limit: int | None
  ) -> Iterator[dict]:
    fewest, num_short, num_questions = self._num_shots, 0, 0
    # Options of a question follow each other, and get the same exemplars: as
    # many of the first ones as fit before each option.
    for key, group in itertools.groupby(dataset, _key):
      examples = list(group)
      asked = [e for e in examples if not e.get("unconditional", False)]
      shots = self._draw(key, _group(examples[0]))
      count = min(
        (_how_many(shots, example, fits) for example in asked),
        default=self._num_shots,
      )
      num_questions += 1
      if count < self._num_shots:
        fewest, num_short = min(fewest, count), num_short + 1
      for example in examples:
        inputs = _inputs(example)
        if not example.get("unconditional", False):
          inputs = _assemble(shots[:count], inputs)
        yield {**example, "inputs": inputs}
    if num_short:
      _logger.warning(
        f"{self._task.name}: {num_short:,} of {num_questions:,} questions have "
        f"fewer than {self._num_shots} exemplars, at least {fewest}: no more "
        f"fit into {limit:,} tokens."
      )

  def _draw(self, key: str, group: str) -> list[str]:
    """Returns the texts of the exemplars of one question."""
    # PaLM does not say how it chose exemplars. Here each question gets its own:
    # by hashes, the same in every order, machine and process. Never itself, so
    # that a task without a training split can take them from the same split.
    candidates = [e for e in self._pool if e.group == group and e.key != key]
    if len(candidates) < self._num_shots:
      where = f" of {group!r}" if group else ""
      raise UserError(
        f"{self._task.name}: NUM_SHOTS = {self._num_shots}, but split "
        f"{self._split!r} has only {len(candidates)} other examples{where}; "
        "give a smaller number."
      )
    drawn = heapq.nsmallest(
      self._num_shots, candidates, key=lambda e: self._hash(key, e.key)
    )
    return [exemplar.text for exemplar in drawn]

  @functools.cached_property
  def _split(self) -> str:
    splits = list(self._task.splits)
    return next(
      (name for name in ("train", "validation", "test") if name in splits),
      splits[0],
    )

  @functools.cached_property
  def _pool(self) -> list[_Exemplar]:
    """The candidates, one for each question, read once."""
    chosen = heapq.nsmallest(
      _POOL, self._solved(), key=lambda e: self._hash(e.key, e.text)
    )
    return list({exemplar.key: exemplar for exemplar in chosen}.values())

  def _solved(self) -> Iterator[_Exemplar]:
    dataset = apply_steps(
      self._task,
      self._to_text,
      split=self._split,
      sequence_length=None,
      seqio=import_seqio(self._task.name, "few_shot_task"),
    )
    for example in dataset:
      # Of the options of a question the right one alone shows how to solve it.
      if example.get("is_correct", True) and not example.get("unconditional"):
        text = _inputs(example) + _text(example["targets"])
        yield _Exemplar(_key(example), _group(example), text)

  def _hash(self, *texts: str) -> bytes:
    """Returns the place of a candidate: as if at random, always the same."""
    # With lengths, so that ("ab", "c") and ("a", "bc") differ.
    digest = hashlib.blake2b(digest_size=8)
    for text in (str(self._seed), *texts):
      digest.update(f"{len(text)} {text}".encode())
    return digest.digest()


def _key(example: Mapping[str, Any]) -> str:
  return _text(example.get("record", example["inputs"]))


def _group(example: Mapping[str, Any]) -> str:
  return _text(example["exemplar_group"]) if "exemplar_group" in example else ""


def _inputs(example: Mapping[str, Any]) -> str:
  return _ended(_text(example["inputs"]), _text(example["targets"]))


def _text(value: Any) -> str:
  return value.numpy().decode("utf-8", "replace")


def _assemble(shots: Sequence[str], inputs: str) -> str:
  return SEPARATOR.join([*(shot.strip("\n") for shot in shots), inputs])


def _how_many(
  shots: Sequence[str],
  example: Mapping[str, Any],
  fits: Callable[[str, str], bool],
) -> int:
  """Returns the number of the first exemplars that fit before an example."""
  inputs, targets = _inputs(example), _text(example["targets"])

  def fit(count: int) -> bool:
    return fits(_assemble(shots[:count], inputs), targets)

  if fit(len(shots)):
    return len(shots)
  # By bisection: one fewer than the least number of exemplars that do not fit.
  too_many = bisect.bisect_left(
    range(len(shots)), True, lo=1, key=lambda count: not fit(count)
  )
  return too_many - 1


def _cut_output(
  postprocess: Callable | None,
  output: Any,
  *,
  is_target: bool = False,
  **keywords: Any,
) -> Any:
  """Returns the output up to the separator, postprocessed by the task."""
  # A model goes on with questions of its own, in the form of the exemplars.
  if not is_target and isinstance(output, str):
    output = output.partition(SEPARATOR)[0]
  elif not is_target and isinstance(output, list):  # several samples
    output = [text.partition(SEPARATOR)[0] for text in output]
  if postprocess is None:
    return output
  return postprocess(output, is_target=is_target, **keywords)
