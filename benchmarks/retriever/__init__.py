"""Figures of `rag_mm` on data that its examples do not train on, beside baselines."""
