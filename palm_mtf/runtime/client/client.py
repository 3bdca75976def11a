# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The client: runs programs on the devices of one TensorFlow session.

All programs are in one graph, so that they share variables and their values.
"""

import _thread
import concurrent.futures
import functools
import threading
import weakref
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from palm_mtf._tf import config_pb2, tf
from palm_mtf.runtime.program import Program

Inputs = Mapping[str, object]
_T = TypeVar("_T")


class Call(Future):
  """A future for a call of a program; its result is the program's outputs."""

  def __init__(self) -> None:
    super().__init__()
    # Done once the program starts, or fails before that. A call that reads this
    # call's results may start then: its servers wait for the results.
    self.begun: Future = Future()


class Client:
  """Runs programs in a session; a context manager, which closes the session.

  Attributes:
    graph: graph in which to build the client's programs.
    building: lock for adding operations while other threads run programs.
    take_turn: asks a scheduler to let a program start. Returns at once a
      context manager, which waits for the turn and for other futures.
    free: tells the scheduler that buffers of {device: bytes} were removed.
  """

  def __init__(self, session: tf.Session):
    """Takes a session, which the client closes."""
    self.graph, self._session = session.graph, session
    # TensorFlow frees a program's executors with the program's callable, so
    # keep no callable longer than its program.
    self._callables: weakref.WeakKeyDictionary[Program, Callable[..., Any]] = (
      weakref.WeakKeyDictionary()
    )
    self.take_turn: Callable[
      [Program, Collection[Future], Future | None], AbstractContextManager[None]
    ] = _start_after
    self.free: Callable[[Mapping[str, int]], None] = lambda _: None
    self.building = threading.RLock()
    self._lock = threading.Lock()
    # Unfinished calls, in order. A new call waits for those it conflicts with.
    self._calls: dict[Future, Program] = {}

  def __enter__(self) -> "Client":
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def close(self, secs: float = 10.0) -> None:
    """Closes the session; stops waiting for it after `secs` seconds."""
    # If a server has ended, `close` of a session never returns.
    closing = threading.Thread(target=self._session.close, daemon=True)
    closing.start()
    closing.join(secs)

  def run(
    self,
    program: Program,
    *inputs: Inputs,
    after: Sequence[Future] = (),
    **more: Any,
  ) -> Call:
    """Starts a call of a program in a new thread; returns the call.

    Args:
      program: program that was built in `graph`.
      inputs: values of the program's inputs, by name.
      after: futures that the call waits for. If a future fails, the call fails
        with the same error.
      more: `options`, `run_metadata` and `has_turn`, as in `call`.

    Raises UserError if an input is missing, or the program has no such input.
    """
    run, future = self._prepare(program, *inputs, after=after, **more)
    # Use a low-level thread: starting it does not wait until it runs, and it
    # does not keep this process alive if it waits for a lost server.
    _thread.start_new_thread(run, ())
    return future

  def call(self, program: Program, *inputs: Inputs, **more: Any) -> Any:
    """Runs a program and returns its outputs; arguments and errors as in `run`.

    `more` has `options` and `run_metadata`, as in `tf.Session.run`; and
    `has_turn`, true to start the program without asking the scheduler.
    """
    run, future = self._prepare(program, *inputs, **more)
    run()
    return future.result()

  def call_all(
    self,
    sequences: Iterable[Iterable[tuple[Program, Inputs, dict[str, Any]]]],
    turn: Program | None = None,
  ) -> list[list[Any]]:
    """Runs sequences of calls at the same time; returns the calls' outputs.

    A call's error is raised at once, because other calls may wait for the call.

    Args:
      sequences: for each sequence, the arguments of successive calls: program,
        inputs, and arguments of `call` that are given by name.
      turn: program for which the scheduler is asked once for all calls, because
        the calls wait for each other; None to ask for each call.
    """

    def run(calls: Iterable) -> list[Any]:
      return [self.call(x, y, has_turn=bool(turn), **z) for x, y, z in calls]

    with self.take_turn(turn, (), None) if turn else nullcontext():
      return at_same_time(functools.partial(run, x) for x in sequences)

  def _prepare(
    self,
    program: Program,
    inputs: Inputs = MappingProxyType({}),
    after: Sequence[Future] = (),
    has_turn: bool = False,
    **more: Any,
  ) -> tuple[Callable[[], None], Call]:
    """Returns a function that runs a program, and the `Call` of that run."""
    values = program.order_inputs(inputs)
    if program not in self._callables:
      self._callables[program] = self._make_callable(program)
    call = self._callables[program]
    future = Call()
    with self._lock:
      earlier = [
        x for x, other in self._calls.items() if program.conflicts_with(other)
      ]
      self._calls[future] = program
    take = _start_after if has_turn else self.take_turn
    # Ask the scheduler now, so that it gets the programs in the order of calls.
    # But if conflicting calls still run, ask after their end: a turn would keep
    # the devices from other programs meanwhile.
    turn = None if earlier else take(program, after, future.begun)

    def run() -> None:
      try:
        for each in earlier:
          each.result()  # raises the error of a call that has failed
        with turn or take(program, after, future.begun):
          future.begun.set_result(None)
          found = call(*values, **more)
        future.set_result(found)
      except BaseException as error:
        if not future.begun.done():
          future.begun.set_exception(error)
        future.set_exception(error)
      finally:
        with self._lock:
          del self._calls[future]

    return run, future

  def _make_callable(self, program: Program) -> Callable[..., Any]:
    """Returns a function that runs a program on values in the inputs' order."""
    placeholders, outputs = list(program.inputs.values()), program.outputs
    operations = list(program.operations)
    feed = [x.name for x in placeholders]
    fetch = [x.name for x in tf.nest.flatten(outputs)]
    is_slow = not (fetch or operations) or {*feed} & {*fetch}

    @functools.cache
    def make_fast() -> Callable[..., Any]:
      # TensorFlow's callable takes half a millisecond less than session.run.
      # Besides, each session.run adds all new operations of the graph to the
      # session, even those that another thread is still building.
      target = [x.name for x in operations]
      options = config_pb2.CallableOptions(
        feed=feed, fetch=fetch, target=target
      )
      with self.building:
        return self._session._make_callable_from_options(options)

    def call(*values: object, **more: Any) -> Any:
      if more or is_slow:
        fed = dict(zip(placeholders, values, strict=True))
        return self._session.run([outputs, operations], fed, **more)[0]
      found = make_fast()(*map(_convert, placeholders, values))
      return tf.nest.pack_sequence_as(outputs, found)

    return call


