# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The client: runs programs on the devices of one TensorFlow session.

All programs of a client are built in one graph, so that they share variables,
which keep their values from one program to the next.
"""

import _thread
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.runtime.program import Program

Inputs = Mapping[str, object]


class Client:
  """Runs programs in a session; a context manager, which closes the session.

  Attributes:
    graph: graph in which to build the client's programs.
    take_turn: returns a context manager for the call of a program, which waits
      until the devices that other clients use too may run it.
  """

  def __init__(self, session: tf.Session):
    """Takes a session, which the client closes."""
    self.graph, self._session = session.graph, session
    # TensorFlow frees a program's executors with the program's callable.
    self._callables: weakref.WeakKeyDictionary[Program, Callable[..., Any]] = (
      weakref.WeakKeyDictionary()
    )
    self.take_turn: Callable[[Program], AbstractContextManager[None]] = (
      lambda _: nullcontext()
    )
    self._lock = threading.Lock()
    # Calls that have not ended, in the order in which they were made.
    self._calls: dict[Future, Program] = {}

  def __enter__(self) -> "Client":
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self, secs: float = 10.0) -> None:
    """Closes the session; stops waiting for it after `secs` seconds."""
    # If a server has ended, a session never closes.
    closing = threading.Thread(target=self._session.close, daemon=True)
    closing.start()
    closing.join(secs)

  def run(
    self,
    program: Program,
    *inputs: Inputs,
    after: Sequence[Future] = (),
    **more: Any,
  ) -> Future:
    """Starts a call of a program in a new thread.

    Args:
      program: program that was built in `graph`.
      inputs: values of the program's inputs, by name.
      after: the call waits for these, and fails with the error of one that
        fails.
      more: arguments of `call` that are given by name.

    Returns:
      A future of the program's outputs.

    Raises:
      UserError: an input is missing, or the program has no such input.
    """
    run, future = self._prepare(program, *inputs, after=after, **more)
    # Such a thread does not keep this process alive if it waits for a lost
    # server. threading.Thread would wait here until the new thread runs.
    _thread.start_new_thread(run, ())
    return future

  def call(self, program: Program, *inputs: Inputs, **more: Any) -> Any:
    """Runs a program, and returns its outputs.

    Args:
      program: program that was built in `graph`.
      inputs: values of the program's inputs, by name.
      more: `options` and `run_metadata`, as in `tf.Session.run`.

    Raises:
      UserError: an input is missing, or the program has no such input.
    """
    run, future = self._prepare(program, *inputs, **more)
    run()
    return future.result()

  def call_all(
    self,
    sequences: Iterable[Iterable[tuple[Program, Inputs, dict[str, Any]]]],
    turn: Program | None = None,
  ) -> list[list[Any]]:
    """Runs sequences of calls at the same time; returns their outputs.

    At once raises an error of any call, because others may wait for that call.

    Args:
      sequences: for each sequence, the arguments of successive calls: program,
        inputs, and arguments of `call` that are given by name.
      turn: program whose turn all calls share, because they wait for each
        other; None if each call takes a turn.
    """

    def run(future: Future, calls: Iterable) -> None:
      try:
        future.set_result(
          [self.call(x, y, has_turn=bool(turn), **z) for x, y, z in calls]
        )
      except BaseException as error:
        future.set_exception(error)

    with self.take_turn(turn) if turn else nullcontext():
      futures = []
      for calls in sequences:
        futures.append(Future())
        _thread.start_new_thread(run, (futures[-1], calls))
      done, _ = concurrent.futures.wait(
        futures, return_when=concurrent.futures.FIRST_EXCEPTION
      )
      for each in done:
        each.result()
      return [x.result() for x in futures]

  def _prepare(
    self,
    program: Program,
    inputs: Inputs = MappingProxyType({}),
    after: Sequence[Future] = (),
    has_turn: bool = False,
    **more: Any,
  ) -> tuple[Callable[[], None], Future]:
    """Returns a function that runs a program, and a future of the outputs."""
    call, values = self._make_callable(program), program.order_inputs(inputs)
    future: Future = Future()
    with self._lock:
      earlier = [
        x for x, other in self._calls.items() if program.conflicts_with(other)
      ]
      self._calls[future] = program

    def run() -> None:
      try:
        for each in (*earlier, *after):
          each.result()  # raises the error of a call that has failed
        with nullcontext() if has_turn else self.take_turn(program):
          future.set_result(call(*values, **more))
      except BaseException as error:
        future.set_exception(error)
      finally:
        with self._lock:
          del self._calls[future]

    return run, future

  def _make_callable(self, program: Program) -> Callable[..., Any]:
    if program not in self._callables:
      call = self._session.make_callable(
        [program.outputs, list(program.operations)],
        list(program.inputs.values()),
        accept_options=True,
      )
      self._callables[program] = lambda *fed, **more: call(*fed, **more)[0]
    return self._callables[program]
