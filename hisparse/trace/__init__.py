"""Recorded selections, and what hot buffers of any size would have made of them.

A trace holds the top-k of every step, layer and request of a run. :func:`recording` writes one, :func:`replay` runs
the op's rules over it for each H, :func:`step_times` turns misses into time on a link. ``hisparse trace`` does it from
the command line.
"""

from .file import Trace, load, shipped
from .recorder import Recorder, recording
from .replay import Link, Replay, replay

__all__ = ["Link", "Recorder", "Replay", "Trace", "load", "recording", "replay", "shipped"]
