# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which command, or which group of commands, the first arguments name."""

from collections.abc import Sequence

from palm_mtf.cli.command import Command
from palm_mtf.cli.command_table import COMMANDS
from palm_mtf.errors import UserError, did_you_mean


def split_name(arguments: Sequence[str]) -> tuple[str, list[str]]:
  """Splits the name of a command, or of a group, from what follows it.

  The name is "" where the first argument is a flag.

  Raises:
    UserError: no command has this name; names the nearest one.
  """
  # At most two words before the first flag can be a name.
  words = []
  for word in arguments[:2]:
    if word.startswith("-"):
      break
    words.append(word)
  name = " ".join(words)
  if not words or name in COMMANDS or commands_in(name):
    return name, list(arguments[len(words) :])
  group = words[0]
  # Of a known group only its own commands are near.
  known = commands_in(group) if len(words) == 2 else {}
  if not known:
    if group in COMMANDS:  # a wrong argument follows, not a wrong name
      return group, list(arguments[1:])
    known = COMMANDS
    if not did_you_mean(name, (x for x in COMMANDS if " " in x)):
      name = group
  # Groups are nearest to a misspelt first word.
  names = dict.fromkeys([*known, *(each.split(" ")[0] for each in known)])
  raise UserError(
    f'unknown command "{name}"{did_you_mean(name, names)}. '
    f"Commands: {', '.join(known)}."
  )


def commands_in(group: str) -> dict[str, Command]:
  """Returns the commands of two words whose first is `group`, or all for ""."""
  return {
    name: command
    for name, command in COMMANDS.items()
    if not group or name.startswith(f"{group} ")
  }
