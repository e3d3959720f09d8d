"""Virtual time: an event loop whose clock jumps, and an engine and a trainer that only sleep.

The orchestrator that runs in here is the real one.
"""
