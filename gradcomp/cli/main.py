"""``gradcomp COMMAND``, or ``python -m gradcomp COMMAND``."""

import sys

from gradcomp.cli import bench

COMMANDS = {"bench": bench.main}


def main(argv: list[str] | None = None) -> None:
    """Run the command that the first argument names."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in COMMANDS:
        COMMANDS[arguments[0]](arguments[1:])
        return
    print("usage: gradcomp bench [--help]    time of a training step under each hook, on this link; under torchrun", file=sys.stderr)
    raise SystemExit(0 if arguments[:1] in (["--help"], ["-h"]) else 2)
