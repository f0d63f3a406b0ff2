"""Kill it anywhere, lose nothing: measured."""
