"""The run on disk: its directory, its batches, its metric rows."""
