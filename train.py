"""``python train.py --config C``: train, or go on training."""

import os
import signal
import sys
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted before training began; run the same command again\n")
    os._exit(75)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # importing torch takes seconds; later, the trainer looks after them
        signal.signal(number, _end)
    from rag_mm.entry import main

    raise SystemExit(main(sys.argv[1:]))
