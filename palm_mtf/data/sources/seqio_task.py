# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The sources of TASK: a SeqIO task, or each task of a SeqIO mixture.

Features "inputs" and "targets" become the inputs and text of a Document. The
final step `tokenize` is skipped, because the run's vocabulary encodes the text.
If other preprocessors make token ids, the ids are kept, and the run's
vocabulary must be the task's vocabulary (`check_vocabulary`). A feature
"messages", the JSON of a conversation's messages, takes the place of both. So
do "chosen" and "rejected", with "prompt" or "messages", each a text or JSON. A
feature "tools" is the JSON of a conversation's tools.
"""

import functools
import hashlib
import inspect
import itertools
import logging
import math
import re
import types

# Functions import seqio, because its import takes seconds. Functions of a task
# or step need no `import_seqio`, because the task's module has imported seqio.
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from palm_mtf import user_text
from palm_mtf.data.sources.conversation import (
  ANSWERS,
  MESSAGES,
  PROMPTS,
  TEXTS,
  TOOLS,
  parse_fields,
)
from palm_mtf.data.sources.document import (
  SPLITS,
  TRAIN,
  VALIDATION,
  Document,
  conversation_document,
  decode_text,
  hash_parts,
)
from palm_mtf.data.sources.files import FileDigests, describe_shards
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.user_code import user_code

_logger = logging.getLogger(__name__)


def split_at_tokenize(task: Any) -> tuple[list[Callable], list[Callable]]:
  """Returns the preprocessors that make text, and those that encode this text.

  Sources and filters run only the first list, and encode by the run's
  vocabulary; few-shot tasks add exemplars between the lists. If no step is
  `tokenize`, or a step after it changes token ids, the first list has all steps
  (its results are token ids), and the second list is empty.
  """
  import seqio

  steps = [
    step
    for step in task.preprocessors
    if not isinstance(step, seqio.CacheDatasetPlaceholder)
  ]
  kinds = seqio.preprocessors
  first = next((i for i, x in enumerate(steps) if _encodes(x)), None)
  # Split only if all later steps just add EOS. After other steps, such as T5's
  # split_tokens, the ids are no longer those of the text.
  if first is not None and all(
    _is_one_of(later, kinds.append_eos, kinds.append_eos_after_trim)
    for later in steps[first + 1 :]
  ):
    return steps[:first], steps[first:]
  return steps, []


def apply_steps(
  task: Any,
  steps: Iterable[Callable],
  *,
  split: str,
  where: str,
  sequence_length: Mapping[str, int] | None = None,
) -> Any:
  """Returns the tf.data.Dataset that `steps` make of a split, not shuffled.

  Messages of a step's errors begin with `where`. `sequence_length` maps a
  feature to its number of tokens, for steps that truncate token ids.
  """
  import seqio

  with seqio.map_seed_manager(0):  # equal seeds, so that examples do not vary
    dataset = task.source.get_dataset(split=split, shuffle=False)
    for step in steps:
      dataset = seqio.add_kwargs_to_transform(
        name_step_errors(step, where),
        sequence_length=sequence_length,
        output_features=task.output_features,
      )(dataset)
  return dataset


def read_examples(dataset: Any, where: str) -> Iterator[dict[str, Any]]:
  """Yields the elements of a tf.data.Dataset as NumPy values.

  Raises UserError if a preprocessor fails; the message begins with `where`.
  """
  with user_code(where):
    examples = dataset.as_numpy_iterator()
  while True:
    with user_code(where):
      example = next(examples, None)
    if example is None:
      return
    yield example


def name_step_errors(step: Callable, where: str) -> Callable:
  """Wraps a preprocessor: its errors begin with `where` and its name."""
  where = f"{where}: preprocessor {function_name(step)}"

  # `wraps` keeps the names of the parameters, which SeqIO inspects.
  @user_code(where)
  @functools.wraps(step)
  def named(*arguments: Any, **keywords: Any) -> Any:
    dataset = step(*arguments, **keywords)
    if not hasattr(dataset, "element_spec"):
      raise UserError(
        f"{where} returns {type_name(dataset)}; return a tf.data.Dataset."
      )
    return dataset

  return named


def function_name(function: Callable) -> str:
  """Returns the name of a function or other callable, for messages."""
  function = _unwrap(function)
  return getattr(function, "__qualname__", type(function).__name__)


def type_name(value: object) -> str:
  """Returns a value's type for messages, such as "a list"; "None" for None."""
  return "None" if value is None else f"a {type(value).__name__}"


