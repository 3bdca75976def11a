# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The k-shot form of a SeqIO task: exemplars stand before each input.

  few_shot_task("my_task", 2)  registers "my_task_2_shot", which makes of the
  example (inputs "Q: 5 + 4?\\nA:", targets " 9")

  inputs  "Q: 1 + 1?\\nA: 2\\n\\nQ: 3 + 4?\\nA: 7\\n\\nQ: 5 + 4?\\nA:"
  targets " 9"

Double line breaks stand between examples, and the output is cut at the first
one, as PaLM did (6). exemplars.py says which examples are exemplars. A header
of PROMPT_HEADERS stands before the first one, with a double line break.
"""

import bisect
import functools
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from palm_mtf.config import TaskEvalConfig
from palm_mtf.config.task_eval import FIRST, FewShotConfig
from palm_mtf.data.sources.seqio_steps import split_at_tokenize
from palm_mtf.data.sources.seqio_task import find_provider, import_seqio
from palm_mtf.errors import UserError
from palm_mtf.evaluation.exemplars import (
  SEPARATOR,
  Exemplars,
  SplitExemplars,
  group_of,
  inputs_of,
  key_of,
  read_exemplars,
  text_of,
)
from palm_mtf.user_text import format_of

_logger = logging.getLogger(__name__)


def few_shot_task(name: str, num_shots: int, seed: int = 0) -> str:
  """Registers the k-shot form of a SeqIO task or mixture, once.

  Args:
    name: name of a registered task, whose preprocessors end in SeqIO's
      `tokenize` and steps of tokens, or of a mixture of such tasks.
    num_shots: exemplars before each example, drawn from the training split;
      with 0 only the output is cut.
    seed: seed of the draw.

  Returns:
    The name that is registered: "x_5_shot", or "x_5_shot_seed_7".

  Raises:
    UserError: no such task, a wrong number, or preprocessors that make no text.
  """
  seqio = import_seqio(name, "few_shot_task")
  task = find_provider(name, "few_shot_task")
  config = FewShotConfig(num_shots=num_shots, seed=seed)
  new_name = _name_of_form(name, config)
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
  tasks.add_provider(new_name, few_shot_form(task, config))
  return new_name


def few_shot_form(task: Any, config: FewShotConfig) -> Any:
  """Returns the form of a `seqio.Task` that has exemplars, not registered.

  Args:
    task: task whose preprocessors end in SeqIO's `tokenize`.
    config: exemplars and header, by the name of the task.

  Raises:
    UserError: the preprocessors make no text, the task has exemplars already,
      or its file of EXEMPLAR_FILES is none.
  """
  to_text, to_ids = split_at_tokenize(
    task, import_seqio(task.name, "few_shot_task")
  )
  if not to_ids:
    raise UserError(
      f"task {task.name!r} has no few-shot form: its preprocessors make no "
      "text; let them end in seqio.preprocessors.tokenize."
    )
  if any(map(adds_exemplars, to_text)):
    raise UserError(
      f"task {task.name!r} has exemplars already; name the task without them "
      "where a setting gives it others."
    )
  path, header = config.file_of(task.name), config.header_of(task.name)
  if path:
    exemplars = read_exemplars(path, config.num_shots)
  else:
    exemplars = SplitExemplars(task, to_text, config)
  add = []
  if config.num_shots or path or header:
    # Exemplars are added to texts, before `tokenize`, whatever the vocabulary.
    add.append(_Prompts(task.name, header, exemplars).add)
  return task.replace(
    name=_name_of_form(task.name, config),
    preprocessors=[*to_text, *add, *to_ids],
    # A model goes on with questions of its own, in the form of the exemplars.
    postprocess_fn=changed_outputs(
      task.postprocessor, lambda output: output.partition(SEPARATOR)[0]
    ),
  )


def adds_exemplars(step: Callable) -> bool:
  """Returns whether a preprocessor is what a few-shot form adds."""
  return isinstance(getattr(step, "__self__", None), _Prompts)


def _name_of_form(name: str, config: FewShotConfig) -> str:
  path, shots = config.file_of(name), config.num_shots
  new_name = name
  if not path or (shots is not None and format_of(path) == ".jsonl"):
    new_name += f"_{shots or 0}_shot"
  is_first = bool(shots) and config.exemplars == FIRST
  if config.seed and not path and not is_first:
    new_name += f"_seed_{config.seed}"
  # Its results are kept beside those of the registered form.
  if path or is_first or config.header_of(name):
    new_name += "_custom"
  return new_name


class _Prompts:
  """Inputs with a header, exemplars and the question, for one task."""

  def __init__(self, name: str, header: str, exemplars: Exemplars):
    self._name = name
    self._header = header
    self._exemplars = exemplars

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
    counts, most, num_short = [], 0, 0
    # Options of a question follow each other, and get the same exemplars: as
    # many of the first ones as fit before each option.
    for key, of_question in itertools.groupby(dataset, key_of):
      examples = list(of_question)
      asked = [e for e in examples if not e.get("unconditional", False)]
      group = group_of(examples[0])
      before = self._before(group)
      shots = self._exemplars.choose(key, group)
      count = min(
        (_how_many(before, shots, example, fits) for example in asked),
        default=len(shots),
      )
      counts.append(count)
      most = max(most, len(shots))
      num_short += count < len(shots)
      for example in examples:
        inputs = inputs_of(example)
        if not example.get("unconditional", False):
          inputs = _assemble(before, shots[:count], inputs)
        yield {**example, "inputs": inputs}
    if num_short:
      _logger.warning(
        f"{self._name}: {num_short:,} of {len(counts):,} questions have fewer "
        f"than {most} exemplars, at least {min(counts)}: no more fit "
        f"into {limit:,} tokens."
      )

  def _before(self, group: str) -> str:
    """Returns the header and the text before the exemplars of a group."""
    header = self._header
    if "{group}" in header:
      if not group:
        raise UserError(
          f"PROMPT_HEADERS: {header!r} of {self._name}, whose examples have no "
          "group; leave {group} out."
        )
      header = header.replace("{group}", group.replace("_", " "))
    header = header.rstrip("\n") + SEPARATOR if header else ""
    return header + self._exemplars.text


def _assemble(before: str, shots: Sequence[str], inputs: str) -> str:
  shots = [shot.strip("\n") for shot in shots]
  return before + SEPARATOR.join([*shots, inputs])


def _how_many(
  before: str,
  shots: Sequence[str],
  example: Mapping[str, Any],
  fits: Callable[[str, str], bool],
) -> int:
  """Returns the number of the first exemplars that fit before an example."""
  inputs, targets = inputs_of(example), text_of(example["targets"])

  def fit(count: int) -> bool:
    return fits(_assemble(before, shots[:count], inputs), targets)

  if fit(len(shots)):
    return len(shots)
  # By bisection: one fewer than the least number of exemplars that do not fit.
  too_many = bisect.bisect_left(
    range(len(shots)), True, lo=1, key=lambda count: not fit(count)
  )
  return too_many - 1


_logger = logging.getLogger(__name__)


def with_protocol(task: Any, config: TaskEvalConfig) -> Any:
  """Returns a `seqio.Task` in the form that its name has in the settings.

  Args:
    task: a registered task.
    config: settings of the evaluation.

  Raises:
    UserError: a setting does not suit the task.
  """
  name = task.name
  if config.few_shot.changes(name):
    task = few_shot_form(task, config.few_shot)
  pattern = (config.answer_patterns or {}).get(name)
  if pattern:
    if all(x.model_output_type.name == "SCORE" for x in task.metric_objs):
      raise UserError(
        f"ANSWER_PATTERNS: {name} compares likelihoods and has no output to "
        "search; leave it out."
      )
    task = task.replace(
      postprocess_fn=changed_outputs(task.postprocessor, answer_finder(pattern))
    )
  return task


def check_names(config: TaskEvalConfig, evaluated: Collection[str]) -> None:
  """Raises UserError if a setting names a task that is not registered.

  Args:
    config: settings of the evaluation.
    evaluated: names of the tasks of EVAL_TASKS, those of mixtures one by one.
  """
  for macro, by_task in {
    "EXEMPLAR_FILES": config.few_shot.exemplar_files,
    "PROMPT_HEADERS": config.few_shot.prompt_headers,
    "ANSWER_PATTERNS": config.answer_patterns,
    "CATEGORY_GROUPS": config.category_groups,
  }.items():
    for name in by_task or ():
      if name not in evaluated:
        find_provider(name, macro)
        _logger.warning(
          f"{macro}: {name} is no task of EVAL_TASKS, and its setting is "
          "not used"
        )


def changed_outputs(
  postprocess: Callable | None, change: Callable[[str], str]
) -> Callable:
  """Returns a postprocessor of outputs that are changed first.

  Args:
    postprocess: postprocessor of a `seqio.Task`, or None; changes that it
      already makes are made before this one.
    change: function of the output of a model; targets do not go through it.
  """
  if (
    isinstance(postprocess, functools.partial) and postprocess.func is _changed
  ):
    earlier, postprocess = postprocess.args
    return functools.partial(
      _changed, lambda output: change(earlier(output)), postprocess
    )
  return functools.partial(_changed, change, postprocess)


def _changed(
  change: Callable[[str], str],
  postprocess: Callable | None,
  output: Any,
  *,
  is_target: bool = False,
  **keywords: Any,
) -> Any:
  if not is_target and isinstance(output, str):
    output = change(output)
  elif not is_target and isinstance(output, list):  # several samples
    output = [change(text) for text in output]
  if postprocess is None:
    return output
  return postprocess(output, is_target=is_target, **keywords)


def answer_finder(pattern: str) -> Callable[[str], str]:
  """Returns a function that finds the answer in an output.

  Args:
    pattern: regular expression with one group, which is the answer. The first
      match counts; an output without one has the answer "".
  """

  def find(output: str) -> str:
    match = re.search(pattern, output)
    return (match[1] or "") if match else ""

  return find
