"""One of several processes that create the same objects: ``python -m tests.support.race URI NAME COUNT``.

Says "ready", waits for a line, then tries every key; prints the keys it won.
"""

import sys

from vllm_delta_snapshot.errors import ObjectExists
from vllm_delta_snapshot.store import open_store


def main(uri: str, name: str, count: int) -> None:
    """Run the race as `name`."""
    store = open_store(uri)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    won = []
    for number in range(count):
        try:
            store.create(f"race/{number}", name.encode())
        except ObjectExists:
            continue
        won.append(str(number))
    sys.stdout.write(" ".join(won) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
