"""The field's metrics as pure functions of strings, lists and arrays: no files, no models."""
