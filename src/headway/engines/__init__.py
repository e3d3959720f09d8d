"""Inference engines: the embedded one, the client of it and of vLLM, and the pool of many."""
