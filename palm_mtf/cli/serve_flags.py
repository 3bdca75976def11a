# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Flags of `palm_mtf serve`, as keywords of argparse."""

ALLOW_ANY_ADDRESS = {
  "action": "store_true",
  "help": "permit 0.0.0.0, every address of this host",
}

FLAGS = {
  "--listen": {
    "metavar": "ADDRESS:PORT",
    "default": "127.0.0.1:8000",
    "help": "of this host; port 0 is any that is free (default: "
    "127.0.0.1:8000)",
  },
  "--follow": {
    "action": "store_true",
    "help": "serve each newer checkpoint as soon as training has written it",
  },
  "--slots": {
    "metavar": "N",
    "type": int,
    "default": 16,
    "help": "completions that are computed together (default: 16)",
  },
  "--most_waiting": {
    "metavar": "N",
    "type": int,
    "default": 64,
    "help": "completions that may wait for a slot; more are refused "
    "(default: 64)",
  },
  "--most_secs": {
    "metavar": "SECS",
    "type": int,
    "default": 300,
    "help": "that a request may take; its text ends there (default: 300)",
  },
  "--api_key_file": {
    "metavar": "FILE",
    "help": "of API keys, one per line; a request must have one of them",
  },
  "--allowed_host": {
    "dest": "allowed_hosts",
    "metavar": "NAME",
    "action": "append",
    "default": [],
    "help": "answer requests with this name in the header Host too, which "
    "a proxy sends; may be repeated",
  },
  "--allow_any_address": ALLOW_ANY_ADDRESS,
}
