"""``python train.py --config C``: train, or go on training."""

import sys

from rag_mm.trainer import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
