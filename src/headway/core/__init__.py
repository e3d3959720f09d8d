"""The functional core: plain data and pure functions.

Nothing in here imports asyncio, time, random, logging or does I/O (`tests/test_architecture.py`).
"""
