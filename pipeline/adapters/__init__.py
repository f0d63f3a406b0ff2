"""Models of torch, transformers and open_clip as block programs (docs/adapters.md)."""

from pipeline.adapters.assembly import Loss
from pipeline.adapters.generation import answer_inputs, causal_inputs, decoder_inputs
from pipeline.adapters.losses import SquaredError, TokenLoss, next_token_targets, squared_error, token_loss
from pipeline.adapters.prefix import Prefix, Projection
from pipeline.adapters.registry import program_of, supported
from pipeline.adapters.sequential import sequential
from pipeline.adapters.weights import from_original, load_original, original_names, to_original

__all__ = [
    "Loss",
    "Prefix",
    "Projection",
    "SquaredError",
    "TokenLoss",
    "answer_inputs",
    "causal_inputs",
    "decoder_inputs",
    "from_original",
    "load_original",
    "next_token_targets",
    "original_names",
    "program_of",
    "sequential",
    "squared_error",
    "supported",
    "to_original",
    "token_loss",
]
