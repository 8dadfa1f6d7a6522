"""`infinilm info`: what a model is, without loading it."""

from __future__ import annotations

import argparse
from typing import Any

from infinilm.cli.options import MODEL_HELP


def add(commands: Any) -> None:
    """`infinilm info`"""
    command = commands.add_parser("info", help="what a model is and the memory it needs")
    command.add_argument("model", nargs="?", help=MODEL_HELP)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    from infinilm.hub import resolve

    path = resolve(options.model)
    from infinilm.checkpoint import open_checkpoint
    from infinilm.models.description import describe

    with open_checkpoint(path) as checkpoint:
        for name, value in describe(checkpoint).items():
            print(f"{name:14} {value}")
