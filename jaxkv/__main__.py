"""The command line: `jaxkv demo`, `jaxkv info`, `jaxkv bench`; also `python -m jaxkv`."""

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

    bench = commands.add_parser("bench", help="ceilings, kernels and transfers, measured in one run")
    bench.add_argument("--quick", action="store_true", help="small shapes, in seconds, to see that it works")
    bench.add_argument("--json", metavar="FILE", help="write the figures to a file")
    bench.add_argument("--peer", choices=["lmcache"], help="measure an installed peer in the same run")

    bench.add_argument("--calibrate", action="store_true", help="print the Tuning that this machine asks for, no more")

    args = parser.parse_args(argv)
    # Imported here: what one command needs should not keep another from running.
    if args.command == "demo":
        from .demo import run

        return run(args.text, as_json=args.json)
    if args.command == "bench":
        from .bench.run import main as run_bench

        return run_bench(quick=args.quick, json_file=args.json, peer=args.peer, calibrating=args.calibrate)
    from .info import run as run_info

    return run_info(as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
