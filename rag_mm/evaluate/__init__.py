"""Evaluation: answer held-out questions, compare with baselines, score the way official scorers do."""