def tokenizes(task: Any) -> bool:
  """Whether a step is SeqIO's `tokenize`; if not, the task makes token ids."""
  return any(map(_encodes, task.preprocessors))


def _encodes(step: Callable) -> bool:
  from seqio.preprocessors import tokenize, tokenize_and_append_eos

  return _is_one_of(step, tokenize, tokenize_and_append_eos)


def _is_one_of(step: Callable, *functions: Callable) -> bool:
  return any(_unwrap(step) is _unwrap(each) for each in functions)


def _unwrap(function: Any) -> Any:
  """Returns the function in partials and decorators (such as gin's)."""
  while True:
    if isinstance(function, functools.partial):
      function = function.func
    elif hasattr(function, "__wrapped__"):
      function = function.__wrapped__
    else:
      return function


def kind_of_feature(spec: Any) -> str:
  """Returns "text" or "ids"; for other tf.TensorSpecs, their dtype and rank."""
  if spec.dtype.name == "string" and spec.shape.rank == 0:
    return "text"
  if spec.dtype.is_integer and spec.shape.rank == 1:
    return "ids"
  return f"{spec.dtype.name} of rank {spec.shape.rank}"


# Number of documents per split that `has_inputs` and `fingerprint` read. More
# would slow every start of training.
_FIRST_DOCUMENTS = 32
_BATCH = 32  # documents per call of TensorFlow, which takes 0.1 ms
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the repr of an object


def open_task(
  name: str, validation_share: float, sequence_length: int | None = None
) -> list["SeqioTask"]:
  """Returns one source for a SeqIO task, or one source per task of a mixture.

  Args:
    validation_share: share of documents to hold out if a task has no
      validation split.
    sequence_length: SEQUENCE_LENGTH, for preprocessors that truncate token ids.

  Raises:
    UserError: SeqIO is missing, `name` is not registered, a rate cannot be
      computed, or a task has no train split.
  """
  seqio = import_seqio(name)
  provider = find_provider(name)
  tasks = seqio.get_subtasks(provider)
  rates = [1.0]
  if isinstance(provider, seqio.Mixture):
    with user_code(f"TASK = {name!r}: its rates"):
      rates = [float(provider.get_rate(task)) for task in tasks]
    if not all(0 <= x < math.inf for x in rates) or not sum(rates):
      raise UserError(
        f"TASK = {name!r}: its rates are {rates}; give finite rates of at "
        "least 0 that are not all 0."
      )
  return [
    SeqioTask(
      task,
      rate=rate / sum(rates),
      validation_share=validation_share,
      sequence_length=sequence_length,
    )
    for task, rate in zip(tasks, rates, strict=True)
    if rate
  ]


def find_provider(name: str, setting: str = "TASK") -> Any:
  """Returns the seqio.Task or seqio.Mixture `name`, which `setting` holds.

  Raises UserError if SeqIO is missing, or `name` is not registered.
  """
  seqio = import_seqio(name, setting)
  names = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
  if name not in names:
    raise UserError(
      f"{setting} = {name!r}: no such SeqIO task or mixture is registered"
      f"{did_you_mean(name, names)}; a line `import my_module` in a gin file "
      "registers the tasks of your module."
    )
  return seqio.get_mixture_or_task(name)


def check_ids(
  task: Any, features: Iterable[str], sha256: str | None, setting: str = "TASK"
) -> None:
  """Raises UserError unless a task's token ids are from the run's vocabulary.

  `sha256` is the hash of the run's vocabulary, or None if the run has not
  trained its vocabulary yet. `setting` holds the task's name, for messages.
  """
  for name in features:
    vocabulary = task.output_features[name].vocabulary
    path = getattr(vocabulary, "sentencepiece_model_file", None)
    if path is None:
      fix = f"is a {type(vocabulary).__name__}; end its steps in `tokenize`"
    elif _hash_vocabulary(vocabulary) != sha256:
      fix = f"is {path}; set VOCABULARY = {path!r}"
      if vocabulary.extra_ids:
        fix += f" and EXTRA_IDS = {vocabulary.extra_ids}"
    else:
      continue
    raise UserError(
      f"{setting}: the preprocessors of {task.name} make token ids, so the "
      f"run's vocabulary must be the task's, which {fix}, or give a task that "
      "makes text."
    )


