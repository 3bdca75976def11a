# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Installs palm_mtf, the command `palm_mtf`, the gin folder and the tasks.

The gin folder is a part of the package through the link palm_mtf/gin, because a
top-level `gin` would overwrite the library of that name. Its folders are
packages, so that plain gin finds their files. The tasks are palm_mtf.tasks.
Exact versions that were tested together are in requirements.lock.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
  name="palm_mtf",
  version=re.search(
    r'^__version__ = "(.+)"$',
    (ROOT / "palm_mtf" / "__init__.py").read_text(encoding="utf-8"),
    re.MULTILINE,
  ).group(1),
  description="PaLM-style language models on Mesh TensorFlow, set up by gin",
  long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  author="The palm_mtf authors",
  license="Apache-2.0",
  license_files=["LICENSE"],
  classifiers=[
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
  ],
  # jax 0.10, which SeqIO brings, begins at 3.11; TensorFlow 2.21 ends at 3.13.
  python_requires=">=3.11,<3.14",
  packages=[
    *find_packages(include=["palm_mtf", "palm_mtf.*"]),
    "palm_mtf.gin",
    *(
      f"palm_mtf.gin.{x.parent.name}"
      for x in ROOT.glob("palm_mtf/gin/*/__init__.py")
    ),
    "palm_mtf.tasks",
  ],
  package_dir={"palm_mtf.tasks": "tasks"},
  package_data={
    "palm_mtf.gin": ["*/*.gin"],
    # Sources, which each machine compiles for its own CPU.
    "palm_mtf.native": ["*.cc", "*.h"],
    "palm_mtf.report": ["*.css"],
  },
  entry_points={
    "console_scripts": ["palm_mtf = palm_mtf.cli.main:main"],
    # lm-evaluation-harness looks for model types here.
    "lm_eval.models": ["palm_mtf = palm_mtf.lm_eval.model:PalmMtf"],
  },
  install_requires=[
    # Writes files for `palm_mtf export --format=gguf`.
    "gguf>=0.19,<0.20",
    "gin-config>=0.5.0,<0.6",
    # The manager of `palm_mtf pods manage`. TensorFlow depends on grpcio too;
    # the other package is small and needs nothing else.
    "grpcio>=1.67,<2",
    "grpcio-health-checking>=1.67,<2",
    "mesh-tensorflow>=0.1.21,<0.2",
    # NumPy's bfloat16; TensorFlow depends on it too.
    "ml_dtypes>=0.5,<1",
    "numpy>=2.1,<3",
    "rich>=13.7,<16",
    # Reads weights for `palm_mtf import`: 1.4 MB, without dependencies.
    "safetensors>=0.5,<0.9",
    "sentencepiece>=0.2.3,<0.3",
    "seqio>=0.0.20,<0.1",
    # mesh_tensorflow.transformer imports pkg_resources; setuptools 82 lacks it.
    "setuptools<82",
    # Not tensorflow-cpu: SeqIO installs tensorflow-text, which requires
    # tensorflow, and the two would overwrite each other.
    "tensorflow>=2.20,<2.22",
    # The tokenizer of a SavedModel.
    "tensorflow-text>=2.20,<2.22",
  ],
  extras_require={
    # Renders the chat templates of `palm_mtf generate --chat` and `serve`.
    "chat": ["jinja2>=3.1,<4"],
    # The compiler of TPUs, for `palm_mtf plan --compile`.
    "compile": ["jax>=0.10,<0.11", "libtpu>=0.0.42,<0.1"],
    # XLA's compiler for GPUs of NVIDIA, and NVIDIA's assembler, for the same.
    "compile_gpu": [
      "jax>=0.10,<0.11",
      "jax-cuda12-plugin>=0.10,<0.11",
      "nvidia-cuda-nvcc-cu12>=12.6.85,<13",
    ],
    # GPUs of NVIDIA and TPUs, which JAX runs.
    "cuda12": ["jax[cuda12]>=0.10,<0.11"],
    "tpu": ["jax[tpu]>=0.10,<0.11"],
    # `mkdocs serve` shows docs/ with these.
    "docs": ["mkdocs>=1.6,<2", "mkdocstrings[python]>=0.29,<2"],
    # Masks for answers in a form (JSON schemas and tools) of `palm_mtf serve`.
    "json": ["llguidance>=1.9,<2"],
    "lm_eval": ["lm_eval>=0.4.9,<0.5"],
    # `palm_mtf report` draws, and `sweep` fits its law, with these.
    "report": ["matplotlib>=3.10,<4", "scipy>=1.14,<2"],
    # The approximate search of `palm_mtf index build`, and the ranking of
    # passages.
    "retrieval": ["bm25s>=0.2,<0.4", "faiss-cpu>=1.10,<2"],
    # The HTTP server of `palm_mtf serve`.
    "serve": ["aiohttp>=3.14,<4"],
    # Signs exported folders. model-signing 1.1.1 imports pyOpenSSL without
    # requiring it.
    "sign": ["model-signing>=1.1,<2", "pyopenssl>=24"],
    # Imports of t5.data and t5.evaluation, without t5 itself, because every
    # release of t5 requires tfds-nightly, and since 0.9.4 seqio-nightly, which
    # overwrite tensorflow-datasets and seqio. docs/t5.md has the next command.
    "t5": [
      "absl-py",
      "babel>=2.10,<3",
      "editdistance>=0.6,<1",
      "immutabledict>=4,<5",
      "nltk>=3.8,<4",
      "pandas>=2.2,<4",
      "rouge-score>=0.1.2,<0.2",
      "sacrebleu>=2.3,<3",
      "scikit-learn>=1.5,<2",
      "scipy>=1.13,<2",
      "six>=1.16,<2",
    ],
    "tensorboard": ["tensorboard>=2.20,<3"],
    # VOCABULARY may be a tokenizer.json of Hugging Face's with this library.
    "tokenizers": ["tokenizers>=0.23,<0.24"],
    # Tests compare with these: clients of serve, and readers of exports.
    "test": [
      "aiohttp>=3.14,<4",
      "bm25s>=0.2,<0.4",
      "faiss-cpu>=1.10,<2",
      "hypothesis>=6.100",
      "jax>=0.10,<0.11",
      "jsonschema>=4.23,<5",
      "llguidance>=1.9,<2",
      "mypy>=2.4,<3",
      "openai>=3,<4",
      "optax>=0.2.8,<0.3",
      "packaging>=24",
      "pytest>=9,<10",
      "pytest-timeout>=2.4,<3",
      "ruff>=0.17.5,<0.18",
      "setuptools>=77",
      "tokenizers>=0.23,<0.24",
    ],
  },
)
