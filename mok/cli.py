"""The command line. Exit code 0 means that everything checked holds, 1 that something does not,
2 that the command could not run."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from rich.console import Console

from mok import processes
from mok.commands import (
    bench,
    bringup,
    capture,
    check,
    compile,
    demo,
    doctor,
    emulate,
    plan,
    replay,
    simulate,
    trace,
    tune,
    wave,
)
from mok.errors import MokError


class Command(Protocol):
    """A subcommand: a module of ``mok.commands``."""

    NAME: str
    HELP: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments."""

    def run(self, args: argparse.Namespace, progress: Console) -> dict[str, Any]:
        """Do the work and return the document that ``--json`` prints."""

    def passed(self, document: dict[str, Any]) -> bool:
        """Whether everything checked holds."""

    def show(self, document: dict[str, Any], console: Console) -> None:
        """Print the document for people."""


COMMANDS: tuple[Command, ...] = (
    demo, check, compile, bench, tune, wave, plan, simulate, trace, emulate, capture, replay, doctor,
    bringup,
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """One that says in JSON, too, what is wrong with the arguments; of several processes one does."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        if not processes.is_leader():  # all processes have the same arguments
            self.exit(2)
        if self.as_json:
            _print_error("UsageError", "the arguments must be those of the command", message,
                         f"See {self.prog} --help")  # fmt: skip
        super().error(message)


def build_parser(as_json: bool = False) -> Parser:
    """The parser of ``mok``, one subparser per command; ``as_json``: its errors are documents, too."""
    parser = Parser(prog="mok", description="Mixture-of-experts layers, one kernel per direction.")
    parser.as_json = as_json
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        sub.as_json = as_json
        command.configure(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON document instead")
        sub.set_defaults(implementation=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    args = build_parser("--json" in given).parse_args(given)
    command: Command = args.implementation
    progress = Console(stderr=True, quiet=not processes.is_leader())
    try:
        # With --json nothing but the document may reach standard output.
        guard = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
        with guard:
            ranks = command.NAME in ("demo", "check")
            with processes.joined() if ranks else contextlib.nullcontext():
                document = command.run(args, progress)
    except MokError as error:
        if args.json:
            _print_error(type(error).__name__, error.rule, str(error.value), error.remedy)
        progress.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 2
    if not processes.is_leader():
        return 0 if command.passed(document) else 1
    if args.json:
        print(json.dumps(_finite(document), allow_nan=False))
    else:
        command.show(document, Console())
    return 0 if command.passed(document) else 1


def _print_error(kind: str, rule: str, value: str, remedy: str) -> None:
    # Standard output has one document, the leader's; what another process alone met is still said.
    place = sys.stdout if processes.is_leader() else sys.stderr
    document = {"error": {"type": kind, "rule": rule, "value": value, "remedy": remedy}}
    print(json.dumps(document), file=place)


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null, and the entry's ``ok`` says the rest."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