class SeqioTask:
  """A Source of the documents of one SeqIO task.

  Documents with empty targets are skipped silently. Documents that are not
  UTF-8 or have a NUL are skipped and counted (`report_skipped`).
  """

  num_bytes = None  # SeqIO does not know the size of the text

  def __init__(
    self,
    task: Any,
    *,
    rate: float,
    validation_share: float,
    sequence_length: int | None,
  ):
    """Takes a `seqio.Task`; raises UserError if it has no "train" split."""
    self.name = task.name
    self.rate = rate
    self._task = task
    # The steps from `tokenize` on would load the task's vocabulary: omit them.
    self._steps, _ = split_at_tokenize(task)
    self._lengths = None
    if sequence_length:
      features = [f for f in ("inputs", "targets") if f in task.output_features]
      # Divide the length, because an example's inputs and targets share a row.
      length = sequence_length // max(1, len(features))
      self._lengths = dict.fromkeys(features, length)
    with user_code(f"TASK: the splits of {self.name}"):
      splits = list(task.splits)
    if TRAIN not in splits:
      raise UserError(
        f"TASK: {self.name} has no split {TRAIN!r}, only "
        f"{', '.join(map(repr, splits))}; give a task with one."
      )
    has_validation = VALIDATION in splits
    self._splits = SPLITS if has_validation else (TRAIN,)
    # Share of documents to hold out; None if the task has a validation split.
    self._share = None if has_validation else validation_share
    self._num_skipped = 0
    self._unread: Any = None  # the train split's dataset until it is read

  @property
  def has_inputs(self) -> bool:
    """Whether documents have inputs: true if any of the first documents has."""
    return self.form != TEXTS or any(
      d.inputs is not None and len(d.inputs) for d in self._first_documents
    )

  @property
  def form(self) -> str:
    """The form of all documents: that of the first."""
    first = self._first_documents
    return first[0].form if first else TEXTS

  def check_vocabulary(self, sha256: str | None) -> None:
    """Raises UserError if documents are token ids of another vocabulary."""
    is_text, eos_ids = self._features
    if not is_text:
      check_ids(self._task, eos_ids, sha256)

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash that changes with the documents; see `Source`."""
    # Hash local files, code, settings and the first documents. A change in a
    # remote file, or in a function that a preprocessor calls, is noticed only
    # if the first documents change too.
    source = self._task.source
    with user_code(f"TASK: {self.name}"):
      if hasattr(source, "fingerprint"):  # a source in tasks/ hashes itself
        parts = [source.fingerprint(digests)]
      else:
        inside = {**vars(source)}
        inside.pop("_split_to_filepattern", None)  # paths: files may move
        parts = [describe_code(type(source)), describe_code(inside)]
        for split in self._splits:
          shards = source.list_shards(split)
          parts += [split, *describe_shards(shards, digests)]
    parts += [describe_code(step) for step in self._steps]
    is_text, _ = self._features
    if not is_text:
      parts.append(repr(self._lengths))
    parts += [self.name, repr(self._share)]
    parts += [repr(document.rank) for document in self._first_documents]
    return hash_parts(parts)

  def documents(self) -> Iterator[tuple[str, Document]]:
    """Yields (split, document); see `Source`."""
    found, has_inputs = False, self.has_inputs  # which reads documents, too
    self._num_skipped = 0
    for split in self._splits:
      for number, document in enumerate(self._read(split)):
        if not has_inputs:
          if document.inputs is not None and len(document.inputs):
            raise UserError(
              f"TASK: {self.name}: example {number:,} of {split!r} has inputs, "
              "but the first have none; give all or none of them inputs."
            )
          document = document._replace(inputs=None)
        if document.form != self.form:
          raise UserError(
            f"TASK: {self.name}: example {number:,} of {split!r} has "
            f"{document.form}, but the first has {self.form}; give all "
            "examples one form."
          )
        found = True
        if self._share is not None:
          split = SPLITS[document.rank < self._share]
        yield split, document
    if not found:
      raise UserError(f"TASK: {self.name} has no document.")

  def report_skipped(self) -> None:
    """Warns how many documents the latest call of `documents` skipped."""
    if self._num_skipped:
      _logger.warning(
        f"{self._num_skipped:,} documents of task {self.name} left out (not "
        "UTF-8, or with a NUL or half a surrogate pair)."
      )

  @functools.cached_property
  def _first_documents(self) -> list[Document]:
    """Each split's first documents, read twice to check that they agree."""
    first, again = (
      [
        document
        for split in self._splits
        for document in itertools.islice(self._read(split), _FIRST_DOCUMENTS)
      ]
      for _ in range(2)
    )
    if [d.rank for d in first] != [d.rank for d in again]:
      raise UserError(
        f"TASK: {self.name} gives other documents each time it is read; let "
        "its preprocessors draw random numbers only from the seeds that "
        "seqio.map_over_dataset(num_seeds=...) gives them."
      )
    return first

  def _make_dataset(self, split: str) -> Any:
    from palm_mtf._tf import tf

    with tf.device("CPU:0"):  # not on a GPU, whose memory the model needs
      dataset = apply_steps(
        self._task,
        self._steps,
        split=split,
        sequence_length=self._lengths,
        where=f"TASK: {self.name}",
      )
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)

  @functools.cached_property
  def _features(self) -> tuple[bool, dict[str, int | None]]:
    """(whether features are texts, not ids; {feature: EOS id to strip})."""
    with user_code(f"TASK: {self.name}"):
      self._unread = self._make_dataset(TRAIN)
      specs = self._unread.element_spec
      if specs.keys() >= {*ANSWERS}:
        names = [*PROMPTS, *ANSWERS, TOOLS]
        return True, {x: None for x in names if x in specs}
      given = [x for x in (MESSAGES, "inputs", "targets") if x in specs]
      if given == [MESSAGES] and kind_of_feature(specs[MESSAGES]) == "text":
        return True, {x: None for x in (MESSAGES, TOOLS) if x in specs}
      if MESSAGES in given:
        raise UserError(
          f"TASK: {self.name} makes {', '.join(map(repr, given))}; let "
          f"{MESSAGES!r} be the JSON of a list of messages, without inputs and "
          "targets, or drop it."
        )
      if "targets" not in specs:
        raise UserError(
          f"TASK: {self.name} makes no feature 'targets', only "
          f"{', '.join(map(repr, specs))}; let a preprocessor rename one, as "
          "seqio.preprocessors.rekey does."
        )
      names = [name for name in ("inputs", "targets") if name in specs]
      kinds = {name: kind_of_feature(specs[name]) for name in names}
      if set(kinds.values()) not in ({"text"}, {"ids"}):
        raise UserError(
          f"TASK: {self.name} makes {kinds}; make all of them texts, or all of "
          "them token ids."
        )
      is_text = kinds["targets"] == "text"
      outputs = self._task.output_features
      eos_ids = {
        name: None if is_text else outputs[name].vocabulary.eos_id
        for name in names
      }
    return is_text, eos_ids

  def _read(self, split: str) -> Iterator[Document]:
    is_text, eos_ids = self._features
    where = f"TASK: {self.name}, split {split!r}"
    with user_code(where):
      # The train split's first read uses the dataset that `_features` made.
      # Other reads make a dataset, because some unseeded steps repeat their
      # random numbers within a dataset, which would hide that documents vary.
      dataset, self._unread = self._unread, None
      if split != TRAIN or dataset is None:
        dataset = self._make_dataset(split)
      dataset = dataset.map(lambda e: {name: e[name] for name in eos_ids})
      # Group texts into batches: TensorFlow takes 0.1 ms per value it returns.
      dataset = dataset.batch(_BATCH) if is_text else dataset
    numbers = itertools.count()
    for batch in read_examples(dataset, where):
      columns = [batch[name] for name in eos_ids]  # inputs (if any), targets
      for example in zip(*columns, strict=True) if is_text else [columns]:
        values = [
          decode_text(value) if is_text else _strip_eos(value, eos_id)
          for value, eos_id in zip(example, eos_ids.values(), strict=True)
        ]
        number = next(numbers)
        if any(value is None for value in values):
          self._num_skipped += 1
        elif not eos_ids.keys().isdisjoint((MESSAGES, *ANSWERS)):
          given = dict(zip(eos_ids, values, strict=True))
          read = parse_fields(given, f"{where}, example {number:,}")
          found = conversation_document(read)
          # JSON can escape what UTF-8 cannot hold.
          if user_text.is_text(found.text):
            yield found
          else:
            self._num_skipped += 1
        elif len(values[-1]):  # the targets are not empty
          yield Document(*reversed(values))


