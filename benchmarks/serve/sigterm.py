"""SIGTERM at random moments under load: is any accepted request lost, over HTTP or gRPC?

    python -m benchmarks.serve.sigterm [--rounds 50]

Out: one line. Ends with a traceback at the first round that lost one.
"""

from __future__ import annotations

import argparse

from tests.serving.test_shutdown_load import one_round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    answered = sum(one_round(seed) for seed in range(rounds))
    print(f"{rounds} rounds, {answered} requests answered, none that was accepted lost")


if __name__ == "__main__":
    main()
