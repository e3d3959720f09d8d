"""Starting engines, keeping them alive, and connecting to those that run already.

`command.py` says how each kind is started, `ports.py` where, `fleet.py` does it.
"""

from headway.engines.launch.command import engine_command, engine_environment
from headway.engines.launch.fleet import Fleet, OnEvent, start_engines
from headway.engines.launch.ports import choose_ports

__all__ = [
    "Fleet",
    "OnEvent",
    "choose_ports",
    "engine_command",
    "engine_environment",
    "start_engines",
]
