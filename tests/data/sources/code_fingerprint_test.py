# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import functools
import os

from palm_mtf.data.sources.code_fingerprint import describe
from tests import processes


def add(value, *, more=1):
  return value + more


def adder(more):
  def add_more(value):
    return value + more

  return add_more


class Adder:
  def __init__(self, more):
    self.more = more

  def __call__(self, value):
    return value + self.more


def test_equal_code_has_equal_descriptions():
  assert describe(adder(1)) == describe(adder(1))
  assert describe(Adder(1)) == describe(Adder(1))
  assert describe(functools.partial(add, more=2)) == describe(
    functools.partial(add, more=2)
  )


def test_what_is_bound_closed_over_or_kept_makes_a_difference():
  values = [
    add,
    functools.partial(add, more=2),
    functools.partial(add, more=3),
    adder(1),
    adder(2),
    adder(adder(2)),
    Adder(1),
    Adder(2),
    [adder(1)],
    {"a": 1},
    {"a": "1"},
    {1, 2},
    (1, 2),
    None,
  ]
  assert len({describe(value) for value in values}) == len(values)


def test_another_body_and_another_default_make_a_difference(tmp_path):
  bodies = [
    "def f(x, y=1): return x",
    "def f(x, y=2): return x",
    "def f(x, y=1): return y",
  ]
  descriptions = set()
  for number, source in enumerate(bodies):
    path = tmp_path / f"{number}.py"
    path.write_text(source)
    for file in (str(path), "<stdin>"):  # in a shell there is no file
      names = {"__name__": "module"}
      exec(compile(source, file, "exec"), names)
      descriptions.add(describe(names["f"]))
  assert len(descriptions) == 6


def test_wrapped_functions_show_what_they_wrap():
  def wrap(function):
    @functools.wraps(function)
    def wrapped(*args):
      return function(*args)

    return wrapped

  assert describe(wrap(add)) != describe(wrap(os.path.join))
  assert "value + more" in describe(wrap(add))


def test_what_refers_to_itself_ends():
  def recursive(n):
    return recursive(n - 1) if n else 0

  assert "recursive(n - 1)" in describe(recursive)


def test_a_description_is_the_same_in_every_process():
  program = (
    "import functools, re\n"
    "from palm_mtf.data.sources.code_fingerprint import describe\n"
    "class Thing: pass\n"
    "def f(x=Thing()): return lambda: x\n"
    "print(describe([f, f(), functools.partial(f, {'a', 'b'}, y=Thing())]))"
  )
  outputs = {
    processes.python("-c", program, variables={"PYTHONHASHSEED": seed}).stdout
    for seed in "123"
  }
  assert len(outputs) == 1
  assert " at 0x" not in outputs.pop()
