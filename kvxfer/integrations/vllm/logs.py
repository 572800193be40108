"""Where the connector's log lines go inside vLLM."""

from __future__ import annotations

import logging

PLAIN = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
"""Where vLLM was told to set up no logging."""


class _Through(logging.Handler):
    """Writes where another handler writes, in its format, whatever level that one has for its own
    loggers: vLLM's is ``VLLM_LOGGING_LEVEL``, ours is ``log_level``.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler

    def emit(self, record: logging.LogRecord) -> None:
        """Without the other's level; its filters and its lock count."""
        self._handler.handle(record)


def show_logs(level: str) -> None:
    """Let kvxfer's loggers be seen from ``level`` on. May be called again.

    vLLM has handlers for its own loggers only. A level or handlers that somebody has given
    kvxfer's loggers stay, and where the root logger has handlers, these get the lines.
    """
    ours = logging.getLogger("kvxfer")
    if ours.level == logging.NOTSET:
        ours.setLevel(level)
    if ours.hasHandlers():
        return
    for handler in logging.getLogger("vllm").handlers:
        ours.addHandler(_Through(handler))
    if not ours.handlers:
        plain = logging.StreamHandler()
        plain.setFormatter(logging.Formatter(PLAIN))
        ours.addHandler(plain)
    ours.propagate = False  # a handler that the root logger gets later would write them again
