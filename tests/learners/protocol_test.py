# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run's program has settings only: no code, no path, nothing unknown."""

import json

import numpy as np
import pytest

from palm_mtf.config import Config
from palm_mtf.config.macros import from_macros
from palm_mtf.learners.protocol import program_of, read_program
from tests.refusals import message_of
from tests.settings import SMALL

