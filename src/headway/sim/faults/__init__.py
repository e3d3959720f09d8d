"""Runs that are broken on purpose: the real loop and the real run on disk, in virtual time.

A schedule (`schedule.py`, drawn by `draw.py`) is data: a configuration, and what goes wrong when in
which life of the run. `life.py` is one life, `run.py` all of them; `invariants.py` watches every
event and `truth.py` judges every end.
"""
