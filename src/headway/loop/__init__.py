"""The asyncio shell: tasks and queues around the pure core.

Parts do not know each other; `orchestrator.py` wires them. Only `ports.py` is known of the outside.
"""
