"""The trainer's side: a client library for any training loop, and a reference trainer on it.

`client` and `link` are the two ends of the hand-off and need no torch; `loss`, `update` and
`reference` are the PyTorch trainer.
"""
