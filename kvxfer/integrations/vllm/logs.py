"""Where the connector's log lines go inside vLLM."""

from __future__ import annotations

import logging


def show_logs(level: str) -> None:
    """Give kvxfer's loggers vLLM's handlers, unless somebody has set up logging for them.

    vLLM has handlers for its own loggers only: the line that says which wire was chosen for a peer,
    and how fast it is, would not be seen. May be called again.
    """
    ours = logging.getLogger("kvxfer")
    if ours.hasHandlers():
        return
    if ours.level == logging.NOTSET:
        ours.setLevel(level)
    for handler in logging.getLogger("vllm").handlers:
        ours.addHandler(handler)