def _strip_eos(ids: np.ndarray, eos_id: int | None) -> np.ndarray:
  has_eos = len(ids) and ids[-1] == eos_id
  return np.asarray(ids[:-1] if has_eos else ids, np.int32)


def import_seqio(name: str, setting: str = "TASK") -> Any:
  """Returns the module seqio; raises UserError if it is missing.

  The message begins with `setting` and `name`, the task that needs SeqIO.
  """
  try:
    # Import seqio after palm_mtf._tf, which silences TensorFlow's notices.
    import palm_mtf._tf  # noqa: F401
    import seqio  # isort: skip
  except ImportError as error:
    raise UserError(
      f"{setting} = {name!r}: SeqIO cannot be imported: {error}; pip install "
      f"{error.name or 'seqio'}, see palm_mtf doctor, or use "
      f"{'TEXT_FILES' if setting == 'TASK' else 'no tasks'}."
    ) from error
  return seqio


def _hash_vocabulary(vocabulary: Any) -> str:
  """Returns a task vocabulary's SHA-256, to compare with Vocabulary.sha256."""
  from palm_mtf._tf import tf

  path = vocabulary.sentencepiece_model_file
  with user_code(f"TASK: its vocabulary {path}"):
    if vocabulary.extra_ids:
      return hashlib.sha256(vocabulary.sp_model).hexdigest()
    with tf.io.gfile.GFile(path, "rb") as file:
      return hashlib.sha256(file.read()).hexdigest()


