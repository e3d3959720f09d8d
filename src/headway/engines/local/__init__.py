"""The embedded engine: a small server over the continuous batching of transformers.

`python -m headway.engines.local --model DIR` serves a Hugging Face causal LM with the token-in,
token-out, pause, reload and version contract of vLLM, so that one client serves both. It needs no
GPU and no download.

    server.py      HTTP: parsing, refusing, answering
    service.py     requests, pauses and version stamps, on the event loop
    batching.py    the generation thread, and what may be done to it between two forward passes
    sampling.py    temperature per request, log-probabilities before or after it
    checkpoint.py  reading and checking a weights folder, then copying it into the model
"""
