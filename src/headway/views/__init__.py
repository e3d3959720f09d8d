"""What people see of a run: the terminal, the summary, and the report.

Views only read metric rows and `summary.json` (docs/metrics.md). Any key may be missing or null,
because a view must also show a run that crashed, or one of another version of Headway.
"""
