# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The k-shot form of a SeqIO task: exemplars are put before each input.

  few_shot_task("my_task", 2)  registers "my_task_2_shot". It changes the
  example (inputs "Q: 5 + 4?\\nA:", targets " 9") to

  inputs  "Q: 1 + 1?\\nA: 2\\n\\nQ: 3 + 4?\\nA: 7\\n\\nQ: 5 + 4?\\nA:"
  targets " 9"

As in PaLM (section 6), a double line break separates examples, and the output
is truncated at its first double line break. If PROMPT_HEADERS has a header for
the task, the inputs begin with the header and a double line break.
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
  """Registers the few-shot form of a SeqIO task or mixture, unless it exists.

  Args:
    name: name of a registered task or mixture. The preprocessors of each task
      must end in SeqIO's `tokenize`, which `append_eos` may follow.
    num_shots: number of exemplars before each example, drawn from the training
      split. With 0, the form only truncates the model's output.
    seed: seed for drawing exemplars.

  Returns:
    The name of the form: "x_5_shot", or "x_5_shot_seed_7" if the seed is not 0.

  Raises:
    UserError: if there is no such task, `num_shots` is invalid, or the task's
      preprocessors make no text.
  """
  seqio = import_seqio(name, "few_shot_task")
  task = find_provider(name, "few_shot_task")
  config = FewShotConfig(num_shots=num_shots, seed=seed)
  new_name = _name_form(name, config)
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
  tasks.add_provider(new_name, make_few_shot(task, config))
  return new_name


def make_few_shot(task: Any, config: FewShotConfig) -> Any:
  """Returns a copy of a `seqio.Task` with exemplars, which is not registered.

  Raises:
    UserError: if the preprocessors do not end in SeqIO's `tokenize`, the task
      has exemplars already, or its file in EXEMPLAR_FILES cannot be read.
  """
  to_text, to_ids = split_at_tokenize(task)
  if not to_ids:
    raise UserError(
      f"task {task.name!r} has no few-shot form: its preprocessors make no "
      "text; let them end in seqio.preprocessors.tokenize."
    )
  if any(map(adds_exemplars, to_text)):
    raise UserError(
      f"task {task.name!r} has exemplars already; to set other exemplars, name "
      "the task without exemplars."
    )
  path, header = config.file_of(task.name), config.header_of(task.name)
  if path:
    exemplars = read_exemplars(path, config.num_shots)
  else:
    exemplars = Exemplars(SplitExemplars(task, to_text, config).choose)
  add = []
  if config.num_shots or path or header:
    # Add exemplars as texts, before `tokenize`, so that any vocabulary works.
    add.append(_Prompts(task.name, header, exemplars).add)
  return task.replace(
    name=_name_form(task.name, config),
    preprocessors=[*to_text, *add, *to_ids],
    # Truncate the output at the first SEPARATOR, because a model tends to write
    # more questions after its answer.
    postprocess_fn=change_outputs(
      task.postprocessor, lambda output: output.partition(SEPARATOR)[0]
    ),
  )


def adds_exemplars(step: Callable) -> bool:
  """Returns whether `step` is the preprocessor that `make_few_shot` adds."""
  return isinstance(getattr(step, "__self__", None), _Prompts)


def _name_form(name: str, config: FewShotConfig) -> str:
  path, shots = config.file_of(name), config.num_shots
  new_name = name
  if not path or (shots is not None and format_of(path) == ".jsonl"):
    new_name += f"_{shots or 0}_shot"
  is_first = bool(shots) and config.exemplars == FIRST
  if config.seed and not path and not is_first:
    new_name += f"_seed_{config.seed}"
  # "_custom" marks results with settings that `few_shot_task` does not have.
  if path or is_first or config.header_of(name):
    new_name += "_custom"
  return new_name


