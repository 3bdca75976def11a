# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes few-shot tasks, which put exemplars before each input of a SeqIO task.

  few_shot_task("my_task", 2)  registers "my_task_2_shot". It changes the
  example (inputs "Q: 5 + 4?\\nA:", targets " 9") to

  inputs  "Q: 1 + 1?\\nA: 2\\n\\nQ: 3 + 4?\\nA: 7\\n\\nQ: 5 + 4?\\nA:"
  targets " 9"

As in PaLM (section 6), a double line break separates examples, and the output
is truncated at its first double line break. If PROMPT_HEADERS has a header for
the task, the inputs begin with the header and a double line break.

Exemplars come from a user's file, or from the training split. EXEMPLARS says
how to choose from the split:

  "drawn"  each question has different exemplars, chosen by hashes
  "first"  all questions have the first examples of the split

A task's examples may have these features:

  record          identifies the question, whose options share exemplars
  is_correct      whether the example may be an exemplar
  exemplar_group  group, such as MMLU's subject, to choose exemplars from
  unconditional   whether the targets are scored without exemplars
"""

import bisect
import functools
import hashlib
import heapq
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf.config import TaskEvalConfig
from palm_mtf.config.task_eval import FIRST, FewShotConfig
from palm_mtf.data.sources.seqio_task import (
  apply_steps,
  find_provider,
  import_seqio,
  split_at_tokenize,
)
from palm_mtf.errors import UserError
from palm_mtf.user_text import check_text, format_of, read_json_lines, read_text

_logger = logging.getLogger(__name__)

SEPARATOR = "\n\n"
# Draw exemplars from this many examples: the split may not fit in memory.
_POOL = 1000


class Exemplars(NamedTuple):
  """The exemplars of one task, for all of its questions."""

  # Returns a question's exemplars, given a text that identifies the question,
  # and the question's group, such as a subject ("" if it has none).
  choose: Callable[[str, str], list[str]]
  text: str = ""  # text to put unchanged before every question


class _Exemplar(NamedTuple):
  key: str  # text that identifies the question
  group: str
  text: str  # inputs and targets


class SplitExemplars:
  """Exemplars from a task's training split, chosen as `config` says.

  `to_text` has the task's preprocessors before `tokenize`. They make the text
  features `inputs` and `targets`.
  """

  def __init__(
    self, task: Any, to_text: Sequence[Callable], config: FewShotConfig
  ):
    self._task, self._to_text, self._seed = task, to_text, config.seed
    self._num_shots = config.num_shots or 0
    self._is_first = config.exemplars == FIRST

  def choose(self, key: str, group: str) -> list[str]:
    """Returns the exemplars for the question with this key and group."""
    if not self._num_shots:
      return []
    # Exemplars may be from the evaluated split, so exclude the question itself.
    candidates = [e for e in self._pool if e.group == group and e.key != key]
    if len(candidates) < self._num_shots:
      where = f" of {group!r}" if group else ""
      raise UserError(
        f"{self._task.name}: NUM_SHOTS = {self._num_shots}, but split "
        f"{self._split!r} has only {len(candidates)} other examples{where}; "
        "give a smaller number."
      )
    # Sort by hash, so that exemplars differ between questions, but depend
    # neither on the machine nor on the order of questions. The PaLM paper does
    # not say how it chose exemplars.
    if not self._is_first:
      candidates.sort(key=lambda e: self._hash(key, e.key))
    return [exemplar.text for exemplar in candidates[: self._num_shots]]

  @functools.cached_property
  def _split(self) -> str:
    splits = [*self._task.splits]
    usual = [x for x in ("train", "validation", "test") if x in splits]
    return [*usual, *splits][0]

  @functools.cached_property
  def _pool(self) -> list[_Exemplar]:
    """The examples that may be exemplars, at most one per question."""
    if self._is_first:
      return list(self._find_first())
    chosen = heapq.nsmallest(
      _POOL, self._read_solved(), key=lambda e: self._hash(e.key, e.text)
    )
    return list({exemplar.key: exemplar for exemplar in chosen}.values())

  def _find_first(self) -> Iterator[_Exemplar]:
    keys, of_group = set(), Counter()
    for exemplar in self._read_solved():
      # Keep NUM_SHOTS + 1 per group: a question is no exemplar for itself.
      if exemplar.key in keys or of_group[exemplar.group] > self._num_shots:
        continue
      keys.add(exemplar.key)
      of_group[exemplar.group] += 1
      yield exemplar

  def _read_solved(self) -> Iterator[_Exemplar]:
    dataset = apply_steps(
      self._task,
      self._to_text,
      split=self._split,
      where=f"exemplars of {self._task.name}",
    )
    for example in dataset:
      # Only the correct option of a question may be an exemplar.
      if example.get("is_correct", True) and not example.get("unconditional"):
        text = inputs_of(example) + text_of(example["targets"])
        yield _Exemplar(key_of(example), group_of(example), text)

  def _hash(self, *texts: str) -> bytes:
    """Returns a pseudorandom sort key, which is the same in every process."""
    # With the lengths, ("ab", "c") and ("a", "bc") have different keys.
    digest = hashlib.blake2b(digest_size=8)
    for text in (str(self._seed), *texts):
      digest.update(f"{len(text)} {text}".encode())
    return digest.digest()


def key_of(example: Mapping[str, Any]) -> str:
  """Returns a text that all options of a question share, to group them."""
  return text_of(example.get("record", example["inputs"]))


def group_of(example: Mapping[str, Any]) -> str:
  """Returns the group of an example, or "" if it has none."""
  group = example.get("exemplar_group")
  return "" if group is None else text_of(group)


def inputs_of(example: Mapping[str, Any]) -> str:
  """Returns an example's inputs, ready to be followed by its targets."""
  return separate(text_of(example["inputs"]), text_of(example["targets"]))


