"""One compute thread per process and no network, for every test.

On a two-core machine one thread is faster than two (they fight over the cores,
and xdist runs two workers); the environment variables reach the ranks that tests
spawn. They are set before torch is imported, because OpenMP reads them once.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)
