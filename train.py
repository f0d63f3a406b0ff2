"""``python train.py --config C``: train, or go on training."""

import sys

if __name__ == "__main__":
    try:
        from rag_mm.entry import main

        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # later, an interruption waits for the step and its checkpoint
        raise SystemExit("interrupted before training began") from None