def separate(inputs: str, targets: str) -> str:
  """Appends a line break if `targets` would follow `inputs` without space."""
  parted = not inputs or inputs[-1].isspace() or targets[:1].isspace()
  return inputs if parted else f"{inputs}\n"


def text_of(value: Any) -> str:
  """Decodes the UTF-8 of a scalar string tensor."""
  return value.numpy().decode("utf-8", "replace")


_MACRO = "EXEMPLAR_FILES"
_FORM = 'give {"inputs": "...", "targets": "..."}, and "group" if there are any'


def read_exemplars(path: str, num_shots: int | None) -> Exemplars:
  """Returns the exemplars in a file.

  Args:
    path: path of a file of JSON lines (.jsonl), or of a text file. The whole
      text of a text file precedes every question.
    num_shots: each question gets the first `num_shots` JSON lines of its group,
      or, if None, all JSON lines of its group.

  Raises:
    UserError: if the file cannot be read, or a line is not an exemplar.
  """
  what, needed = f"{_MACRO} = {path!r}", "write the exemplars"
  if format_of(path) != ".jsonl":
    text = read_text(path, what, needed)
    if not text.endswith(SEPARATOR if SEPARATOR in text else "\n"):
      _logger.warning(
        f"{_MACRO}: {path} does not end in an empty line, and the question "
        "follows its last character: end it as your protocol does"
      )
    return Exemplars(lambda key, group: [], text)
  lines = read_json_lines(path, what, _FORM, needed=needed)
  exemplars = [_parse_exemplar(fields, where) for _, where, fields in lines]

  def choose(key: str, group: str) -> list[str]:
    del key
    found = [text for of, text in exemplars if of in (None, group)]
    where = f" of group {group!r}" if group else ""
    if not found:
      raise UserError(f"{_MACRO}: {path} has no exemplar{where}; write some.")
    if len(found) < (num_shots or 0):
      raise UserError(
        f"{_MACRO}: NUM_SHOTS = {num_shots}, but {path} has only {len(found)} "
        f"exemplars{where}; give a smaller number."
      )
    return found[:num_shots]

  return Exemplars(choose)


def _parse_exemplar(
  fields: Mapping[str, object], where: str
) -> tuple[str | None, str]:
  """Returns (group, text) of an exemplar; group None is for all groups."""
  if not {"inputs", "targets"} <= {*fields} <= {"inputs", "targets", "group"}:
    raise UserError(f"{where} has the fields {sorted(fields)}; {_FORM}.")
  for name, text in fields.items():
    if not check_text(text, f"{where}: {name!r}", _FORM):
      raise UserError(f"{where}: {name!r} is empty; {_FORM}.")
  inputs, targets = fields["inputs"], fields["targets"]
  return fields.get("group"), separate(inputs, targets) + targets