def describe_code(value: object, within: tuple[int, ...] = ()) -> str:
  """Describes a function, or a value in it, to detect changes by a hash.

  The description is the same in all processes. It covers a function's source
  code, defaults, bound arguments and closure, but not what the function calls,
  reads from globals or files, or gets from gin. `within` has the `id` of each
  value that contains `value`.
  """
  if isinstance(value, _PLAIN):
    return repr(value)
  if id(value) in within:  # stop: a recursive function closes over itself
    return "itself"
  parts = [f"{type(value).__module__}.{type(value).__qualname__}"]
  within = (*within, id(value))
  parts += [describe_code(each, within) for each in _list_parts(value)]
  return f"({', '.join(parts)})"


def _list_parts(value: object) -> list[object]:
  if isinstance(value, (list, tuple)):
    return [*value]
  if isinstance(value, dict):
    return [part for pair in value.items() for part in pair]
  if isinstance(value, (set, frozenset)):
    return sorted(map(describe_code, value))  # the order of a set is arbitrary
  if isinstance(value, functools.partial):
    return [value.func, value.args, value.keywords]
  if isinstance(value, types.MethodType):
    return [value.__func__]
  if isinstance(value, types.FunctionType):
    cells = [_read_cell(cell) for cell in value.__closure__ or ()]
    return [_read_code(value), value.__defaults__, value.__kwdefaults__, cells]
  if isinstance(value, type):
    return [value.__module__, value.__qualname__, _read_code(value)]
  if isinstance(value, types.ModuleType):
    return [value.__name__]
  if callable(value) and hasattr(value, "__dict__"):
    return [type(value), vars(value)]
  return [_ADDRESS.sub("", repr(value))]


def _read_code(function: object) -> str:
  try:
    return inspect.getsource(function)
  except (OSError, TypeError):  # without a source file, use the bytecode
    code = getattr(function, "__code__", None)
    return _ADDRESS.sub("", repr(code and (code.co_code, code.co_consts)))


def _read_cell(cell: types.CellType) -> object:
  try:
    return cell.cell_contents
  except ValueError:  # the variable has no value yet
    return None
