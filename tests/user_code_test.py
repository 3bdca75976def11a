# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the user's code become one line; its prints go to stderr."""

import concurrent.futures
import sys
import threading

import pytest

from palm_mtf.errors import UserError
from palm_mtf.user_code import describe, user_code

# The form in which tf.data and AutoGraph report a Python exception.
FROM_TENSORFLOW = (
  "{{function_node __wrapped__IteratorGetNext_output_types_1_device_/job:"
  "localhost/replica:0/task:0/device:CPU:0}} ValueError: no such word\n"
  "Traceback (most recent call last):\n\n"
  '  File "/lib/python3.11/site-packages/tensorflow/script_ops.py", line 269, '
  "in __call__\n    return func(device, token, args)\n\n"
  '  File "/home/me/words.py", line 12, in look_up\n    raise ValueError\n\n\n'
  "\t [[{{node PyFunc}}]] [Op:IteratorGetNext] name: "
)
FROM_AUTOGRAPH = (
  "in user code:\n\n"
  '    File "/home/me/words.py", line 15, in cut  *\n'
  '        return example["text"]\n\n'
  "    KeyError: 'text'\n"
)


def refusal(error: BaseException) -> str:
  with pytest.raises(UserError) as info, user_code("TASK: mine"):
    raise error
  return str(info.value)


@pytest.mark.parametrize(
  ("error", "message"),
  [
    (
      RuntimeError(FROM_TENSORFLOW),
      "ValueError: no such word (/home/me/words.py:12, in look_up)",
    ),
    (
      RuntimeError(FROM_AUTOGRAPH),
      "KeyError: 'text' (/home/me/words.py:15, in cut)",
    ),
    (ValueError("one\n  two\t three."), "ValueError: one two three"),
    (ValueError(), "ValueError"),
    (ValueError("x" * 1000), f"ValueError: {'x' * 388} ..."),
  ],
  ids=["tf.data", "AutoGraph", "lines", "no message", "long"],
)
def test_the_message_is_one_line_with_the_users_own_line(error, message):
  assert describe(error) == message


def test_the_line_is_that_of_the_code_that_raised():
  def fails():
    raise LookupError("nothing")

  with pytest.raises(UserError) as info, user_code("TASK: mine"):
    fails()
  assert "TASK: mine: LookupError: nothing (tests/user_code_test.py:" in str(
    info.value
  )
  assert str(info.value).endswith(", in fails)")


def test_exit_is_refused_and_an_interruption_passes():
  assert refusal(SystemExit(3)).startswith("TASK: mine: SystemExit: 3 (")
  with pytest.raises(KeyboardInterrupt), user_code("TASK: mine"):
    raise KeyboardInterrupt


def test_an_error_for_the_user_passes_also_through_wrappers():
  right = UserError("records.jsonl:3: is no JSON object.")
  assert refusal(right) == str(right)
  wrapped = ValueError("Failed to evaluate")
  wrapped.__cause__ = right
  with pytest.raises(UserError, match=str(right)), user_code("TASK: mine"):
    exec(compile("raise error", "<string>", "exec"), {"error": wrapped})
  text = f"UnknownError: UserError: {right}\n\t [[{{{{node PyFunc}}}}]]"
  assert refusal(RuntimeError(text)) == str(right)


def test_prints_go_to_stderr_and_stdout_is_back_after_overlapping_calls(capsys):
  inside, leave = threading.Barrier(2, timeout=60), threading.Event()
  stdout = sys.stdout

  def first():
    with user_code("one"):
      inside.wait()
      leave.wait(60)
      print("of the user")

  with concurrent.futures.ThreadPoolExecutor() as pool:
    running = pool.submit(first)
    with user_code("two"):
      inside.wait()
    leave.set()
    running.result()
  assert sys.stdout is stdout
  assert capsys.readouterr() == ("", "of the user\n")
