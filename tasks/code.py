# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks `humaneval` and `mbpp_3_shot`: programs that must pass tests.

from palm_mtf.tasks import code
from palm_mtf.tasks import records
records.places.folder = "/data/sets"   # humaneval/validation.jsonl, mbpp/...
code.programs.allowed = True
"""

# Records have the published form (Chen et al. 2021; Austin et al. 2021). As in
# PaLM (6.4), HumanEval has no exemplars and MBPP has three. pass@1 needs greedy
# decoding; pass@k needs NUM_SAMPLES = k, TEMPERATURE = 0.8 and TOP_P = 0.95.

import concurrent.futures
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import gin

from palm_mtf.errors import UserError
from palm_mtf.evaluation.few_shot import few_shot_task
from palm_mtf.machine.processors import usable_cores
from palm_mtf.tasks.code_execution import Limits, check_confined, run_program
from palm_mtf.tasks.fields import reads
from palm_mtf.tasks.prompts import paragraph
from palm_mtf.tasks.questions import Question, add_questions
from palm_mtf.tasks.records import RecordSource

_KS = (1, 10, 100)
# A function ends where other code begins at the left margin.
_AFTER_FUNCTION = re.compile(r"\n(?=class |def |#|@|if |print)")


@gin.configurable
def programs(
  allowed: bool = False,
  secs: float = Limits().secs,
  memory_bytes: int = Limits().memory_bytes,
  file_bytes: int = Limits().file_bytes,
) -> tuple[bool, Limits]:
  """Returns whether generated programs may be run, and their limits."""
  return allowed, Limits(secs, memory_bytes, file_bytes)


@reads(prompt=str, test=str, entry_point=str, canonical_solution=str)
def humaneval(record: dict) -> Iterator[Question]:
  """Asks for the body of a function, given its head and docstring."""
  # The "answers" are the text before the program and the text after it.
  tests = f"{record['test']}\ncheck({record['entry_point']})\n"
  yield Question(
    record["prompt"], record["canonical_solution"], [record["prompt"], tests]
  )


@reads(text=str, code=str, test_list=[str])
def mbpp(record: dict) -> Iterator[Question]:
  """Asks for a program, given a sentence and its tests."""
  # Empty lines are removed, because they separate exemplars and end the output.
  tests = "\n".join(record["test_list"])
  setup = record.get("test_setup_code", "")
  yield Question(
    f"# {' '.join(record['text'].split())}\n# It passes these tests:\n"
    + "".join(f"# {line}\n" for line in tests.splitlines()),
    f"{paragraph(record['code'])}\n",
    [f"{setup}\n", f"\n{tests}\n"],
  )


def read_function(output: str) -> str:
  """Returns the body of the function, without code after it."""
  return _AFTER_FUNCTION.split(output, maxsplit=1)[0]


def pass_at_k(
  targets: Sequence[Sequence[str]], predictions: Sequence[str | list[str]]
) -> dict[str, float]:
  """Runs all programs and returns pass@k, in percent.

  Args:
    targets: [problems] pairs: the text before a program, and the tests.
    predictions: [problems] programs, or lists of programs.
  """
  _check_allowed("pass_at_k")
  _, limits = programs()
  samples = [[p] if isinstance(p, str) else p for p in predictions]
  sources = [
    f"{before}{program}\n{tests}"
    for (before, tests), several in zip(targets, samples, strict=True)
    for program in several
  ]
  # Run one program per core at a time. Each thread waits for a program to end.
  with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
    outcomes = pool.map(lambda source: run_program(source, limits), sources)
    passed = [
      sum(
        outcome.passed for outcome in itertools.islice(outcomes, len(several))
      )
      for several in samples
    ]
  # Report each k for which every problem has at least k samples.
  fewest = min(map(len, samples))
  return {
    f"pass@{k}": 100
    * sum(
      estimate(len(several), count, k)
      for several, count in zip(samples, passed, strict=True)
    )
    / len(samples)
    for k in sorted({*_KS, fewest})
    if k <= fewest
  }


def estimate(num_samples: int, num_passed: int, k: int) -> float:
  """Returns the unbiased estimate of pass@k (Chen et al. 2021), from 0 to 1.

  Args:
    num_samples: number of programs that were run, at least k.
    num_passed: number of programs that passed.
    k: number of tries.
  """
  # 1 - C(n - c, k) / C(n, k). If n = k, as in PaLM, this is 1 if any passed.
  return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _check_allowed(name: str) -> None:
  allowed, limits = programs()
  if not allowed:
    raise UserError(
      f"task {name} runs programs that the model writes, which may do harm; if "
      "that is what you want, set --gin.code.programs.allowed=True."
    )
  check_confined(limits)


for _name, _prompt, _read, _splits in (
  ("humaneval", humaneval, read_function, ("validation",)),
  ("mbpp", mbpp, str.rstrip, ("train", "validation")),
):
  add_questions(
    _name,
    RecordSource(_name, None, dict.fromkeys(_splits, "")),
    _prompt,
    [pass_at_k],
    _read,
    _check_allowed,
  )
few_shot_task("mbpp", 3)
