"""Section `store`: what a run keeps on disk, and for how long."""

from headway.config.base import Count, Section


class StoreConfig(Section):
    """What a run keeps in its directory. `weights.keep_last` and `actor.keep_checkpoints` say it of
    versions and checkpoints."""

    keep_batches: Count | None = None
    """Newest batch files that are kept; empty: all. Those that a resume from the oldest kept
    checkpoint needs stay in any case."""
    trace: bool = True
    """Write `trace.jsonl`, which `headway replay` and `headway plan` read: some hundred bytes per
    rollout."""
