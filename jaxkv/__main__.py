"""The command line: `jaxkv demo`, `jaxkv info`; also `python -m jaxkv`."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="jaxkv", description="KV cache between paged JAX arrays and pinned host memory."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo", help="a small model's KV leaves its pages, comes back elsewhere, and the model goes on"
    )
    demo.add_argument("--text", metavar="FILE", help="the text to prefill (default: the project's own README)")
    demo.add_argument("--json", action="store_true", help="print one JSON object as the last line")

    info = commands.add_parser("info", help="versions, devices, and which implementations there are")
    info.add_argument("--json", action="store_true", help="print one JSON object as the last line")

    args = parser.parse_args(argv)
    # Imported here: `jaxkv --help` should not wait for JAX.
    if args.command == "demo":
        from .demo import run

        return run(args.text, as_json=args.json)
    from .info import run as run_info

    return run_info(as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