def few_shot_task(name: str, num_shots: int, seed: int = 0) -> str:
  """Registers a task's or mixture's few-shot form, unless the form exists.

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

  Raises UserError if the preprocessors do not end in SeqIO's `tokenize`, the
  task has exemplars already, or its file in EXEMPLAR_FILES cannot be read.
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
    # Add exemplars before `tokenize`: as strings, they suit any vocabulary.
    add.append(_Prompts(task.name, header, exemplars).add)
  return task.replace(
    name=_name_form(task.name, config),
    preprocessors=[*to_text, *add, *to_ids],
    # Drop the further questions that a model tends to write after its answer.
    postprocess_fn=change_outputs(
      task.postprocessor, lambda output: output.partition(SEPARATOR)[0]
    ),
  )


def adds_exemplars(step: Callable) -> bool:
  """Returns whether a task's preprocessor adds exemplars to its inputs."""
  return isinstance(getattr(step, "__self__", None), _Prompts)


def _name_form(name: str, config: FewShotConfig) -> str:
  path, shots, new_name = config.file_of(name), config.num_shots, name
  if not path or (shots is not None and format_of(path) == ".jsonl"):
    new_name += f"_{shots or 0}_shot"
  is_first = bool(shots) and config.exemplars == FIRST
  if config.seed and not path and not is_first:
    new_name += f"_seed_{config.seed}"
  # "_custom" marks results with a file or header of the user, or with the first
  # exemplars, so that nobody takes them for results with drawn exemplars.
  if path or is_first or config.header_of(name):
    new_name += "_custom"
  return new_name


class _Prompts:
  """Joins header, exemplars and question to a task's inputs."""

  def __init__(self, name: str, header: str, exemplars: Exemplars):
    self._name, self._header, self._exemplars = name, header, exemplars

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
      asked = [e for e in examples if not e.get("unconditional")]
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
        if not example.get("unconditional"):
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
  """Returns how many of `shots` can stand before an example in the prompt.

  `fits` returns whether inputs and targets have few enough tokens together.
  """
  inputs, targets = inputs_of(example), text_of(example["targets"])

  def is_too_many(count: int) -> bool:
    return not fits(_assemble(before, shots[:count], inputs), targets)

  if not is_too_many(len(shots)):
    return len(shots)
  counts = range(len(shots))
  return bisect.bisect_left(counts, True, lo=1, key=is_too_many) - 1


def apply_protocol(task: Any, config: TaskEvalConfig) -> Any:
  """Applies the few-shot settings and answer pattern of `config` to a task.

  If `config` has none of these for this `seqio.Task`, returns `task` itself.

  Raises UserError if a setting cannot be used with the task.
  """
  name = task.name
  if config.few_shot.changes(name):
    task = make_few_shot(task, config.few_shot)
  if pattern := (config.answer_patterns or {}).get(name):
    if all(x.model_output_type.name == "SCORE" for x in task.metric_objs):
      raise UserError(
        f"ANSWER_PATTERNS: {name} compares likelihoods and has no output to "
        "search; leave it out."
      )
    finder = make_answer_finder(pattern)
    task = task.replace(
      postprocess_fn=change_outputs(task.postprocessor, finder)
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

  `postprocess` is a `seqio.Task`'s postprocessor, or None. If it already has a
  change from this function, the output gets that change first. `change` maps a
  model's output to the changed output; targets are not changed.
  """
  earlier = []
  if getattr(postprocess, "func", None) is _postprocess:
    earlier, postprocess = postprocess.args
  return functools.partial(_postprocess, [*earlier, change], postprocess)


def _postprocess(
  changes: Sequence[Callable[[str], str]],
  postprocess: Callable | None,
  output: Any,
  *,
  is_target: bool = False,
  **keywords: Any,
) -> Any:
  for change in () if is_target else changes:
    if isinstance(output, str):
      output = change(output)
    elif isinstance(output, list):  # one text per sample
      output = [change(text) for text in output]
  if postprocess is None:
    return output
  return postprocess(output, is_target=is_target, **keywords)


def make_answer_finder(pattern: str) -> Callable[[str], str]:
  """Returns a function that finds the answer in a model's output.

  The answer is the group of the first match of `pattern`; "" if none matches.
  """

  def find(output: str) -> str:
    match = re.search(pattern, output)
    return (match[1] or "") if match else ""

  return find
