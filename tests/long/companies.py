"""Random requests in company, and each of them alone: how many of their logits differ in a bit?

    python tests/long/companies.py                      100 schedules, on the form of our product that runs here
    python tests/long/companies.py --everywhere 1000    1,000 on each form that can run here

What a company is stands in `tests/lib/company.py`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "lib")]

from parts.device import mlx as device  # noqa: E402  first, as in a program of ours

# isort: split
from company import NONE, count, make_models, run_everywhere  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100, metavar="N")
    parser.add_argument(
        "--everywhere",
        type=int,
        metavar="N",
        help="N on each form that this machine can run, in turn",
    )
    parser.add_argument(
        "--at-once", type=int, default=2, metavar="N", help="so many of them at a time (default: 2)"
    )
    args = parser.parse_args()
    if args.everywhere:
        sys.exit(not run_everywhere(args.everywhere, args.at_once))
    with tempfile.TemporaryDirectory() as folder:
        models = make_models(Path(folder))
        # Four on each pair of engines, so that they find what the ones before have left.
        rounds = [min(4, args.schedules - done) for done in range(0, args.schedules, 4)]
        total = NONE
        for seed, many in enumerate(rounds):
            found = count(models, seed, many)
            for difference in found.differ:
                print(difference, file=sys.stderr, flush=True)
            total += found
    print(
        f"{device.blas}: {args.schedules} schedules, {total.compared:,} logit vectors, {total.beside:,} of them beside "
        f"a long neighbour, {total.read:,} read as prompts, "
        f"{total.masked:,} under a grammar, {total.reused:,} tokens reused, "
        f"{total.right:,} guesses right, {total.wrong:,} guesses wrong, {len(total.differ)} differ"
    )
    sys.exit(bool(total.differ))


if __name__ == "__main__":
    main()
