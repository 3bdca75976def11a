# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Any SeqIO task in its k-shot form: solved examples stand before each input.

  few_shot_task("my_task", 2)  registers "my_task_2_shot", which makes of the
  example (inputs "Q: 5 + 4?\\nA:", targets " 9")

  inputs  "Q: 1 + 1?\\nA: 2\\n\\nQ: 3 + 4?\\nA: 7\\n\\nQ: 5 + 4?\\nA:"
  targets " 9"

Double line breaks stand between examples, and the output is cut at the first
one, as PaLM did (6). PaLM does not say how it chose exemplars. Here each
example gets its own ones, drawn from the training split by hashes: they depend
on the seed and the texts alone, not on order, machine or process. An example
never sees itself, so that a task without a training split can lend its
exemplars from another one.

Where not all of them fit into the context together with inputs and targets, the
first that do are taken, as many for each option of a question; how often that
was is said at the end.

Three features of an example matter if the task has them: `record` names the
question that several examples belong to (options of one question get the same
exemplars); only what `is_correct` is an exemplar; `exemplar_group` must be that
of the exemplars (such as the subject of MMLU). An example that is
`unconditional` gets none: it asks how likely its targets are anyway.
"""

import bisect
import functools
import hashlib
import heapq
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf.data.sources.seqio_steps import steps_to_run
from palm_mtf.errors import UserError, check_count, did_you_mean

_logger = logging.getLogger(__name__)

SEPARATOR = "\n\n"
# Exemplars are drawn from this many examples of the training split, chosen by
# hash: enough that their choice does not matter, and few enough to keep.
_POOL = 1000


def few_shot_task(name: str, num_shots: int, seed: int = 0) -> str:
  """Registers the k-shot form of a SeqIO task or mixture, once.

  Args:
    name: name of a registered task, whose preprocessors end in SeqIO's
      `tokenize` and steps of tokens, or of a mixture of such tasks.
    num_shots: exemplars before each example; with 0 only the output is cut.
    seed: another seed, other exemplars.

  Returns:
    The name that is registered: "x_5_shot", or "x_5_shot_seed_7".

  Raises:
    UserError: no such task, a wrong number, or preprocessors that make no text.
  """
  seqio = _import_seqio()
  check_count("NUM_SHOTS", num_shots, 0)
  new_name = f"{name}_{num_shots}_shot" + (f"_seed_{seed}" if seed else "")
  tasks, mixtures = seqio.TaskRegistry, seqio.MixtureRegistry
  known = {*tasks.names(), *mixtures.names()}
  if name not in known:
    raise UserError(
      f"no SeqIO task or mixture {name!r} is registered"
      f"{did_you_mean(name, known)}; import the module that registers it."
    )
  if new_name in known:
    return new_name
  if name in mixtures.names():
    mixture = mixtures.get(name)
    rates = [
      (few_shot_task(task.name, num_shots, seed), float(mixture.get_rate(task)))
      for task in mixture.tasks
    ]
    mixtures.add(new_name, rates)
    return new_name
  task = tasks.get(name)
  steps = [
    step
    for step in task.preprocessors
    if not isinstance(step, seqio.CacheDatasetPlaceholder)
  ]
  to_text = steps_to_run(task, seqio)
  if len(to_text) == len(steps):
    raise UserError(
      f"task {name!r} has no few-shot form: its preprocessors make no text; "
      "let them end in seqio.preprocessors.tokenize."
    )
  exemplars = Exemplars(task, to_text, num_shots, seed)
  add = [exemplars.add] if num_shots else []
  tasks.add_provider(
    new_name,
    task.replace(
      name=new_name,
      preprocessors=[*to_text, *add, *steps[len(to_text) :]],
      postprocess_fn=functools.partial(_cut_output, task.postprocessor),
    ),
  )
  return new_name


def _ended(inputs: str, targets: str) -> str:
  """Returns inputs ready for targets: a line break where no white space is."""
  parted = not inputs or inputs[-1].isspace() or targets[:1].isspace()
  return inputs if parted else f"{inputs}\n"


class _Exemplar(NamedTuple):
  key: str
  group: str
  text: str


class Exemplars:
  """Solved examples of one task, and how they get before others."""

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
      num_shots: how many each example gets.
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
      sequence_length: lengths by feature; that of "inputs" is the context's:
        tokens of inputs and targets; None if there may be any number.
      output_features: `seqio.Feature` of "inputs", whose vocabulary counts.
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
    """The candidates, one for each question."""
    chosen = heapq.nsmallest(
      _POOL, self._solved(), key=lambda e: self._hash(e.key, e.text)
    )
    return list({exemplar.key: exemplar for exemplar in chosen}.values())

  def _solved(self) -> Iterator[_Exemplar]:
    seqio = _import_seqio()
    dataset = self._task.source.get_dataset(split=self._split, shuffle=False)
    with seqio.map_seed_manager(0):
      for step in self._to_text:
        dataset = seqio.add_kwargs_to_transform(
          step, sequence_length=None, output_features=self._task.output_features
        )(dataset)
    for example in dataset:
      if not example.get("is_correct", True):
        continue
      if example.get("unconditional", False):
        continue
      text = _inputs(example) + _text(example["targets"])
      yield _Exemplar(_key(example), _group(example), text)

  def _hash(self, *texts: str) -> bytes:
    """Returns what orders candidates: as good as random, always the same."""
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
  """Returns how many of the first exemplars fit before an example."""
  inputs, targets = _inputs(example), _text(example["targets"])

  def fit(count: int) -> bool:
    return fits(_assemble(shots[:count], inputs), targets)

  if fit(len(shots)):
    return len(shots)
  # One fewer than the least number of exemplars that do not fit.
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
  """Cuts what the model wrote, then does what the task does with it."""
  if not is_target and isinstance(output, str):
    output = output.partition(SEPARATOR)[0]
  elif not is_target and isinstance(output, list):  # several samples
    output = [text.partition(SEPARATOR)[0] for text in output]
  if postprocess is None:
    return output
  return postprocess(output, is_target=is_target, **keywords)


def _import_seqio() -> Any:
  from palm_mtf import _tf  # noqa: F401  first: it holds back what is written

  try:
    import seqio
  except ImportError as error:
    raise UserError(f"SeqIO cannot be imported: {error}.") from error
  return seqio
