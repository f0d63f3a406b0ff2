"""The towers of the dual encoder, one kind a file; `retriever.towers.interface` says what a kind has to be."""