def at_same_time(functions: Iterable[Callable[[], _T]]) -> list[_T]:
  """Runs functions in a thread each; returns their results, in order.

  A function's error is raised at once, because other functions may wait for
  that function.
  """

  def run(future: "Future[_T]", function: Callable[[], _T]) -> None:
    try:
      future.set_result(function())
    except BaseException as error:
      future.set_exception(error)

  futures: list[Future[_T]] = []
  for function in functions:
    futures.append(Future())
    _thread.start_new_thread(run, (futures[-1], function))
  done, _ = concurrent.futures.wait(
    futures, return_when=concurrent.futures.FIRST_EXCEPTION
  )
  for each in done:
    each.result()
  return [x.result() for x in futures]


@contextmanager
def _start_after(
  unused: Program, after: Iterable[Future], begun: Future | None
) -> Iterator[None]:
  """Without a scheduler, waits only for `after`; raises a future's error."""
  for each in after:
    each.result()
  yield


def _convert(placeholder: tf.Tensor, value: object) -> np.ndarray:
  """Converts a value like session.run; raises ValueError for a wrong shape."""
  array = np.asarray(value, placeholder.dtype.as_numpy_dtype)
  if not placeholder.shape.is_compatible_with(array.shape):
    raise ValueError(f"{placeholder} is fed with shape {list(array.shape)}.")
  return array