class _Prompts:
  """Joins header, exemplars and question to a task's inputs."""

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
    """Adds header and exemplars to `inputs`; this is a SeqIO preprocessor.

    `sequence_length["inputs"]` limits the total number of tokens in inputs and
    targets. The vocabulary of the feature "inputs" counts the tokens.
    """
    from palm_mtf._tf import tf

    limit = (sequence_length or {}).get("inputs")
    encode = output_features["inputs"].vocabulary.encode if limit else None

    def fits(inputs: str, targets: str) -> bool:
      return limit is None or len(encode(inputs) + encode(targets)) <= limit

    return tf.data.Dataset.from_generator(
      lambda: self._add_exemplars(dataset, fits, limit),
      output_signature=dataset.element_spec,
    )

  def _add_exemplars(
    self, dataset: Any, fits: Callable[[str, str], bool], limit: int | None
  ) -> Iterator[dict]:
    counts, most, num_short = [], 0, 0
    # The options of a question are adjacent examples. All options get the same
    # exemplars: as many as fit into `limit` together with the longest option.
    for key, of_question in itertools.groupby(dataset, key_of):
      examples = list(of_question)
      asked = [e for e in examples if not e.get("unconditional", False)]
      group = group_of(examples[0])
      before = self._make_beginning(group)
      shots = self._exemplars.choose(key, group)
      count = min(
        (_count_fitting(before, shots, example, fits) for example in asked),
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

  def _make_beginning(self, group: str) -> str:
    """Returns the header, and the text of an exemplar text file, if any."""
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


def _count_fitting(
  before: str,
  shots: Sequence[str],
  example: Mapping[str, Any],
  fits: Callable[[str, str], bool],
) -> int:
  """Returns the largest n for which the exemplars shots[:n] fit."""
  inputs, targets = inputs_of(example), text_of(example["targets"])

  def fit(count: int) -> bool:
    return fits(_assemble(before, shots[:count], inputs), targets)

  if fit(len(shots)):
    return len(shots)
  too_many = bisect.bisect_left(
    range(len(shots)), True, lo=1, key=lambda count: not fit(count)
  )
  return too_many - 1


def apply_protocol(task: Any, config: TaskEvalConfig) -> Any:
  """Applies the few-shot settings and answer pattern of `config` to a task.

  If `config` has neither for this `seqio.Task`, returns `task` itself.

  Raises:
    UserError: if a setting cannot be used with the task.
  """
  name = task.name
  if config.few_shot.changes(name):
    task = make_few_shot(task, config.few_shot)
  pattern = (config.answer_patterns or {}).get(name)
  if pattern:
    if all(x.model_output_type.name == "SCORE" for x in task.metric_objs):
      raise UserError(
        f"ANSWER_PATTERNS: {name} compares likelihoods and has no output to "
        "search; leave it out."
      )
    task = task.replace(
      postprocess_fn=change_outputs(
        task.postprocessor, make_answer_finder(pattern)
      )
    )
  return task


def check_names(config: TaskEvalConfig, evaluated: Collection[str]) -> None:
  """Checks the names of tasks in settings that map tasks to values.

  Warns of a task that is not in `evaluated`, the names of the tasks in
  EVAL_TASKS and its mixtures. Raises UserError if a task does not exist.
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
          f"{macro}: {name} is not in EVAL_TASKS, so its setting is not used"
        )


def change_outputs(
  postprocess: Callable | None, change: Callable[[str], str]
) -> Callable:
  """Returns a postprocessor that applies `change`, and then `postprocess`.

  Args:
    postprocess: postprocessor of a `seqio.Task`, or None. If this function made
      `postprocess`, the earlier change is applied before `change`.
    change: function that takes a model's output, but no target, and returns the
      changed output.
  """
  if (
    isinstance(postprocess, functools.partial)
    and postprocess.func is _postprocess
  ):
    earlier, postprocess = postprocess.args
    return functools.partial(
      _postprocess, lambda output: change(earlier(output)), postprocess
    )
  return functools.partial(_postprocess, change, postprocess)


def _postprocess(
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


def make_answer_finder(pattern: str) -> Callable[[str], str]:
  """Returns a function that finds the answer in a model's output.

  Args:
    pattern: regular expression with one group, which matches the answer. The
      first match counts; without a match, the answer is "".
  """

  def find(output: str) -> str:
    match = re.search(pattern, output)
    return (match[1] or "") if match else ""

  return find
